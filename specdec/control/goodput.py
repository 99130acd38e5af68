"""Draft-length control by goodput: tokens per second with drafts against tokens per second without, as measured.

Before a round it chooses a tree budget, after drafting how much of the tree is worth verifying; either may be
nothing. It learns seconds by verify width and by budget (`costs`) and how far the drafter's probabilities can be
trusted (`calibration`), and takes the budget that pays best (`plan`); cost-aware stopping follows CaDDTree, measured
step times follow DSpark (arXiv 2607.05147). Trying things costs time, so there is a purse: a round may lose at most
what drafting has won lately, plus a small credit that grows with the tokens committed. Whatever a drafter claims,
the call cannot fall behind plain decoding by more than that.

Sampled trees are never pruned: their budget is fixed before the draws, from earlier rounds only, as the q-aware
rules require.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.control.calibration import Calibration, Outcome, Trail
from specdec.control.costs import CostMeter, VerifyCosts
from specdec.control.plan import Outlook, gains, ladder
from specdec.control.purse import Purse
from specdec.control.report import GoodputSummary
from specdec.trees import topology
from specdec.types import DraftTree, Round

_WIDTH_SLOPE = 0.07  # cost of one more node, in plain rounds, before it was measured
_WIDTH_BOUND = 0.5  # cost of a pass grows with at most this power of the width, in a cautious view
_STEEPEST_WIDTH = 0.7  # single samples above this are start-up
_DRAFT_SLOPE = 0.25  # 0 for a drafter that drafts a block at once, 1 for one that takes a forward per token
_SAMPLED_PRIOR = 0.6  # chance that a drawn token is accepted, before any was seen
_FREE = 0.01  # drafting that takes less than this share of a plain round is free
_STARTUP = 0.3  # plain rounds that the first draft counts for at most: it also starts the drafter
_GROWTH = 4  # a budget may be this much larger than any before
_PATIENCE = 64  # most rounds between two probes
_HOPEFUL = 4  # the same while drafting might still pay


class Goodput:
    """Drafts as much as pays, by measured times; may draft nothing. State belongs to one request.

    Args:
        costs: measured verify costs of the target. With them widths are not explored; the call's own measurements
            still correct them.
        max_loss: share of plain decoding's time that may be lost to trying, in the long run. A call may lose one
            plain round beyond it.

    Raises:
        ValueError: if `max_loss` is negative.

    >>> controller = Goodput(costs=VerifyCosts.from_measurements({1: 0.040, 4: 0.080, 16: 0.128}))
    >>> controller.start(nodes=15, sampled=False)
    >>> controller.budget()  # nothing is known yet: a single node shows what drafting costs
    1
    """

    def __init__(self, *, costs: VerifyCosts | None = None, max_loss: float = 0.015) -> None:
        if not max_loss >= 0:
            raise ValueError(f"max_loss is a share of time, 0 or more (0.02 is two percent), got {max_loss}.")
        self.costs = costs
        self.max_loss = max_loss
        self.start(nodes=0, sampled=False)

    def start(self, nodes: int, sampled: bool) -> None:
        """Begins a request with this tree budget; forgets every earlier request."""
        self._sizes = ladder(nodes)
        self._sampled = sampled
        profile = self.costs
        shape = profile.relative if profile else _line(_WIDTH_SLOPE)
        self._verify = CostMeter(shape, steepest=_STEEPEST_WIDTH)
        self._draft = CostMeter(_line(_DRAFT_SLOPE), steepest=1.0)
        self._calibration = Calibration()
        self._outlook = Outlook(self._sizes, prunable=not sampled, trees=1 if sampled else 32)
        self._hopes = Outlook(self._sizes, prunable=not sampled, trees=1)
        self._purse = Purse(self.max_loss)
        self._trails: dict[int, Trail] = {}
        self._drafted: list[Trail] | None = None  # this round's tree, one trail per row
        self._marginals: tuple[list[float], list[float]] = ([], [])  # falling values, cautious values
        self._foreseen = 0.0  # accepted tokens expected of this round
        self._rate = 0.0  # tokens per second and row of the best policy known
        self._active = 0  # rows that committed in the last round
        self._rounds = self._drafted_rounds = 0
        self._paid = True  # whether the last drafted round earned its time
        self._since_draft = self._since_plain = 0
        self._misses = self._trials = 0
        self._asked = 0
        self._budgets: dict[int, int] = {}
        self._widths: dict[int, int] = {}

    # ------------------------------------------------------------------------------------------------ choices

    def budget(self) -> int:
        """Tree budget of the next round; 0 for none."""
        self._asked = self._choose_budget()
        self._budgets[self._asked] = self._budgets.get(self._asked, 0) + 1
        return self._asked

    def _choose_budget(self) -> int:
        nodes = self._sizes[-1]
        if nodes == 0 or not self._verify.measured:
            return min(nodes, 1)
        if not self._drafted_rounds:
            return 1
        free = self._draft_bound(nodes) <= _FREE * self._plain
        if free and not self._sampled:
            self._rate = self._outlook.best(self._rate, self._drafting, self._verify, largest=nodes).rate
            return nodes
        size = self._plan()
        if self._reference_due():
            return 0
        if size:
            self._misses = 0
            return size
        return self._probe()

    def _plan(self) -> int:
        """The budget that pays best and can be afforded."""
        largest = min(self._sizes[-1], _GROWTH * max(self._draft.measured))
        while largest:
            offer = self._outlook.best(self._rate, self._drafting, self._verify, largest=largest)
            self._rate = offer.rate
            if offer.size == 0:
                break
            seconds = self._draft_bound(offer.size) + offer.seconds
            if self._purse.affords(seconds, foreseen=offer.floor - 1.0):
                self._foreseen = offer.tokens - 1.0
                return offer.size
            largest = offer.size - 1
        return 0

    def _probe(self) -> int:
        """A small budget once in a while, although drafting does not seem to pay: sooner if it still might."""
        hopes = self._hopes.best(0.0, self._drafting, self._verify, largest=_GROWTH * max(self._draft.measured))
        cheap = (size for size in self._sizes[1:] if self._draft_bound(size) <= 0.1 * self._plain)
        size = max(cheap, default=1)
        if list(self._draft.measured) == [1]:
            size = min(2, self._sizes[-1])  # tells a drafter that drafts at once from one that drafts step by step
        cost = self._drafting(size) + (self._width_bound(size + 1) if self._sampled else self._plain)
        patience = _HOPEFUL if hopes.size else min(max(256 * (cost / self._plain - 1.0), 1.0), _PATIENCE)
        if self._since_draft < min(2.0**self._misses, patience) or not self._purse.affords(cost, foreseen=0.0):
            return 0
        self._misses += 1
        self._foreseen = 0.0
        return size

    def _reference_due(self) -> bool:
        """Whether a plain round must be measured (again): the clearer the gain, the later."""
        speedup, count = self._rate * self._plain, self._verify.count(1)
        if count < 2:
            return (not self._paid and speedup < 2) or self._rounds >= (2 + 6 * count) * speedup**3
        return speedup < 1.5 and self._since_plain >= _PATIENCE

    def prune(self, tree: DraftTree) -> DraftTree:
        """The part of the tree that is worth verifying; the tree itself if sampled."""
        if self._sampled:
            return tree
        values = self._study(tree)
        if tree.width == 1:
            return tree
        count = self._choose_nodes(tree.width - 1)
        if count >= tree.width - 1:
            return tree
        order = values.argsort(dim=-1, descending=True, stable=True)[:, : count + 1]
        keep = torch.zeros(values.shape, dtype=torch.bool).scatter_(1, order, True)
        return topology.prune(tree, keep.to(tree.tokens.device))

    def _choose_nodes(self, most: int) -> int:
        """How many nodes of the tree just studied to verify."""
        self._foreseen = 0.0
        if not self._verify.measured:
            return most
        if self._reference_due():
            return 0
        sizes = [size for size in self._sizes if size < most] + [most]
        curve, floor = (gains(marginals, sizes, extend=False) for marginals in self._marginals)
        plain = self._plain
        rate = max(self._rate, 1.0 / plain)
        drafting = self._drafting(self._asked) if self._draft.measured else 0.0
        costs = [drafting + self._width_bound(size + 1) for size in sizes]
        best, surplus = 0, -rate * plain
        for size, gain, least, cost in zip(sizes, curve, floor, costs, strict=True):
            worth = gain - rate * self._verify(size + 1)
            if worth > surplus and self._purse.affords(cost, foreseen=least):
                best, surplus, self._foreseen = size, worth, gain
        if best == 0 and self._rounds >= 2**self._trials:
            for size, gain, least, cost in zip(sizes, curve, floor, costs, strict=True):
                if size < min(3, most) or self._verify.count(size + 1) > 1:
                    continue
                hope = self._verify(self._settled(size + 1))
                if 1 + gain >= 1.03 * rate * hope and self._purse.affords(cost, foreseen=least):
                    self._trials += 1
                    self._foreseen = gain
                    return size
        return best

    # -------------------------------------------------------------------------------------------------- costs

    @property
    def _plain(self) -> float:
        """Seconds of a plain round."""
        return self._verify(1)

    def _drafting(self, size: int) -> float:
        """Seconds that drafting this many nodes takes."""
        seconds = self._draft(size)
        if self._drafted_rounds == 1:
            seconds = min(seconds, _STARTUP * self._plain * _line(_DRAFT_SLOPE)(size))
        return seconds

    def _draft_bound(self, size: int) -> float:
        """Seconds that drafting this many nodes may take, in a cautious view."""
        largest = max((s for s in self._draft.measured if s <= size), default=size)
        return max(self._drafting(size), self._drafting(largest) * size / largest)

    def _settled(self, width: int) -> int:
        """The largest width up to this one that was measured more than once."""
        return max((w for w in self._verify.measured if w <= width and self._verify.count(w) > 1), default=1)

    def _width_bound(self, width: int) -> float:
        """Seconds that a pass of this width may take, in a cautious view."""
        largest = max((w for w in self._verify.measured if w <= width), default=0)
        if self.costs is not None or not largest:
            return self._verify(width)
        return max(self._verify(width), self._verify(largest) * (width / largest) ** _WIDTH_BOUND)

    # ----------------------------------------------------------------------------------------------- learning

    def _study(self, tree: DraftTree) -> Float[Tensor, "batch nodes"]:
        """Values of the nodes of a drafted tree; remembers the tree and its gain curve."""
        host = DraftTree(tree.tokens.cpu(), tree.parents.cpu(), tree.num_nodes.cpu(), tree.scores.cpu())
        assessment = self._calibration.assess(host)
        tokens, parents, edges = host.tokens.tolist(), host.parents.tolist(), assessment.predicted.tolist()
        self._drafted = [
            Trail(tokens[row][:count], parents[row], edges[row]) for row, count in enumerate(host.num_nodes.tolist())
        ]
        order = assessment.values[:, 1:].argsort(dim=-1, descending=True)
        rows = self._active or tree.tokens.shape[0]
        means, floors, hopes = (
            (view[:, 1:].gather(1, order).sum(0) / rows).tolist()
            for view in (assessment.values, assessment.floors, assessment.hopes)
        )
        self._marginals = means, floors
        self._foresee(*(gains(view, self._sizes, extend=tree.width > self._asked) for view in (means, floors, hopes)))
        return assessment.values

    def _foresee(self, gain: list[float], floor: list[float], hope: list[float]) -> None:
        self._outlook.add(gain, floor)
        self._hopes.add(hope, hope)

    def observe(self, round: Round) -> None:
        """Learns from a finished round."""
        counts = round.num_committed.tolist()
        self._active = sum(count > 0 for count in counts)
        if round.index == 0 or not self._active:
            return
        times, width, tokens = round.times, round.tree.width, sum(counts) / self._active
        self._rounds += 1
        self._widths[width] = self._widths.get(width, 0) + 1
        self._verify.add(width, times.verify + times.accept + times.commit)
        self._since_plain = 0 if width == 1 else self._since_plain + 1
        self._since_draft += 1
        self._purse.plain = self._plain
        outcomes = self._sampled_outcomes(round) if self._sampled else self._outcomes(round, counts)
        self._calibration.add(outcomes)
        self._purse.earn(tokens)
        if round.budget:
            self._account(round, tokens)
        if round.budget and self._sampled:
            self._study_sampled(round.tree)
        self._drafted = None

    def _account(self, round: Round, tokens: float) -> None:
        """Books a round that drafted. The very first draft also starts the drafter, so little of it counts."""
        self._drafted_rounds += 1
        if self._drafted_rounds == 2 and max(self._draft.measured.values()) > _STARTUP * self._plain:
            self._draft = CostMeter(_line(_DRAFT_SLOPE), steepest=1.0)
        self._draft.add(round.budget, round.times.draft + round.times.grow)
        seconds = self._drafting(round.budget) + self._verify(round.tree.width)
        self._purse.book(seconds, tokens=tokens, foreseen=self._foreseen)
        self._paid = tokens * self._plain >= seconds
        self._since_draft = 0

    def _outcomes(self, round: Round, counts: list[int]) -> list[Outcome]:
        """Follows the trails of all rows by the committed tokens."""
        if round.budget and self._drafted is None:
            self._study(round.tree)
        committed = round.committed.tolist()
        outcomes: list[Outcome] = []
        for row, count in enumerate(counts):
            trail = self._trails.get(row)
            if self._drafted is not None and (trail is None or not trail.alive):
                trail = self._trails[row] = self._drafted[row]
            if trail is not None and count:
                outcomes += trail.follow(committed[row][:count])
        return outcomes

    def _sampled_outcomes(self, round: Round) -> list[Outcome]:
        """One outcome per depth that verification decided; what a stop cut off was not decided."""
        outcomes = []
        rows = (round.tree.parents, round.tree.num_nodes, round.path, round.num_accepted, round.num_committed)
        for parents, nodes, path, accepted, committed in zip(*(x.tolist() for x in rows), strict=True):
            inner = set(parents[1:nodes])
            decided = accepted + (committed > accepted)
            for depth, node in enumerate([0, *path[:accepted]][:decided], start=1):
                if node in inner:
                    outcomes.append((depth, _SAMPLED_PRIOR, depth <= accepted))
        return outcomes

    def _study_sampled(self, tree: DraftTree) -> None:
        """Gain by budget for sampled trees: acceptance by depth, with depth in proportion to the budget."""
        nodes = tree.width - 1
        reach = int(topology.depths(tree.parents).max()) / nodes if nodes else 1.0
        depths = torch.arange(1, self._sizes[-1] + 1)
        said = torch.full(depths.shape, _SAMPLED_PRIOR)
        curves = []
        for prior in (said, torch.zeros_like(said), torch.ones_like(said)):
            expected = [0.0, *self._calibration.edges(said, depths, prior).cumprod(0).cumsum(0).tolist()]
            curves.append([expected[math.ceil(size * reach)] for size in self._sizes])
        self._foresee(*curves)

    # ------------------------------------------------------------------------------------------------- report

    def measured_costs(self) -> VerifyCosts:
        """Verify costs as measured in this request, to be given to later ones."""
        return VerifyCosts.from_measurements(self._verify.measured)

    def summary(self) -> GoodputSummary:
        """What was chosen in this request, and why."""
        raise NotImplementedError


def _line(slope: float) -> Callable[[int], float]:
    """The shape of a cost that is 1 at size 1 and grows by `slope` with each further node."""
    return lambda size: 1.0 + slope * (size - 1)
