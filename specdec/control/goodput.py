"""Draft-length control by goodput: tokens per second with drafts against tokens per second without, as measured.

Before a round it chooses a tree budget, after drafting how much of the tree to verify; either may be nothing. It
learns what rounds cost (`meter`) and how far the drafter's probabilities can be trusted (`calibration`, from
`outcomes`), and takes what earns most (`plan`). Trying costs time, so there is a `purse`: whatever a drafter promises,
a call cannot fall behind plain decoding by more than the purse holds. Stopping a tree where its next node no longer
pays follows CaDDTree; admitting drafts by measured step times follows DSpark (arXiv 2607.05147).

Sampled trees are never pruned: their budget is fixed before the draws, from earlier rounds only, as the q-aware
rules require.
"""

import math
from collections import Counter

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.control.calibration import Calibration
from specdec.control.costs import VerifyCosts
from specdec.control.meter import RoundCosts
from specdec.control.outcomes import DraftedRows, Trails, verified_outcomes
from specdec.control.plan import Outlook, gains, ladder
from specdec.control.purse import Purse
from specdec.control.report import GoodputSummary
from specdec.errors import UnsupportedError
from specdec.stats import to_host
from specdec.trees import topology
from specdec.types import DraftTree, Round

_SAMPLED_PRIOR = 0.6  # chance that a drawn token is accepted, before any was seen
_FREE = 0.01  # share of a plain round below which drafting needs no justification
_GROWTH = 4  # a budget may be this much larger than any before
_PATIENCE = 64  # most rounds between two probes, and between two plain rounds
_HOPEFUL = 4  # most rounds between two probes while drafting might still pay
_PROBE_SHARE = 256  # a probe of one plain round's cost comes at most every so many rounds
_CLEAR = 1.03  # gain that an untried width must promise


class Goodput:
    """Drafts as much as pays, by measured times; may draft nothing. All it learns belongs to one request.

    Args:
        costs: measured verify costs of the target. With them, widths need not be explored; the request's own
            measurements still correct them.
        max_loss: share of plain decoding's time that may be lost to trying, in the long run. A call may lose one
            plain round beyond it.

    Raises:
        UnsupportedError: if `max_loss` is negative, or `costs` is no `VerifyCosts`.

    >>> controller = Goodput(costs=VerifyCosts.from_measurements({1: 0.040, 4: 0.080, 16: 0.128}))
    >>> controller.start(nodes=15, sampled=False)
    >>> controller.budget()  # nothing is known yet: a single node shows what drafting costs
    1
    """

    def __init__(self, *, costs: VerifyCosts | None = None, max_loss: float = 0.015) -> None:
        if not max_loss >= 0:
            raise UnsupportedError(f"max_loss is a share of time, 0 or more (0.02 is two percent), got {max_loss}.")
        if costs is not None and not isinstance(costs, VerifyCosts):
            raise UnsupportedError(
                f"costs= takes VerifyCosts.from_measurements({{width: cost}}), got {type(costs).__name__}."
            )
        self.costs = costs
        self.max_loss = max_loss
        self.start(nodes=0, sampled=False)

    def __repr__(self) -> str:
        return f"Goodput(costs={self.costs!r}, max_loss={self.max_loss})"

    def start(self, nodes: int, sampled: bool) -> None:
        """Begins a request with this tree budget; forgets every earlier request."""
        self._sampled = sampled
        self._sizes = ladder(nodes)
        self._costs = RoundCosts(self.costs)
        self._calibration = Calibration()
        self._trails = Trails()
        self._outlook = Outlook(self._sizes, prunable=not sampled, trees=8 if sampled else 16)
        self._hopes = Outlook(self._sizes, prunable=not sampled, trees=1)
        self._purse = Purse(self._costs, max_loss=self.max_loss)
        self._budgets: Counter[int] = Counter()
        self._widths: Counter[int] = Counter()
        # The round in progress.
        self._asked = 0
        self._drafted: DraftedRows | None = None
        self._views: tuple[list[float], list[float]] = ([], [])  # values of its nodes in falling order, and floors
        self._foreseen = 0.0  # accepted tokens expected, mean over rows
        self._trying = False  # whether untried widths are taken to be cheap
        # What was seen so far.
        self._active = 0  # rows that committed in the last round
        self._rate = 0.0  # tokens per second and row of the best policy known
        self._paid = True  # whether the last drafted round was worth its time
        self._rounds = self._since_draft = self._since_plain = 0
        self._probes = self._trials = self._next_trial = 0

    # ------------------------------------------------------------------------------------------------- choices

    def budget(self) -> int:
        """Tree budget of the next round; 0 for none."""
        self._foreseen, self._trying = 0.0, False
        self._asked = self._choose_budget()
        self._budgets[self._asked] += 1
        return self._asked

    def _choose_budget(self) -> int:
        nodes = self._sizes[-1]
        if nodes == 0 or not self._costs.budgets:
            return min(nodes, 1)
        if not self._sampled and self._costs.draft_bound(nodes) <= _FREE * self._costs.plain:
            self._rate = self._outlook.best(self._rate, self._costs.draft, self._costs.verify, largest=nodes).rate
            self._trial(nodes)
            return nodes
        if self._since_draft > _HOPEFUL and self._since_draft % _HOPEFUL:
            return 0  # plain rounds teach little about drafts: no need to think again after each
        size = self._plan()
        if self._reference_due():
            return 0
        trial = self._trial(_GROWTH * max(self._costs.budgets))
        if size or trial:
            self._probes = 0
            return trial or size
        return self._probe()

    def _plan(self) -> int:
        """The budget that earns most and can be afforded."""
        largest = _GROWTH * max(self._costs.budgets)
        while largest:
            offer = self._outlook.best(self._rate, self._costs.draft, self._costs.verify, largest=largest)
            self._rate = offer.rate
            if offer.size == 0:
                break
            seconds = self._costs.draft_bound(offer.size) + offer.seconds
            if self._purse.affords(seconds, foreseen=offer.floor - 1.0):
                self._foreseen = offer.tokens - 1.0
                return self._second_size(offer.size)
            largest = offer.size - 1
        return 0

    def _trial(self, largest: int) -> int:
        """A budget that would earn more if passes that were measured less than twice were as cheap as they may be."""
        if self._rounds < self._next_trial or not self._costs.count(1):
            return 0
        self._next_trial = self._rounds + _HOPEFUL
        costs = self._costs
        offer = self._outlook.best(self._rate, costs.draft, costs.verify_hope, largest=largest)
        if offer.size == 0 or offer.rate < _CLEAR * self._rate:
            return 0
        seconds = costs.draft_bound(offer.size) + costs.verify_bound(offer.size + 1)
        if not self._purse.affords(seconds, foreseen=offer.floor - 1.0):
            return 0
        self._trials += 1
        self._next_trial = self._rounds + 2**self._trials
        self._foreseen, self._trying = offer.tokens - 1.0, True
        return offer.size

    def _probe(self) -> int:
        """A small budget once in a while although drafting does not seem to pay; sooner if it still might."""
        costs = self._costs
        size = max((s for s in self._sizes[1:] if costs.draft_bound(s) <= 0.1 * costs.plain), default=1)
        size = self._second_size(size)
        seconds = costs.draft(size) + (costs.verify_bound(size + 1) if self._sampled else costs.plain)
        hopes = self._hopes.best(0.0, costs.draft, costs.verify, largest=_GROWTH * max(costs.budgets))
        patience = _HOPEFUL if hopes.size else min(_PROBE_SHARE * (seconds / costs.plain - 1.0), _PATIENCE)
        if self._since_draft < min(2.0**self._probes, patience) or not self._purse.affords(seconds, foreseen=0.0):
            return 0
        self._probes += 1
        return size

    def _second_size(self, size: int) -> int:
        """The next larger budget if this is the only one measured: to tell drafting at once from step by step."""
        if list(self._costs.budgets) != [size]:
            return size
        return next((larger for larger in self._sizes if larger > size), size)

    def _reference_due(self) -> bool:
        """Whether a plain round is to be measured: the clearer the gain, the later."""
        speedup, count = self._rate * self._costs.plain, self._costs.count(1)
        if self.costs is not None and self._rounds < _PATIENCE:
            return False  # the profile tells what a plain round should take
        if count < 2:
            return (not self._paid and speedup < 2) or self._rounds >= (2 + 6 * count) * speedup**3
        return speedup < 1.5 and self._since_plain >= _PATIENCE

    def prune(self, tree: DraftTree) -> DraftTree:
        """The part of the tree that is worth verifying; the tree itself if sampled."""
        if self._sampled:
            return tree
        values = self._study(tree)
        most = tree.width - 1
        count = self._choose_nodes(most) if most else 0
        if count >= most:
            return tree
        best = values.argsort(dim=-1, descending=True, stable=True)[:, : count + 1]
        keep = torch.zeros(values.shape, dtype=torch.bool).scatter_(1, best, True)
        return topology.prune(tree, keep.to(tree.tokens.device))

    def _choose_nodes(self, most: int) -> int:
        """How many nodes of the tree just studied to verify."""
        self._foreseen = 0.0
        if not self._costs.widths:
            return most
        if self._reference_due():
            return 0
        costs, plain = self._costs, self._costs.plain
        rate = max(self._rate, 1.0 / plain)
        sizes = [size for size in self._sizes if size < most] + [most]
        expected, floors = (gains(view, sizes, extend=False) for view in self._views)
        drafting = costs.draft(self._asked) if costs.budgets else 0.0
        affordable = [
            (size, gain)
            for size, gain, floor in zip(sizes, expected, floors, strict=True)
            if size == 0 or self._purse.affords(drafting + costs.verify_bound(size + 1), foreseen=floor)
        ]
        cost = costs.verify_hope if self._trying else costs.verify
        best, self._foreseen = max(affordable, key=lambda offer: offer[1] - rate * cost(offer[0] + 1))
        return best

    # ------------------------------------------------------------------------------------------------ learning

    def observe(self, round: Round) -> None:
        """Learns from a finished round."""
        counts, tokens = to_host(round.num_committed, round.committed)
        self._active = sum(count > 0 for count in counts)
        if round.index == 0 or not self._active:
            return
        width, budget, mean = round.tree.width, round.budget, sum(counts) / self._active
        self._rounds += 1
        self._widths[width] += 1
        self._since_plain = 0 if width == 1 else self._since_plain + 1
        self._since_draft = 0 if budget else self._since_draft + 1
        self._costs.add(width=width, budget=budget, times=round.times)
        self._purse.book(budget=budget, width=width, tokens=mean, foreseen=self._foreseen)
        if self._sampled:
            self._calibration.add(verified_outcomes(round, _SAMPLED_PRIOR) if budget else [])
        else:
            if budget and self._drafted is None:
                self._study(round.tree)
            committed = [row[:count] for row, count in zip(tokens, counts, strict=True)]
            self._calibration.add(self._trails.follow(committed, self._drafted))
        if budget:
            self._paid = mean * self._costs.plain >= self._costs.draft(budget) + self._costs.verify(width)
            if self._sampled:
                self._study_sampled(round.tree)
        self._drafted = None

    def _study(self, tree: DraftTree) -> Float[Tensor, "batch nodes"]:
        """Values of the nodes of a drafted tree; remembers the tree and what it promises."""
        host = DraftTree(tree.tokens.cpu(), tree.parents.cpu(), tree.num_nodes.cpu(), tree.scores.cpu())
        values, floors, hopes, predicted = self._calibration.assess(host)
        self._drafted = DraftedRows(
            host.tokens.tolist(), host.parents.tolist(), predicted.tolist(), host.num_nodes.tolist()
        )
        order = values[:, 1:].argsort(dim=-1, descending=True)
        ranked = torch.stack([values, floors, hopes])[:, :, 1:].gather(-1, order.expand(3, -1, -1))
        expected, least, most = (ranked.sum(1) / (self._active or tree.tokens.shape[0])).tolist()
        self._views = expected, least
        full = tree.width > self._asked
        self._outlook.add(gains(expected, self._sizes, extend=full), gains(least, self._sizes, extend=full))
        hope = gains(most, self._sizes, extend=full)
        self._hopes.add(hope, hope)
        return values

    def _study_sampled(self, tree: DraftTree) -> None:
        """What sampled trees promise, from acceptance by depth; the depth goes in proportion to the budget."""
        nodes = tree.width - 1
        reach = int(topology.depths(tree.parents).max()) / nodes if nodes else 0.0
        depths = [math.ceil(size * reach) for size in self._sizes]
        expected, least, most = (self._depth_gains(prior, depths) for prior in (_SAMPLED_PRIOR, 0.0, 1.0))
        self._outlook.add(expected, least)
        self._hopes.add(most, most)

    def _depth_gains(self, prior: float, depths: list[int]) -> list[float]:
        """Expected accepted tokens by depth of the tree."""
        totals, chance = [0.0], 1.0
        for depth in range(1, depths[-1] + 1):
            chance *= self._calibration.edge(depth, _SAMPLED_PRIOR, prior=prior)
            totals.append(totals[-1] + chance)
        return [totals[depth] for depth in depths]

    # -------------------------------------------------------------------------------------------------- report

    def measured_costs(self) -> VerifyCosts:
        """Verify costs as measured in this request, for the `costs` of later ones.

        Raises:
            UnsupportedError: if no plain round was measured.
        """
        return VerifyCosts.from_measurements(self._costs.widths)

    def summary(self) -> GoodputSummary:
        """What was chosen in this request, and what was known; `print` it, or take `to_dict()`."""
        return GoodputSummary(
            budgets=dict(sorted(self._budgets.items())),
            widths=dict(sorted(self._widths.items())),
            verify_seconds=self._costs.widths,
            draft_seconds=self._costs.budgets,
            acceptance={said: (outcomes, share) for said, outcomes, share in self._calibration.table()},
            speedup=self._rate * self._costs.plain if self._rounds else 1.0,
        )
