"""Serving a request by device rounds: the host launches them, reads what they committed, and keeps the ledger.

The device knows stop tokens and the length limit, so it never waits. Every other stopping criterion is asked here, per
token and with the true prefix, a round or two late; what a row committed beyond its stop is not looked at.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig

from specdec import ops
from specdec.control import Always
from specdec.drafters.on_device import DeviceLookup
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf import support
from specdec.hf.device_block import DeviceBlock
from specdec.hf.device_draft import DeviceChain, Draft, device_form
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.ledger import PREFIX_FREE, TokenLedger
from specdec.hf.round_program import AHEAD, Choose, RoundProgram, RoundRecord, capacity
from specdec.hf.target import ModelTarget
from specdec.protocols import Controller, Drafter, TreeBuilder, Verifier
from specdec.types import DraftTree, Round, StageTimes
from specdec.verify import TargetOnly


class Programs:
    """The program of the last request, kept for the next one that has the same shape.

    Its graph was captured with the addresses of the weights and the options of the request, so all of these count.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._key: Any = None
        self._program: RoundProgram | None = None

    def get(
        self,
        target: ModelTarget,
        ledger: TokenLedger,
        draft: Draft,
        choose: Choose,
        *,
        generator: torch.Generator | None,
        capture: bool,
        compiled: bool,
    ) -> RoundProgram:
        """A program that holds what the prompt left, with room for the whole request."""
        device, batch = target.model_device, ledger.active.shape[0]
        text = ledger.sequences().to(device)
        longest = max(int(target.lengths.max()), text.shape[1]) + int(ledger.remaining.max())
        slots = capacity(longest, draft.nodes + 1)
        stops = ledger.stop_tokens
        state = ops.TextState(
            tokens=torch.nn.functional.pad(text, (0, slots - text.shape[1])),
            lengths=torch.full((batch,), text.shape[1], dtype=torch.int64, device=device),
            cached=target.lengths.to(device, copy=True),
            positions=target.next_position.to(device, copy=True),
            remaining=ledger.remaining.to(device),
        )
        # Merged projections are copies, which a change in place would leave behind.
        weights = tuple(
            (weight.data_ptr(), weight._version if compiled and not weight.is_inference() else 0)
            for weight in target.model.parameters()
        )
        processors = tuple((type(item), _contents(item)) for item in ledger.processors)
        starts = None if target.starts is None else target.starts.to(device, copy=True)
        codecs: tuple[Any, ...] = tuple(
            rows.codec for layer in target.cache.row_layers for rows in layer.stored.values()
        )
        codecs += tuple(layer.state.dtype for layer in target.cache.recurrent.layers)
        key = (
            (batch, slots, draft, starts is None, tuple(stops), ledger.do_sample),
            (processors, id(generator), capture, compiled, weights, codecs),
        )
        impl: ops.Impl = target.impl or "auto"
        kept = self._program if key == self._key else None
        if kept is None:
            self._key = self._program = None  # its buffers make room for the new ones
        else:
            draft = kept.draft
        if isinstance(draft, DeviceBlock):
            draft.prepare(ledger.draft_context(target), slots)
        if isinstance(draft, DeviceChain):
            context = ledger.draft_context(target)
            draft.prepare(context.tokens.to(device), context.mask.to(device), slots, target.vocab_size, impl)
        if kept is not None:
            kept.load(target.cache, state, starts)
            return kept
        cache = FixedCache(target.cache, width=draft.nodes + 1, capacity=slots, starts=starts)
        self._program = RoundProgram(
            target.model,
            cache,
            state,
            draft,
            choose,
            stops=torch.tensor(stops, dtype=torch.int64, device=device),
            position_limit=support.position_limit(target.model.config),
            impl=impl,
            capture=capture and device.type == "cuda",
            compiled=compiled,
            generator=generator,
        )
        self._key = key
        return self._program


def _contents(processor: Any) -> tuple[Any, ...]:
    """What a processor was made with, to compare by."""
    return tuple(
        (name, value.flatten().tolist() if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(vars(processor).items())
    )


def check_compilable(execution: str) -> None:
    """Raises where no device rounds are run, which is all that `SpeculativeGenerator.compile` compiles."""
    if execution == "host":
        raise UnsupportedError(
            "compile() is for device rounds, and execution='host' runs none. Make the generator with "
            "execution='device' or 'auto'; for rounds of the host, give it torch.compile(model)."
        )


def obstacle(
    target: ModelTarget,
    ledger: TokenLedger,
    drafter: Drafter,
    tree: TreeBuilder,
    verifier: Verifier,
    controller: Controller,
    nodes: int,
    config: GenerationConfig,
) -> str:
    """Why a request cannot be served by device rounds; an empty string if it can."""
    strangers = [type(item).__name__ for item in ledger.processors if type(item) not in PREFIX_FREE]
    if type(verifier) is not TargetOnly:
        return f"{type(verifier).__name__} decides on the host; device rounds verify by verify.TargetOnly"
    if type(controller) is not Always:
        return f"{type(controller).__name__} chooses another budget each round; device rounds keep theirs"
    if strangers:
        return f"{', '.join(strangers)} must see the prefix of each token"
    if config.return_dict_in_generate:
        return "only token ids are returned from device rounds (return_dict_in_generate=True asks for more)"
    if ledger.lockstep:
        return (
            "rows of a batch end by stop tokens (eos_token_id=), and with these also by time limits and stop strings; "
            "criteria and processors of your own see the batch token by token"
        )
    if nodes < 1:
        return "nothing is to be drafted"
    if target.device_obstacle:
        return target.device_obstacle
    if not target.cache.own:
        return "layers that share keys and values with another layer are not served"
    try:
        form = device_form(drafter, tree, nodes)
    except UnsupportedError as error:
        return str(error).rstrip(".")
    models = [target.model] if isinstance(form, DeviceLookup) else [target.model, form.model]
    if any(weight.device != target.model_device for model in models for weight in model.parameters()):
        return "its weights are on several devices"
    if target.model_device.type == "cuda":
        can, reason = ops.available("tree_attention", target.model_device)
        return next(
            filter(None, (support.capture_obstacle(model.config) for model in models if hasattr(model, "config"))),
            "" if can else reason,
        )
    return ""


def device_rounds(
    target: ModelTarget,
    ledger: TokenLedger,
    drafter: Drafter,
    tree: TreeBuilder,
    programs: Programs,
    *,
    nodes: int,
    generator: torch.Generator | None,
    capture: bool = True,
    compiled: bool = False,
) -> Iterator[Round]:
    """Yields the rounds of one request, as `specdec.rounds.rounds` does.

    Args:
        target: the model, bound to its prompts; nothing was run yet.
        ledger: the committed tokens, on the CPU.
        drafter: a drafter with a device form.
        tree: its tree builder.
        programs: where the program of the request before may be found.
        nodes: tree budget, root excluded.
        generator: source of randomness.
        capture: whether rounds are captured as a graph, on a CUDA device.
        compiled: whether `torch.compile` fuses what lies between matrix products.
    """
    mark = time.perf_counter()
    choose = chooser(ledger.processors, greedy=not ledger.do_sample, generator=generator)
    tree_of_prompt, output = DraftTree.from_root(ledger.roots), target.prefill()
    first = choose(output.logits).cpu()
    batch = first.shape[0]
    ledger.commit(first[:, 0], ledger.active)
    now = time.perf_counter()
    yield Round(
        index=0,
        tree=tree_of_prompt,
        path=torch.full((batch, 1), -1),
        num_accepted=torch.zeros(batch, dtype=torch.int64),
        committed=first,
        num_committed=torch.ones(batch, dtype=torch.int64),
        budget=0,
        times=StageTimes(verify=now - mark),
    )
    if not bool(ledger.active.any()):
        return
    draft = device_form(drafter, tree, nodes, ledger.temperature or 1.0)
    program = programs.get(target, ledger, draft, choose, generator=generator, capture=capture, compiled=compiled)
    lengths, width = target.lengths.tolist(), program.cache.width
    index, stopped = 0, [not running for running in ledger.active.tolist()]
    before = stopped
    mark = time.perf_counter()
    while not all(stopped):
        while program.pending < AHEAD and program.cache.fits(min(lengths), max(lengths) + program.pending * width):
            program.launch()
        record = program.read()
        index += 1
        found = record.counts.tolist()
        if any(count == 0 and not ended for count, ended in zip(found, stopped, strict=True)):
            raise SpecdecError(
                "the device ended a row that goes on, which is a fault of this library; execution='host' serves this "
                "request."
            )
        lengths = [length + count for length, count in zip(lengths, found, strict=True)]
        counts = ledger.extend(record.committed.tolist(), found)
        stopped = [not running for running in ledger.active.tolist()]
        if stopped != before and not all(stopped):
            program.stop(stopped)
        before = stopped
        now = time.perf_counter()
        yield _round_of(index, record, counts, nodes, now - mark)
        mark = time.perf_counter()


def chooser(processors: list[Any], *, greedy: bool, generator: torch.Generator | None) -> Choose:
    """The target's token after each node: the first maximum of the processed logits, or a draw."""

    def choose(logits: Float[Tensor, "batch nodes vocab"]) -> Int[Tensor, "batch nodes"]:
        if greedy and not processors and logits.dtype != torch.float64:
            return logits.argmax(-1)
        scores = logits.flatten(0, 1).to(torch.float32)
        for processor in processors:
            scores = processor(None, scores)
        if greedy:
            return scores.argmax(-1).view(logits.shape[:2])
        # The largest of probability over an exponential variable is a draw from the law.
        waits = torch.empty_like(scores).exponential_(generator=generator)
        return (scores.softmax(-1) / waits).argmax(-1).view(logits.shape[:2])

    return choose


def _round_of(index: int, record: RoundRecord, counts: list[int], budget: int, seconds: float) -> Round:
    """The public record of a device round, of which each row kept so many tokens."""
    kept, rows = np.array(counts), np.arange(len(counts))
    # Rows that stopped take no part, whatever the device went on to draft for them.
    sizes = np.where(kept > 0, record.num_nodes, 1)
    padding = np.arange(record.tokens.shape[1]) >= sizes[:, None]
    tokens = np.where(padding, record.tokens[:, :1], record.tokens)
    parents = np.where(padding, -1, record.parents)
    most = max(1, *counts)
    committed = np.where(np.arange(most) < kept[:, None], record.committed[:, :most], -1)
    # The node of a token is the next of the path; behind the last, only a stop leaves one that was drafted.
    path = np.full((len(counts), most), -1)
    path[:, :-1] = np.where(np.arange(1, most) < kept[:, None], record.path[:, 1:most], -1)
    last = np.maximum(kept - 1, 0)
    drafted = (parents == record.path[rows, last][:, None]) & (tokens == committed[rows, last][:, None])
    path[rows, last] = np.where(drafted.any(1) & (kept > 0), drafted.argmax(1), -1)
    tree = DraftTree(
        tokens=torch.from_numpy(tokens),
        parents=torch.from_numpy(parents),
        num_nodes=torch.from_numpy(sizes),
        scores=torch.from_numpy(np.where(padding, -np.inf, 0.0).astype(np.float32)),
    )
    return Round(
        index=index,
        tree=tree,
        path=torch.from_numpy(path),
        num_accepted=torch.from_numpy((path >= 0).sum(1)),
        committed=torch.from_numpy(committed),
        num_committed=torch.from_numpy(kept),
        budget=budget,
        times=StageTimes(verify=seconds),
    )
