"""GPU benchmark of whole rounds: wall time beside kernel time, the time to stream the weights, and `model.generate`.

    python examples/benchmarks/gpu_rounds.py --prompts spec_bench.jsonl

or part by part, `--part llama --save llama.json`, and then `--merge llama.json gemma.json smollm2.json`.

Three targets: SmolLM2-135M (real text; needs the `demo` extra), and random weights of the shape of a dense 8B Llama and
of Gemma-4-26B-A4B. How SmolLM2's texts compare with plain greedy decoding is part of the report.
"""

import argparse
import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import report
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig, LlamaConfig, LlamaForCausalLM

from specdec import SpeculativeGenerator, drafters, ops, trees
from specdec.hf import device_rounds

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 65_536,
}
GEMMA4_26B: dict[str, Any] = {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "vocab_size": 262_144,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 65_536,
}
KINDS = {
    "attention": ("_attend", "_combine"),
    "experts": ("_experts_product", "_experts_sum", "grouped", "group_gemm", "GroupProblemShape"),
    "weights": ("_skinny_product", "gemm", "nvjet", "cublas", "cutlass", "splitK", "gemv"),
}
"""Kinds of kernels, by parts of their names; the rest are small ones."""

FIRST, COUNT = 10, 30
"""Rounds before those that are timed, and how many these are."""

Figures: TypeAlias = Iterator[dict[str, Any]]
"""What a part measures, as it comes."""


def main() -> None:
    """Measures the parts that were asked for and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--prompts", type=Path, help="Spec-Bench questions, a JSON line each")
    parser.add_argument("--plain", action="store_true", help="without torch.compile")
    parser.add_argument("--save", type=Path, help="write raw results here instead of the report")
    parser.add_argument("--merge", type=Path, nargs="+", help="saved raw results to make the report from")
    arguments = parser.parse_args()
    raw: dict[str, Any] = {"figures": {}}
    if arguments.merge:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.merge]
        for part in parts:
            raw = {**part, "figures": raw["figures"] | part["figures"]}
        raw["revision"] = ", ".join(dict.fromkeys(part["revision"] for part in parts))
    else:
        torch.manual_seed(0)
        origin = {"device": torch.cuda.get_device_name(), "revision": report.REVISION, "versions": report.installed()}
        raw = {**origin, "figures": {}}
        raw["figures"]["read_bandwidth"] = report.figure(bandwidth() / 1e12, "TB/s", "a sum over 4 GB")
        for name in arguments.part or PARTS:
            for figures in PARTS[name](arguments):
                raw["figures"] |= figures
                if arguments.save:  # as they come: a run that is cut off still counts
                    arguments.save.write_text(json.dumps(raw), encoding="utf-8")
            torch.cuda.empty_cache()
    if not arguments.save:
        report.write("gpu-rounds", raw.pop("figures"), **raw)


def smollm2(arguments: argparse.Namespace) -> Figures:
    """SmolLM2 against its own generate, eager and with a compiled static cache."""
    from specdec.testing.smollm2 import load_smollm2

    model, tokenizer = load_smollm2()
    model = model.to(device="cuda", dtype=torch.bfloat16)
    texts = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [row["turns"][0] for row in texts if row["category"] in ("summarization", "rag")][::60][:3]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].cuda()
        for text in texts
    ]
    yield from against_generate("smollm2", model, prompts, new_tokens=512, compiled=not arguments.plain)


def against_generate(name: str, model: Any, prompts: list[torch.Tensor], *, new_tokens: int, compiled: bool) -> Figures:
    """Tokens per second of greedy text, beside `model.generate`; the texts are compared first."""
    model.generation_config.eos_token_id = None
    greedy = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    drafter = drafters.CombinedDrafter(drafters.SuffixDrafter(), drafters.PromptLookupDrafter())
    generator = SpeculativeGenerator(model, drafter=drafter, tree=trees.BestFirst(nodes=15), execution="device")
    if compiled:
        generator.compile()
    same, gaps, tokens_per_round, seconds = [], [0.0], [], {"eager": 0.0}
    type(model).generate(model, prompts[0], **{**greedy, "max_new_tokens": 8})  # warms up
    for prompt in prompts:
        ours = generator.generate(prompt, **greedy)
        start = time.perf_counter()
        plain = type(model).generate(model, prompt, **greedy).clone()
        torch.cuda.synchronize()
        seconds["eager"] += (time.perf_counter() - start) / new_tokens / len(prompts)
        differs = (ours != plain).any(0).nonzero()
        same.append(1.0 if len(differs) == 0 else (int(differs[0]) - prompt.shape[1]) / new_tokens)
        if len(differs):
            place = int(differs[0])
            with torch.no_grad():
                logits = model(plain[:, :place], logits_to_keep=1).logits[0, -1].float()
            gaps.append(float(logits.max() - logits[ours[0, place]]))
        tokens_per_round.append(generator.stats.tokens_per_round)
    yield {
        f"{name}.tokens_per_round": report.figure(sum(tokens_per_round) / len(prompts), "tokens", "prefill included"),
        f"{name}.widest_gap": report.figure(max(gaps), "logits", "the best one, where a text parts from plain"),
        f"{name}.equal_to_plain": report.figure(sum(same) / len(same), "share", "greedy tokens before the first other"),
    }
    yield rounds(name, generator, prompts[0], floor=None)
    static = {**greedy, "cache_implementation": "static"}
    type(model).generate(model, prompts[0], **static)  # compiles
    generator.generate(prompts[0], **greedy)
    for way, run in {
        "ours": lambda prompt: generator.generate(prompt, **greedy),
        "static": lambda prompt: type(model).generate(model, prompt, **static),
    }.items():
        seconds[way] = timed(run, prompts) / new_tokens
    print(name, {way: f"{1 / each:.1f} tokens/s" for way, each in seconds.items()}, flush=True)
    yield {
        f"{name}.vs_eager_generate": report.figure(
            seconds["eager"] / seconds["ours"], "times", "model.generate, eager, greedy"
        ),
        f"{name}.vs_static_compiled_generate": report.figure(
            seconds["static"] / seconds["ours"], "times", "generate, compiled static cache"
        ),
        f"{name}.tokens_per_second": report.figure(1 / seconds["ours"], "tokens/s", "wall time, prompt included"),
        f"{name}.static_tokens_per_second": report.figure(1 / seconds["static"], "tokens/s", "the same"),
    }
    for batch in (8, 32):
        rows = prompts[0].expand(batch, -1)
        generator.generate(rows, **greedy)  # captures
        rate = new_tokens * batch / timed(lambda prompt: generator.generate(prompt, **greedy), [rows])
        per_round = generator.stats.tokens_per_round
        yield {
            f"{name}.b{batch}.tokens_per_second": report.figure(rate, "tokens/s", "all rows, wall time"),
            f"{name}.b{batch}.tokens_per_round": report.figure(per_round, "tokens", "mean of the rows"),
        }
        yield rounds(f"{name}.b{batch}", generator, rows, floor=None)


def timed(run: Any, prompts: list[torch.Tensor]) -> float:
    """Mean seconds of a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt in prompts:
        run(prompt)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(prompts)


def shape(name: str, model: Any, nodes: int, compiled: bool, floor: Callable[[torch.Tensor], float]) -> Figures:
    """Rounds of a model with random weights at two lengths of context; `floor` tells the seconds of reading weights."""
    model.generation_config.eos_token_id = None
    for context in (1_024, 32_768):
        if context == 1_024:
            yield eager(name, model, nodes, context)
        generator = SpeculativeGenerator(model, tree=trees.BestFirst(nodes=nodes), execution="device")
        if compiled:
            generator.compile()
        prompt = torch.randint(1000, 100_000, (1, context), device="cuda")
        yield rounds(f"{name}.c{context}", generator, prompt, floor=floor(prompt) if context == 1_024 else None)


def eager(name: str, model: Any, nodes: int, context: int) -> dict[str, Any]:
    """One verify pass of plain transformers: eager, a `DynamicCache`, as many rows as a round has."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(1000, 100_000, (1, context), device="cuda"), cache=cache, logits_to_keep=1)
        rows = torch.randint(1000, 100_000, (1, nodes + 1), device="cuda")

        def verify() -> None:
            model(rows, cache=cache)

        verify()
        wall = timed(lambda _: verify(), [rows] * 5)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            verify()
            torch.cuda.synchronize()
    spans = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return {
        f"{name}.c{context}.eager.milliseconds": report.figure(1e3 * wall, "ms", "transformers, one verify pass"),
        f"{name}.c{context}.eager.wall_over_kernel": report.figure(wall / busy(spans), "times", "the same"),
    }


def rounds(name: str, generator: SpeculativeGenerator, prompt: torch.Tensor, floor: float | None) -> dict[str, Any]:
    """Wall time of steady rounds, and in the same request once more the time of their kernels, by kind."""
    request = steady(generator.tree.nodes)
    list(itertools.islice(generator.rounds(prompt, **request), FIRST))  # compiles and captures
    served = generator.rounds(prompt, **request)
    list(itertools.islice(served, FIRST))
    marks = [time.perf_counter(), *(time.perf_counter() for _ in itertools.islice(served, COUNT))]
    wall, each = (marks[-1] - marks[0]) / COUNT, sorted(map(float.__sub__, marks[1:], marks))
    program: Any = generator._programs._program
    while program.pending:
        program.read()
    device = replays(program, 10)
    served = generator.rounds(prompt, **request)
    list(itertools.islice(served, FIRST))
    torch.cuda.synchronize()  # rounds that were launched ahead; as many more are launched ahead at the end
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        list(itertools.islice(served, COUNT))
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    spans = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    for event in spans:
        kinds[_kind(event.name)] += event.time_range.elapsed_us() / 1e6 / COUNT
    kernels, launches = busy(spans) / COUNT, len(spans) / COUNT
    print(
        name,
        f"wall {1e3 * wall:.3f} ms, middle {1e3 * each[COUNT // 2]:.3f}, slowest {1e3 * each[-1]:.3f};"
        f" kernels {1e3 * kernels:.3f} ms, {launches:.0f} launches",
        flush=True,
    )
    for event in sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)[:8]:
        print(f"    {event.device_time_total / COUNT:9.1f} us {event.count / COUNT:7.1f}  {event.key[:90]}")
    figures = {
        f"{name}.wall_over_kernel": report.figure(wall / kernels, "times", "time in which a kernel runs"),
        f"{name}.milliseconds": report.figure(1e3 * wall, "ms", "wall time of a round"),
        f"{name}.middle_milliseconds": report.figure(1e3 * each[COUNT // 2], "ms", "the middle one of these rounds"),
        f"{name}.device_milliseconds": report.figure(1e3 * device, "ms", "rounds one after the other, no host between"),
        f"{name}.launches": report.figure(launches, "kernels", "a round"),
    }
    for kind, seconds in kinds.items():
        figures[f"{name}.share.{kind}"] = report.figure(seconds / sum(kinds.values()), "share", "of kernel times")
    if floor is not None:
        figures[f"{name}.wall_over_floor"] = report.figure(wall / floor, "times", "streaming the weights once")
    return figures


def steady(nodes: int) -> dict[str, Any]:
    """A request with tokens left when the rounds are profiled.

    Where nothing may be committed, the tree is empty, and the rows of an empty tree are all alike, which few experts
    serve.
    """
    return {"max_new_tokens": 100 * (nodes + 1), "do_sample": False, "pad_token_id": 0}


def replays(program: Any, count: int) -> float:
    """Seconds of a round on the device, launched several at a time."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        program._graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def busy(spans: list[Any]) -> float:
    """Seconds in which at least one kernel runs: one that is launched early waits while another runs."""
    total, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.time_range.start):
        total += max(0.0, span.time_range.end - max(end, span.time_range.start))
        end = max(end, span.time_range.end)
    return total / 1e6


def _kind(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "small")


def llama(arguments: argparse.Namespace) -> Figures:
    """A dense 8B Llama, 16 rows."""
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**LLAMA_8B), dtype=torch.bfloat16).eval()
    read = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n) * 2
    yield from shape("llama_8b_shape", model, 15, not arguments.plain, lambda _: read / bandwidth())


def gemma(arguments: argparse.Namespace) -> Figures:
    """Gemma-4-26B-A4B, 7 rows; of the experts, those that the rows of its rounds touch."""
    with torch.device("cuda"):
        model = Gemma4ForCausalLM._from_config(Gemma4TextConfig(**GEMMA4_26B), dtype=torch.bfloat16).eval()
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    dense = sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    touched: list[float] = []

    def floor(prompt: torch.Tensor) -> float:
        touched.append(experts_touched(model, 6, prompt))
        return 2 * (dense + touched[0] / GEMMA4_26B["num_experts"] * experts) / bandwidth()

    yield from shape("gemma4_26b_shape", model, 6, not arguments.plain, floor)
    counted = report.figure(touched[0], "experts", "128, mean over layers and the rounds that are timed")
    yield {"gemma4_26b_shape.experts_touched": counted}


def experts_touched(model: Any, nodes: int, prompt: torch.Tensor) -> float:
    """Mean number of experts that a layer reads in the rounds that are timed, which run step by step for that."""
    seen: list[int] = []
    kernel = ops.routed_experts

    def counted(hidden: torch.Tensor, chosen: torch.Tensor, *weights: Any, **options: Any) -> torch.Tensor:
        seen.append(chosen.unique().numel())
        return kernel(hidden, chosen, *weights, **options)

    generator = SpeculativeGenerator(model, tree=trees.BestFirst(nodes=nodes), execution="device").compile()
    stepped = functools.partial(device_rounds.device_rounds, capture=False)
    with mock.patch.object(device_rounds, "device_rounds", stepped), mock.patch.object(ops, "routed_experts", counted):
        served = generator.rounds(prompt, **steady(nodes))
        list(itertools.islice(served, FIRST + COUNT))
    # The prompt is the first of them and is left to the model; more rounds are launched than are served.
    first, last = ((rounds - 1) * model.config.num_hidden_layers for rounds in (FIRST, FIRST + COUNT))
    return sum(seen[first:last]) / (last - first)


def bandwidth() -> float:
    """Bytes per second of reading a large tensor once."""
    data = torch.ones(2**30, device="cuda")
    data.sum()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        data.sum()
    end.record()
    end.synchronize()
    return data.numel() * 4 * 10 / (start.elapsed_time(end) / 1e3)


PARTS = {"smollm2": smollm2, "llama": llama, "gemma": gemma}

if __name__ == "__main__":
    main()
