"""The loop: draft, verify, accept, commit. Read this first.

Everything else in the library is a part that takes its place here. The loop knows the protocols and nothing about
models, caches or transformers; it is an iterator, so a caller may stop, look or draw between two rounds.

A round gives the target's logits for several prefixes at once. Which tokens are committed is decided one token at a
time, by the ledger, exactly as plain decoding would: that is why no request option needs special care here.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.protocols import Controller, Drafter, Ledger, StepVerifier, Target, TreeBuilder, Verifier
from specdec.types import Candidates, DraftTree, Frontier, Round, StageTimes, TargetLaw, TargetOutput, Verdict

Step = Callable[[DraftTree, Int[Tensor, " batch"], TargetLaw], tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]]


def rounds(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    verifier: Verifier,
    ledger: Ledger,
    controller: Controller,
    *,
    nodes: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Round]:
    """Yields the rounds of one request until every row has stopped. Round 0 is the prefill.

    Args:
        target: the model, bound to its prompts.
        drafter: proposes tokens; started only when a round first wants drafts.
        builder: grows the tree from the drafter's answers.
        verifier: decides which nodes are kept.
        ledger: the committed tokens, and all that plain decoding does per token.
        controller: chooses the tree budget of each round.
        nodes: largest tree budget of this request; None is the builder's.
        generator: source of randomness; None is torch's default.
    """
    watch, timed = Stopwatch(), TimedDrafter(drafter)
    drafting = False
    controller.start(builder.nodes if nodes is None else nodes, builder.sampled)
    try:
        for index in itertools.count():
            if index == 0:
                tree, budget = DraftTree.from_root(ledger.roots), 0
                output = target.prefill()
            else:
                output = target.verify(tree)
            watch.lap("verify")
            walk = accept(tree, output, verifier, ledger, generator)
            watch.lap("accept")
            if index > 0:
                target.commit(walk.nodes, walk.counts)
            if drafting:
                timed.commit(walk.tokens, walk.counts, walk.features(output))
            watch.lap("commit")

            round = walk.to_round(index, tree, budget, watch.times(timed.take_seconds()))
            controller.observe(round)
            yield round
            if not bool(ledger.active.any()):
                return

            watch.restart()
            budget, limits = controller.budget(), depth_limits(target, ledger)
            if budget > 0 and bool((limits > 0).any()):
                if not drafting:
                    timed.start(ledger.draft_context(target))
                    drafting = True
                tree = controller.prune(
                    builder.grow(timed, ledger.roots, limits, budget, vocab_size=target.vocab_size, generator=generator)
                )
            else:
                tree = DraftTree.from_root(ledger.roots)
            watch.lap("grow")
    finally:
        if drafting:
            timed.finish()


def depth_limits(target: Target, ledger: Ledger) -> Int[Tensor, " batch"]:
    """Deepest node that can still be committed or has a position, per row; 0 for rows that stopped."""
    limits = (ledger.remaining - 1).clamp_min(0)
    if target.depth_limit is not None:
        limits = torch.minimum(limits, target.depth_limit.clamp_min(0))
    return limits


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The committed part of a round: `tokens[b, i]` was chosen at node `nodes[b, i]`, for i < `counts[b]`.

    `nodes` starts with the root, so its first `counts` entries are also what the target's cache keeps: the last
    committed token is the next root and is never cached.
    """

    nodes: Int[Tensor, "batch new"]
    tokens: Int[Tensor, "batch new"]
    children: Int[Tensor, "batch new"]
    counts: Int[Tensor, " batch"]

    def features(self, output: TargetOutput) -> Tensor | None:
        """Features of the nodes at which the tokens were chosen."""
        if output.features is None:
            return None
        index = self.nodes.clamp_min(0)[:, :, None].expand(-1, -1, output.features.shape[-1])
        return output.features.gather(1, index)

    def to_round(self, index: int, tree: DraftTree, budget: int, times: StageTimes) -> Round:
        """The public record of the round."""
        return Round(
            index=index,
            tree=tree,
            path=self.children,
            num_accepted=(self.children >= 0).sum(-1),
            committed=self.tokens,
            num_committed=self.counts,
            budget=budget,
            times=times,
        )


def accept(
    tree: DraftTree,
    output: TargetOutput,
    verifier: Verifier,
    ledger: Ledger,
    generator: torch.Generator | None,
) -> Walk:
    """Walks down the tree, committing one token per step to every row that is still on it."""
    if verifier.stepwise:
        step = _stepper(cast(StepVerifier, verifier), generator)
    else:
        step = _replayer(verifier(tree, ledger.laws(output, tree), generator=generator))
    walking = ledger.active
    node = torch.zeros_like(ledger.roots)
    nodes, tokens, children = [], [], []
    while True:
        law = ledger.law(output, node, walking)
        token, child = step(tree, node, law)
        running = ledger.commit(token, walking)
        child = torch.where(walking, child, -1)
        nodes.append(torch.where(walking, node, -1))
        tokens.append(torch.where(walking, token, -1))
        children.append(child)
        onward = running & (child >= 0)
        if ledger.lockstep and bool((running & walking & ~onward).any()):
            break
        if not bool(onward.any()):
            break
        walking, node = onward, torch.where(onward, child, node)
    stacked = torch.stack(nodes, 1)
    return Walk(
        nodes=stacked,
        tokens=torch.stack(tokens, 1),
        children=torch.stack(children, 1),
        counts=(stacked >= 0).sum(-1),
    )


def _stepper(verifier: StepVerifier, generator: torch.Generator | None) -> Step:
    def step(
        tree: DraftTree, node: Int[Tensor, " batch"], law: TargetLaw
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        return verifier.step(tree, node, law, generator=generator)

    return step


def _replayer(verdict: Verdict) -> Step:
    """Steps that follow a verdict reached for the whole tree at once."""
    position = itertools.count()
    path = torch.cat([verdict.path, torch.full_like(verdict.bonus, -1)[:, None]], 1)

    def step(
        tree: DraftTree,
        node: Int[Tensor, " batch"],  # noqa: ARG001 - a step of any verifier has it
        law: TargetLaw,  # noqa: ARG001 - as above
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        depth = next(position)
        child = torch.where(depth < verdict.num_accepted, path[:, min(depth, path.shape[1] - 1)], -1)
        drafted = tree.tokens.gather(1, child.clamp_min(0)[:, None]).squeeze(1)
        return torch.where(child >= 0, drafted, verdict.bonus), child

    return step


class Stopwatch:
    """Wall time between laps, by stage."""

    def __init__(self) -> None:
        """Starts running."""
        self._seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def restart(self) -> None:
        """Forgets the time since the last lap: it was the caller's."""
        self._mark = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Books the time since the last mark to a stage."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._mark
        self._mark = now

    def times(self, draft: float) -> StageTimes:
        """The round's times, of which `draft` seconds were spent inside the drafter; starts the next round."""
        seconds, self._seconds = self._seconds, {}
        grow = seconds.get("grow", 0.0)
        return StageTimes(
            draft=draft,
            grow=max(0.0, grow - draft),
            verify=seconds.get("verify", 0.0),
            accept=seconds.get("accept", 0.0),
            commit=seconds.get("commit", 0.0),
        )


class TimedDrafter:
    """Passes everything on to a drafter and measures the time spent proposing."""

    def __init__(self, drafter: Drafter) -> None:
        """Wraps `drafter`."""
        self._drafter = drafter
        self._seconds = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """As the wrapped drafter's."""
        return self._drafter.feature_layers

    def start(self, context: object) -> None:
        """Starts the wrapped drafter; counted as drafting."""
        begin = time.perf_counter()
        self._drafter.start(context)  # type: ignore[arg-type]  # whatever it is, the drafter checks it
        self._seconds += time.perf_counter() - begin

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """Asks the wrapped drafter; counted as drafting."""
        begin = time.perf_counter()
        candidates: Any = self._drafter.children(frontier, count)
        self._seconds += time.perf_counter() - begin
        if not isinstance(candidates, Candidates) or candidates.tokens.shape[:2] != frontier.tokens.shape:
            raise ShapeError(
                f"{type(self._drafter).__name__}.children must answer with Candidates, one list of tokens for each "
                f"node of {list(frontier.tokens.shape)} [batch, frontier], got {_shown(candidates)}; "
                "specdec.testing.check_drafter tells more."
            )
        return candidates

    def commit(
        self, tokens: Int[Tensor, "batch new"], counts: Int[Tensor, " batch"], features: Tensor | None = None
    ) -> None:
        """Tells the wrapped drafter what was committed."""
        self._drafter.commit(tokens, counts, features)

    def finish(self) -> None:
        """Ends the wrapped drafter's request."""
        self._drafter.finish()

    def take_seconds(self) -> float:
        """Seconds spent drafting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _shown(answer: object) -> str:
    return f"tokens {list(answer.tokens.shape)}" if isinstance(answer, Candidates) else type(answer).__name__


__all__ = ["Walk", "accept", "depth_limits", "rounds"]
