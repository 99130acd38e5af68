"""GPU benchmark of the gated delta rule over a tree: fold and verify of one layer, beside chains, snapshots and torch.

    python examples/benchmarks/gated_delta.py

The shape is that of Qwen3.5-27B: 16 key heads, 48 value heads, 128 x 128. States, records and inputs are those of as
many layers as leave L2 between two calls of the same one. The op is compared with its reference before it is timed.
flash-linear-attention's recurrent kernel runs the same rows as a chain, if it is installed.
"""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import report
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from verify_attention import seconds

from specdec import ops

KEY_HEADS, HEADS, DIM = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
TAPS = 4
L2_BYTES = 300e6


def main() -> None:
    """Measures both batch sizes and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    nodes, speed = arguments.nodes, copy_bandwidth()
    figures = {"copy_bandwidth": report.figure(speed / 1e12, "TB/s", "reading and writing 2 GB each")}
    for batch in (1, 8):
        layers = Layers(batch, nodes)
        layers.check()
        label = f"t{nodes}.b{batch}"
        taken = seconds(layers.ours, turns=layers.count)
        print(f"{label}: {1e6 * taken:.2f} us", flush=True)
        figures |= {
            f"{label}.us": report.figure(1e6 * taken, "us", "fold and verify of one layer, in a graph"),
            f"{label}.over_state_io": report.figure(
                taken * speed / (2 * layers.state_bytes), "times", "reading and writing the state once"
            ),
            f"{label}.verify_only.us": report.figure(
                1e6 * seconds(layers.verify, turns=layers.count), "us", "nothing to fold"
            ),
            f"{label}.chain.us": report.figure(
                1e6 * seconds(layers.chain, turns=layers.count), "us", "the same, of a chain"
            ),
            f"{label}.convolution.us": report.figure(
                1e6 * seconds(layers.convolve, turns=layers.count), "us", "fold and convolution of one layer"
            ),
        }
        for name, run, against in (
            ("fla_chain", layers.fla(nodes), "flash-linear-attention's recurrent kernel over the same rows as a chain"),
            ("fla_snapshots", layers.fla(1), "the same row by row, which leaves a state for each"),
            ("transformers", layers.transformers, "transformers' torch path for several tokens"),
        ):
            if run is not None:
                theirs = seconds(run, turns=layers.count if batch == 1 else 4)
                figures[f"vs_{name}.{label}"] = report.figure(theirs / taken, "times", against)
                print(f"  {name}: {1e6 * theirs:.2f} us", flush=True)
    node = layers.record_bytes
    figures["record_bytes_per_node"] = report.figure(node, "bytes", "a layer and row, inputs of the convolution too")
    snapshot = 4 * HEADS * DIM * DIM + 2 * CHANNELS * TAPS
    figures["snapshot_bytes_per_node"] = report.figure(snapshot, "bytes", "float32 state and the last inputs")
    figures["record_bytes_over_snapshot_bytes"] = report.figure(node / snapshot, "times", "of one node")
    report.write("gated-delta", figures, device=torch.cuda.get_device_name())


class Layers:
    """Random states, inputs and records of several layers, and the ways to run a tree through one."""

    def __init__(self, batch: int, nodes: int) -> None:
        self.batch, self.nodes = batch, nodes
        self.state_bytes = 4 * batch * HEADS * DIM * DIM
        self.count = max(4, int(L2_BYTES / self.state_bytes) + 1)
        self.layers = [self._layer() for _ in range(self.count)]
        self.counts = torch.full((batch,), 4, device="cuda")
        size = torch.full((batch,), nodes, device="cuda")
        tree = [-1, *((node - 1) // 2 for node in range(1, nodes))]
        self.trees, self.chains = (
            ops.tree_layout(torch.tensor([parents], device="cuda").expand(batch, -1).contiguous(), size)[0]
            for parents in (tree, list(range(-1, nodes - 1)))
        )
        self.weight = torch.randn(CHANNELS, TAPS, device="cuda", dtype=torch.bfloat16)

    def _layer(self) -> dict[str, Any]:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(self.batch, *shape, device="cuda", dtype=dtype)

        mixed = normal(self.nodes, CHANNELS)
        query, key, value = mixed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], -1)
        records = [
            ops.DeltaRecord(
                normal(self.nodes, KEY_HEADS, DIM),
                0.1 * normal(self.nodes, HEADS, DIM, dtype=torch.float32),
                -normal(self.nodes, HEADS, dtype=torch.float32).abs().cumsum(1),
            )
            for _ in range(2)
        ]
        return {
            "rows": (
                query.unflatten(-1, (KEY_HEADS, DIM)),
                key.unflatten(-1, (KEY_HEADS, DIM)),
                value.unflatten(-1, (HEADS, DIM)),
                -normal(self.nodes, HEADS, dtype=torch.float32).abs(),
                normal(self.nodes, HEADS).sigmoid(),
            ),
            "state": normal(HEADS, DIM, DIM, dtype=torch.float32),
            "path": records[0],
            "out": records[1],
            "mixed": mixed,
            "history": normal(CHANNELS, TAPS),
            "inputs": [normal(self.nodes, CHANNELS) for _ in range(2)],
        }

    def _run(self, turn: int, words: Tensor, *, fold: bool = True, impl: ops.Impl = "triton") -> Tensor:
        layer = self.layers[turn % self.count]
        path = {"path": layer["path"], "counts": self.counts} if fold else {}
        return ops.gated_delta_tree(*layer["rows"], words, layer["state"], out=layer["out"], impl=impl, **path)[0]

    def ours(self, turn: int) -> Tensor:
        """Fold and verify of a tree."""
        return self._run(turn, self.trees)

    def verify(self, turn: int) -> Tensor:
        """Verify alone."""
        return self._run(turn, self.trees, fold=False)

    def chain(self, turn: int) -> Tensor:
        """Fold and verify of a chain."""
        return self._run(turn, self.chains)

    def convolve(self, turn: int) -> Tensor:
        """Fold and convolution."""
        layer = self.layers[turn % self.count]
        return ops.causal_conv_tree(
            layer["mixed"],
            self.weight,
            layer["history"],
            self.trees,
            path=layer["inputs"][0],
            counts=self.counts,
            out=layer["inputs"][1],
            impl="triton",
        )

    def check(self) -> None:
        """The kernel gives what the reference gives."""
        kept = self.layers[0]["state"].clone()
        found, state = self.ours(0), self.layers[0]["state"].clone()
        self.layers[0]["state"].copy_(kept)
        expected = self._run(0, self.trees, impl="reference")
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        torch.testing.assert_close(state, self.layers[0]["state"], rtol=1e-4, atol=1e-4)

    def fla(self, run: int) -> Callable[[int], Any] | None:
        """flash-linear-attention's recurrent kernel over so many rows at a time; None if it is not installed."""
        try:
            module = importlib.import_module("fla.ops.gated_delta_rule")
        except ImportError as error:
            print(f"no fla: {error}", flush=True)
            return None

        def chain(turn: int) -> None:
            layer = self.layers[turn % self.count]
            state = layer["state"]
            for rows in zip(*(part.split(run, 1) for part in layer["rows"]), strict=True):
                query, key, value, decay, beta = rows
                _, state = module.fused_recurrent_gated_delta_rule(
                    query.contiguous(),
                    key.contiguous(),
                    value.contiguous(),
                    g=decay.contiguous(),
                    beta=beta.contiguous(),
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )

        return chain

    def transformers(self, turn: int) -> None:
        """What a layer of transformers calls for several tokens, in plain torch."""
        layer = self.layers[turn % self.count]
        query, key, value, decay, beta = layer["rows"]
        rule: Any = modeling_qwen3_5.torch_chunk_gated_delta_rule
        rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=layer["state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    @property
    def record_bytes(self) -> int:
        """What a round keeps of a node of one layer and row."""
        layer = self.layers[0]
        parts = (layer["out"].keys, layer["out"].updates, layer["out"].decays, layer["inputs"][1])
        return sum(part.numel() * part.element_size() for part in parts) // (self.batch * self.nodes)


def copy_bandwidth() -> float:
    """Bytes per second of reading and writing a large tensor once, by a kernel: a copy in a graph is no kernel."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    taken = seconds(lambda _: torch.add(source, 1, out=target), turns=4)
    return 2 * source.numel() * 4 / taken


if __name__ == "__main__":
    main()
