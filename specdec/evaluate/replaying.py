"""Acceptance of recorded rounds, recomputed without a model for another tree builder or controller.

A round is replayed from the root at which it was recorded: the tree is grown on the recorded answers, by the builder
itself, and walked by the recorded text under the target-only rule. The text goes on after the round, so a replayed
round may accept more than the round did.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.evaluate._recalled import RecalledDrafter
from specdec.evaluate.recording import RecordedRequest, RecordedRound, Recording
from specdec.protocols import Controller, TreeBuilder
from specdec.stats import RowStats
from specdec.trees import topology
from specdec.types import DraftTree, Round, StageTimes

Times = Callable[[DraftTree, int], StageTimes]
"""Seconds of a round, told from its verified tree and its tree budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What recorded rounds would have accepted.

    Attributes:
        rounds: one for each recorded round, request after request. The `index` counts from 1 in each request.
    """

    rounds: tuple[Round, ...]

    @property
    def total(self) -> RowStats:
        """Counts over all rounds and the rows that took part in them."""
        total = RowStats()
        for round in self.rounds:
            columns = (round.tree.num_nodes - 1, topology.depths(round.tree.parents).amax(-1))
            counts = torch.stack([*columns, round.num_accepted, round.num_committed], 1).tolist()
            for drafted, deepest, accepted, committed in counts:
                if committed:
                    total.add(drafted=drafted, deepest=deepest, accepted=accepted, committed=committed)
        return total

    @property
    def tokens_per_round(self) -> float:
        """Tokens per round and row, bonus included, over the recorded roots."""
        return self.total.tokens_per_round

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, if the replay was told what rounds take."""
        return sum((round.times.total for round in self.rounds), 0.0)

    def __repr__(self) -> str:
        return f"<Replay: {len(self.rounds)} rounds, {self.tokens_per_round:.2f} tokens per round>"

    def __str__(self) -> str:
        total = self.total
        by_depth = (f"{depth}: {share:.0%}" for depth, share in enumerate(total.acceptance_by_depth, 1))
        lines = [
            ("tokens / round", f"{total.tokens_per_round:.2f} ({total.new_tokens} tokens, {total.rounds} rounds)"),
            ("accepted", f"{total.accepted} of {total.drafted} drafted ({total.acceptance_rate:.1%})"),
            ("  per round", "   ".join(f"{count}: {rounds}" for count, rounds in enumerate(total.histogram))),
            ("  by depth", "   ".join(by_depth)),
            ("seconds", f"{self.seconds:.3f}" if self.seconds else ""),
        ]
        return "\n".join(f"{name:<16}{text.replace('%', ' %')}" for name, text in lines if text)


@torch.no_grad()
def replay(
    recording: Recording, tree: TreeBuilder, *, controller: Controller | None = None, times: Times | None = None
) -> Replay:
    """Grows the trees of recorded rounds anew, with any deterministic builder, and counts what the text accepts.

    At the recorded setting each round accepts what it did accept (if a controller had pruned trees, it must be given
    again). At another one each round accepts what a live round would have accepted *at the same root*. Rounds are not
    chained: where the next round of another setting would begin, the drafter may never have been asked. So the mean is
    one over the recorded roots, and a live run at the other setting takes its mean over its own.

    Tokens after the end of the text are not counted, as in live statistics. Rows are replayed each on its own: where
    they had to advance in step (`specdec.protocols.Ledger.lockstep`), a row can accept more here than it did.

    Args:
        recording: what a `Recorder` recorded.
        tree: the builder; its options are what is asked about: budget, temperature, branch, depth, shape.
        controller: chooses the budget of each round and prunes, told of one round after the other as in a request
            (the prefill comes first). None drafts the builder's whole budget, except in rounds in which the run had
            asked for less than its own builder's: these keep the budget that they had, 0 included.
        times: seconds of a round, for controllers that decide by them; None leaves them 0.

    Raises:
        UnsupportedError: for a builder that draws its trees; for a node that was not recorded (the message says what
            to record); if the controller wants drafts in a round that was recorded without.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, drafters, evaluate, trees
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> recorder = evaluate.Recorder(drafters.ModelDrafter(model), trees.Chain(4))
        >>> generator = SpeculativeGenerator(model, drafter=recorder, tree=recorder)
        >>> ids = generator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=16, do_sample=False)
        >>> evaluate.replay(recorder.recording, trees.Chain(2)).tokens_per_round
        3.0
    """
    given: Any = recording
    if not isinstance(given, Recording):
        raise UnsupportedError(
            f"replay: takes a Recording (recorder.recording, or Recording.load(path)), got {type(given).__name__}."
        )
    if isinstance(tree, type):
        raise UnsupportedError(f"replay: tree must be a tree builder, not a class; make one: {tree.__name__}(...).")
    if tree.sampled:
        raise UnsupportedError(
            f"{tree!r} draws its trees, and what is accepted of a draw cannot be told from the text: replay a "
            "deterministic builder (Chain, BestFirst, Fixed)."
        )
    times = times or (lambda _tree, _budget: StageTimes())
    rounds: list[Round] = []
    for number, request in enumerate(recording.requests):
        rounds += _request(request, tree, controller, times, f"request {number}")
    return Replay(tuple(rounds))


def _request(
    request: RecordedRequest, tree: TreeBuilder, controller: Controller | None, times: Times, name: str
) -> Iterator[Round]:
    """The rounds of one request."""
    if controller is not None:
        controller.start(tree.nodes, tree.sampled)
        controller.observe(_prefill(request, times))
    for index, recorded in enumerate(request.rounds, 1):
        root, where = request.roots(recorded), f"{name}, round {index}"
        if controller is not None:
            budget = controller.budget()
        else:
            budget = tree.nodes if recorded.budget >= request.nodes else min(recorded.budget, tree.nodes)
        grown = DraftTree.from_root(root)
        if budget and recorded.answers:
            drafter = RecalledDrafter(recorded, vocab_size=request.vocab_size, marginal=request.marginal, name=where)
            grown = tree.grow(drafter, root, recorded.limits, budget, vocab_size=request.vocab_size)
            grown = grown if controller is None else controller.prune(grown)
        elif budget and bool((request.ahead(recorded, 2)[:, -1] >= 0).any()):
            raise UnsupportedError(
                f"{where} was recorded without drafts, and the controller wants {budget} nodes: record without a "
                "controller, or with one that drafts in every round."
            )
        round = _walk(request, recorded, grown, index, budget, times)
        if controller is not None:
            controller.observe(round)
        yield round


def _walk(
    request: RecordedRequest, recorded: RecordedRound, tree: DraftTree, index: int, budget: int, times: Times
) -> Round:
    """Follows the recorded text down the tree."""
    text = request.ahead(recorded, tree.width)
    node, path = torch.zeros_like(recorded.positions), list[Tensor]()
    for token in text.unbind(1):
        node = topology.child_with_token(tree, node, token)
        path.append(node)
        if not bool((node >= 0).any()):
            break
    nodes = torch.stack(path, 1)
    accepted = (nodes >= 0).sum(-1)
    counts = torch.minimum(accepted + 1, (text >= 0).sum(-1))
    widest = max(1, int(counts.max()))
    return Round(
        index=index,
        tree=tree,
        path=nodes[:, :widest],
        num_accepted=accepted,
        committed=text.masked_fill(torch.arange(tree.width) >= counts[:, None], -1)[:, :widest],
        num_committed=counts,
        budget=budget,
        times=times(tree, budget),
    )


def _prefill(request: RecordedRequest, times: Times) -> Round:
    """The round before the first recorded one, as a controller sees a prefill: it committed the first root."""
    first = request.rounds[0]
    before = request.texts.gather(1, (first.positions - 1).clamp_min(0)[:, None]).squeeze(1)
    tree, committed = DraftTree.from_root(before), request.roots(first)[:, None]
    none, ones = torch.zeros_like(before), torch.ones_like(before)
    return Round(0, tree, torch.full_like(committed, -1), none, committed, ones, 0, times(tree, 0))
