"""The random path itself: drawn trees, real draws, seeded. Exact sums do not see the generator; these tests do."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.testing import TableDrafter
from specdec.trees import Sampled
from specdec.types import DraftTree, Verdict
from specdec.verify import BlockVerification, Rejection, TargetOnly, Traversal, TreeRejection, rules
from tests.verify.laws import deterministic, keeps_target, wrong

ROWS = 20_000
VOCAB = 4
CHAIN, TREE = (1, 1), (2, 2)
CASES = [
    (TargetOnly(), TREE),
    (Rejection(), CHAIN),
    (BlockVerification(), CHAIN),
    (TreeRejection(), TREE),
    (Traversal(), TREE),
]
names = [type(rule).__name__ for rule, _ in CASES]


def table(seed: int) -> Tensor:
    """A law after each token."""
    weights = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) + 0.05
    return weights / weights.sum(-1, keepdim=True)


TARGET, DRAFTER = table(1), table(2)


def drawn(branches: tuple[int, ...], rows: int, generator: torch.Generator) -> DraftTree:
    root = torch.zeros(rows, dtype=torch.int64)
    builder = Sampled(branches)
    return builder.grow(
        TableDrafter(DRAFTER), root, torch.full((rows,), 9), builder.nodes, vocab_size=VOCAB, generator=generator
    )


def first_two(tree: DraftTree, verdict: Verdict, generator: torch.Generator) -> Tensor:
    """The first two tokens of each row; the second from the target if the round committed one."""
    drafted = tree.tokens.gather(1, verdict.path.clamp_min(0))
    tokens = torch.cat([drafted, verdict.bonus[:, None]], 1).scatter(
        1, verdict.num_accepted[:, None], verdict.bonus[:, None]
    )
    first = tokens[:, 0]
    later = torch.multinomial(TARGET[first], 1, generator=generator).squeeze(1)
    return torch.stack([first, torch.where(verdict.num_accepted > 0, tokens[:, 1], later)], 1)


def p_value(rule: Any, branches: tuple[int, ...], seed: int) -> float:
    """Chi-square of the joint law of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    tree = drawn(branches, ROWS, generator)
    pairs = first_two(tree, rule(tree, TARGET[tree.tokens], generator=generator), generator)
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    expected = TARGET[0].double()[:, None] * TARGET.double()
    expected = expected.flatten() / expected.sum() * ROWS
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize(("rule", "branches"), CASES, ids=names)
def test_chi_square_of_the_joint_law(rule, branches):
    assert p_value(rule, branches, seed=3) > 1e-3


@pytest.mark.parametrize(("rule", "branches"), CASES[1:2] + CASES[3:], ids=[names[1], *names[3:]])
def test_chi_square_sees_a_wrong_rule(rule, branches):
    with wrong(rules, "reject", keeps_target):
        assert p_value(rule, branches, seed=3) < 1e-9


def vars_of(tree: DraftTree) -> Iterator[Tensor]:
    return (getattr(tree, field.name) for field in dataclasses.fields(tree))


class ByRow(TorchFunctionMode):
    """Takes each row's chance from the row's own list of uniforms."""

    def __init__(self, uniforms: Tensor) -> None:
        super().__init__()
        self.uniforms = uniforms
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.bernoulli, torch.multinomial):
            return func(*args, **(kwargs or {}))
        uniform = self.uniforms[:, self.calls].to(args[0].dtype)
        self.calls += 1
        if func is torch.bernoulli:
            return (uniform < args[0]).to(args[0].dtype)
        reached = (args[0] / args[0].sum(-1, keepdim=True)).cumsum(-1)
        return (uniform[:, None] >= reached).sum(-1, keepdim=True).clamp_max(args[0].shape[1] - 1)


@pytest.mark.parametrize(("rule", "branches"), CASES, ids=names)
def test_rows_may_stand_in_any_order(rule, branches):
    """Rows of all sizes, a root alone among them; what a row gets moves with the row."""
    generator = torch.Generator().manual_seed(5)
    tree = drawn(branches, 60, generator)
    alone = torch.arange(60) % 5 == 0
    num_nodes = torch.where(alone, 1, torch.where(torch.arange(60) % 5 == 1, 2, tree.num_nodes))
    padding = torch.arange(tree.width) >= num_nodes[:, None]
    tree = dataclasses.replace(tree, num_nodes=num_nodes, parents=tree.parents.masked_fill(padding, -1))
    uniforms = torch.rand(60, 64, generator=generator)
    order = torch.randperm(60, generator=generator)
    mixed = DraftTree(*(value[order] for value in vars_of(tree)))
    with ByRow(uniforms):
        here = rule(tree, TARGET[tree.tokens])
    with ByRow(uniforms[order]):
        there = rule(mixed, TARGET[mixed.tokens])
    assert torch.equal(here.path[order], there.path)
    assert torch.equal(here.num_accepted[order], there.num_accepted)
    assert torch.equal(here.bonus[order], there.bonus)
    assert (here.num_accepted[alone] == 0).all()
    assert len(set(here.num_accepted.tolist())) == 3


def independence(tokens: Tensor) -> float:
    """Chi-square of independence between neighbouring rows."""
    pairs = tokens.view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
    return float(stats.chi2_contingency(counts.numpy()).pvalue)


@pytest.mark.parametrize("rule", [rule for rule, _ in CASES], ids=names)
def test_rows_do_not_share_chance(rule):
    rows = 4000
    tree = deterministic([[0, 1, 2]] * rows, [[-1, 0, 1]] * rows)
    generator = torch.Generator().manual_seed(6)
    assert independence(rule(tree, TARGET[tree.tokens], generator=generator).bonus) > 1e-3
    with ByRow(torch.rand(rows // 2, 64, generator=generator).repeat_interleave(2, 0)):
        assert independence(rule(tree, TARGET[tree.tokens]).bonus) < 1e-9


@pytest.mark.parametrize(("rule", "branches"), CASES, ids=names)
def test_one_seed_one_verdict(rule, branches):
    tree = drawn(branches, 50, torch.Generator().manual_seed(7))
    one, two = (rule(tree, TARGET[tree.tokens], generator=torch.Generator().manual_seed(8)) for _ in range(2))
    assert torch.equal(one.path, two.path)
    assert torch.equal(one.bonus, two.bonus)


@pytest.mark.parametrize(("rule", "branches"), CASES, ids=names)
def test_no_generator_means_torchs_own(rule, branches):
    tree = drawn(branches, 50, torch.Generator().manual_seed(7))
    with torch.random.fork_rng():
        torch.manual_seed(8)
        one = rule(tree, TARGET[tree.tokens])
    assert torch.equal(one.bonus, rule(tree, TARGET[tree.tokens], generator=torch.Generator().manual_seed(8)).bonus)


@pytest.mark.parametrize(("rule", "branches"), CASES, ids=names)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_precision(rule, branches, dtype):
    """Half-precision laws do not sum to one, and a greedy law in them is one-hot."""
    tree = drawn(branches, 200, torch.Generator().manual_seed(9))
    assert tree.draft_probs is not None
    tree = dataclasses.replace(tree, draft_probs=tree.draft_probs.to(dtype))
    verdict = rule(tree, TARGET[tree.tokens].to(dtype), generator=torch.Generator().manual_seed(1))
    assert verdict.num_accepted.min() >= 0
    assert verdict.num_accepted.max() == 2
    greedy = torch.nn.functional.one_hot(TARGET.argmax(-1), VOCAB)[tree.tokens].to(dtype)
    verdict = rule(tree, greedy, generator=torch.Generator().manual_seed(1))
    last = tree.tokens.gather(1, verdict.path.gather(1, (verdict.num_accepted[:, None] - 1).clamp_min(0)).clamp_min(0))
    last = torch.where(verdict.num_accepted > 0, last[:, 0], 0)
    assert torch.equal(verdict.bonus, TARGET.argmax(-1)[last])
