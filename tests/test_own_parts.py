"""The loop with parts that know nothing of transformers: its laws, and what a bad drafter can do to them."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdec import Candidates, DraftTree, SpeculativeGenerator, TargetOutput, Verdict, control, trees, verify
from specdec.errors import LawError, ShapeError
from specdec.rounds import accept, rounds
from specdec.testing import PlainLedger, TableDrafter, TableTarget, check_drafter, greedy, tiny_model
from specdec.verify import StepRule, exact

VOCAB = 5


def table(seed: int, vocab: int = VOCAB, power: float = 1.0) -> Tensor:
    weights = torch.rand(vocab, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power
    return weights / weights.sum(-1, keepdim=True)


def plain_greedy(probs: Tensor, prompt: list[int], limit: int, ends: list[int]) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        text.append(int(probs[text[-1]].argmax()))
        if text[-1] in ends:
            break
    return text


# ------------------------------------------------------------------------------------------------- greedy, any parts

BUILDERS = [
    trees.Chain(3),
    trees.BestFirst(6),
    trees.BestFirst(7, temperature=2.0),
    trees.Fixed(choices=[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]),
    trees.Sampled((2, 1)),
    trees.sampled_chain(3),
]
VERIFIERS = [
    verify.TargetOnly(),
    verify.Rejection(),
    verify.BlockVerification(),
    verify.TreeRejection(),
    verify.Traversal(),
]
CONTROLLERS = [control.Always, lambda: control.Always(2), lambda: control.Always(0), control.Goodput]


@given(
    seed=st.integers(0, 1000),
    near=st.booleans(),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3), min_size=1, max_size=4),
    limit=st.integers(1, 12),
    ends=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    builder=st.sampled_from(BUILDERS),
    verifier=st.sampled_from(VERIFIERS),
    controller=st.sampled_from(CONTROLLERS),
    whole_law=st.booleans(),
)
def test_greedy_decoding_is_plain_decoding(seed, near, prompts, limit, ends, builder, verifier, controller, whole_law):
    if builder.chain is False and isinstance(verifier, (verify.Rejection, verify.BlockVerification)):
        verifier = verify.TreeRejection()
    probs = table(seed, power=4)
    drafts = probs.roll(0 if near else 1, 0)
    target = TableTarget(probs, torch.tensor(prompts))
    ledger = PlainLedger(torch.tensor(prompts), max_new_tokens=limit, eos_token_ids=ends)
    chance = torch.Generator().manual_seed(seed)
    parts = target, TableDrafter(drafts, whole_law=whole_law), builder, verifier, ledger, controller()
    committed = [round.num_committed for round in rounds(*parts, generator=chance)]
    expected = [plain_greedy(probs, prompt, limit, ends) for prompt in prompts]
    assert ledger.rows() == expected
    assert target.cached == [text[:-1] for text in expected]  # the last token is a root, and never cached
    assert torch.stack(committed).sum(0).tolist() == [len(text) - 3 for text in expected]
    assert target.passes <= max(len(text) - 3 for text in expected)


def test_a_drafter_that_knows_the_target_saves_passes():
    probs = table(1)
    target = TableTarget(probs, torch.tensor([[0]]))
    ledger = PlainLedger(torch.tensor([[0]]), max_new_tokens=9)
    parts = target, TableDrafter(probs), trees.Chain(3), verify.TargetOnly(), ledger, control.Always()
    assert [int(round.num_committed) for round in rounds(*parts)] == [1, 4, 4]


# ------------------------------------------------------------------------------------- the law of a sampled request

ROWS, LENGTH = 6000, 3
TARGET, DRAFT = table(2, 3), table(3, 3, power=2)


def surprise(
    builder: Any,
    verifier: Any,
    *,
    drafter: Any = None,
    temperature: float = 1.0,
    expected: Tensor = TARGET,
    eos: tuple[int, ...] = (),
) -> float:
    """Probability of a chi-square at least as large as that of `ROWS` sampled texts; tiny if their law is wrong."""
    prompt = torch.zeros(ROWS, 1, dtype=torch.int64)
    ledger = PlainLedger(prompt, max_new_tokens=LENGTH, do_sample=True, temperature=temperature, eos_token_ids=eos)
    drafter = drafter if drafter is not None else TableDrafter(DRAFT)
    chance = torch.Generator().manual_seed(0)
    for _ in rounds(
        TableTarget(TARGET, prompt), drafter, builder, verifier, ledger, control.Always(), generator=chance
    ):
        pass
    seen = Counter(tuple(row[1:]) for row in ledger.rows())
    law: dict[tuple[int, ...], float] = {}
    open_texts = {(): 1.0}
    for _ in range(LENGTH):
        grown = {
            (*text, token): share * float(expected[text[-1] if text else 0, token])
            for text, share in open_texts.items()
            for token in range(3)
        }
        law |= {text: share for text, share in grown.items() if text[-1] in eos}
        open_texts = {text: share for text, share in grown.items() if text[-1] not in eos}
    law |= open_texts
    assert set(seen) <= set(law)
    observed = [seen[text] for text in law]
    return float(stats.chisquare(observed, [ROWS * share for share in law.values()]).pvalue)


SAMPLED = {
    "target only, chain": (trees.Chain(2), verify.TargetOnly()),
    "target only, tree": (trees.BestFirst(4), verify.TargetOnly()),
    "target only, drawn tree": (trees.Sampled((2, 1)), verify.TargetOnly()),
    "rejection": (trees.sampled_chain(2), verify.Rejection()),
    "rejection, sure chain": (trees.Chain(2), verify.Rejection()),
    "block": (trees.sampled_chain(2), verify.BlockVerification()),
    "tree rejection": (trees.Sampled((2, 1)), verify.TreeRejection()),
    "traversal": (trees.Sampled((2, 1)), verify.Traversal()),
}


@pytest.mark.parametrize(("builder", "verifier"), SAMPLED.values(), ids=SAMPLED)
def test_samples_follow_the_target(builder, verifier):
    assert surprise(builder, verifier) > 1e-4


def test_temperature_and_end_tokens_are_part_of_the_law():
    tempered = (TARGET.log() / 0.5).softmax(-1)
    assert surprise(trees.Sampled((2, 1)), verify.TreeRejection(), temperature=0.5, expected=tempered) > 1e-4
    assert surprise(trees.Sampled((2, 1)), verify.TreeRejection(), eos=(1,)) > 1e-4


class AcceptsAll(StepRule):
    """Takes the first child, whatever the target says."""

    def step(self, tree, node, law, *, generator=None):
        exists, child = (tree.parents == node[:, None]).max(-1)
        token = tree.tokens.gather(1, child[:, None]).squeeze(1)
        return torch.where(exists, token, law.draw(generator)), torch.where(exists, child, -1)


def test_a_wrong_law_is_seen():
    assert surprise(trees.sampled_chain(2), AcceptsAll()) < 1e-9
    assert surprise(trees.sampled_chain(2), verify.Typical()) < 1e-9
    assert surprise(trees.Sampled((2, 1)), verify.TreeRejection(), temperature=0.5) < 1e-9


# ----------------------------------------------------------------------------- acceptance, summed up over every coin


class OneRound:
    """Acceptance as the loop does it, ledger included, in the form of a verifier: so it can be enumerated."""

    lossless, stepwise = True, False

    def __init__(self, verifier: Any) -> None:
        self.verifier = verifier

    def check(self, builder):
        pass

    def __call__(self, tree, target_probs, *, generator=None):
        ledger = PlainLedger(tree.tokens[:, :1], max_new_tokens=9, do_sample=True)
        output = TargetOutput(logits=target_probs.nan_to_num(1.0).log())
        walk = accept(tree, output, self.verifier, ledger, generator)
        bonus = walk.tokens.gather(1, walk.counts[:, None] - 1).squeeze(1)
        return Verdict(path=walk.children, num_accepted=walk.counts - 1, bonus=bonus)


def law_after(probs: Tensor) -> Any:
    return lambda path: probs[path[-1] if path else 0]


EXACT = [(verifier, (1, 1)) for verifier in VERIFIERS]
EXACT += [(verifier, (2,)) for verifier in (verify.TargetOnly(), verify.TreeRejection(), verify.Traversal())]


@pytest.mark.parametrize(("verifier", "branches"), EXACT, ids=lambda part: getattr(type(part), "__name__", ""))
def test_the_loop_accepts_exactly_as_its_verifier(verifier, branches):
    grown, weights = exact.draws(law_after(DRAFT), branches=branches)
    target = law_after(TARGET)
    probs = exact.laws_at(grown, target)
    alone = exact.committed(verifier, grown, probs, weights)
    looped = exact.committed(OneRound(verifier), grown, probs, weights)
    assert alone.keys() == looped.keys()
    assert max(abs(alone[path] - looped[path]) for path in alone) < 1e-12
    assert exact.lossless_error(OneRound(verifier), grown, target, weights, length=2) < 1e-12


def test_a_loop_that_accepts_too_much_is_seen():
    grown, weights = exact.draws(law_after(DRAFT), branches=(1, 1))
    assert exact.lossless_error(OneRound(AcceptsAll()), grown, law_after(TARGET), weights, length=2) > 1e-3


# -------------------------------------------------------------------------------------------- drafters that misbehave


def spoilt(**changes: Any) -> Any:
    """A drafter whose answers are changed, past the annotations, which are not checked in use."""

    class Spoilt(TableDrafter):
        def children(self, frontier, count):
            found = super().children(frontier, count)
            for name, value in {name: change(found) for name, change in changes.items()}.items():
                object.__setattr__(found, name, value)
            return found

    return Spoilt


def first_again(found: Candidates) -> Tensor:
    """The last proposal repeats the first one."""
    return torch.cat([found.tokens[..., :-1], found.tokens[..., :1]], -1)


def wide(tensor: Tensor) -> Tensor:
    return tensor.repeat(1, 2, 1)


class NoAnswer(TableDrafter):
    def children(self, frontier, count):
        return None


HARMLESS = {
    "worst first": spoilt(tokens=lambda found: found.tokens.flip(-1), log_probs=lambda found: found.log_probs.flip(-1)),
    "above 0": spoilt(log_probs=lambda found: found.log_probs + 3),
    "NaN": spoilt(log_probs=lambda found: found.log_probs * torch.nan),
    "a token twice": spoilt(tokens=first_again),
    "one token only": spoilt(tokens=lambda found: found.tokens[..., :1].expand_as(found.tokens).clone()),
    "more than asked": spoilt(
        tokens=lambda found: torch.cat([found.tokens, found.tokens], -1),
        log_probs=lambda found: torch.cat([found.log_probs, found.log_probs - 1], -1),
    ),
}
"""What breaks a law of drafters and costs speed at most."""

LOUD = {
    "negative ids": spoilt(tokens=lambda found: found.tokens - VOCAB),
    "ids too large": spoilt(tokens=lambda found: found.tokens + VOCAB),
    "no frontier axis": spoilt(tokens=lambda found: found.tokens[:, 0], log_probs=lambda found: found.log_probs[:, 0]),
    "another frontier": spoilt(tokens=lambda found: wide(found.tokens), log_probs=lambda found: wide(found.log_probs)),
    "half a batch": spoilt(tokens=lambda found: found.tokens[:1], log_probs=lambda found: found.log_probs[:1]),
    "no answer": NoAnswer,
}
"""What cannot be served."""

PROMPT = torch.tensor([[0, 1], [2, 3], [1, 4]])
EXPECTED = [plain_greedy(table(0), row, 10, []) for row in PROMPT.tolist()]


def greedy_rows(drafter: Any, builder: Any, verifier: Any = None) -> list[list[int]]:
    probs = table(0)
    ledger = PlainLedger(PROMPT, max_new_tokens=10)
    verifier = verifier or verify.default_verifier(builder, do_sample=builder.sampled)
    parts = TableTarget(probs, PROMPT), drafter(probs, whole_law=False), builder, verifier, ledger, control.Always()
    for _ in rounds(*parts, generator=torch.Generator().manual_seed(0)):
        pass
    return ledger.rows()


@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
@pytest.mark.parametrize("drafter", HARMLESS.values(), ids=HARMLESS)
def test_bad_guesses_cost_no_token(drafter, builder):
    assert greedy_rows(drafter, builder) == EXPECTED


WRONG_GUESSES = spoilt(tokens=lambda found: (found.tokens + 1) % VOCAB)


def test_a_wrong_rule_would_cost_tokens():
    assert greedy_rows(WRONG_GUESSES, trees.Chain(3), AcceptsAll()) != EXPECTED
    assert greedy_rows(WRONG_GUESSES, trees.Chain(3)) == EXPECTED


@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
@pytest.mark.parametrize("drafter", LOUD.values(), ids=LOUD)
def test_what_cannot_be_served_is_no_silent_corruption(drafter, builder):
    try:
        found = greedy_rows(drafter, builder)
    except (ShapeError, IndexError, RuntimeError, AttributeError, TypeError):
        return
    assert found == EXPECTED


@pytest.mark.parametrize("drafter", [*HARMLESS.values(), *LOUD.values()], ids=[*HARMLESS, *LOUD])
def test_the_checker_says_what_is_wrong(drafter):
    context = PlainLedger(PROMPT, max_new_tokens=1).draft_context(TableTarget(table(0), PROMPT))
    check_drafter(TableDrafter(table(0), whole_law=False), context)
    with pytest.raises(LawError, match=r"^(Spoilt|NoAnswer)\.children at depth 0"):
        check_drafter(drafter(table(0), whole_law=False), context)


@pytest.mark.parametrize("builder", [trees.Sampled((2, 1)), trees.sampled_chain(2)], ids=repr)
@pytest.mark.parametrize("drafter", HARMLESS.values(), ids=HARMLESS)
def test_bad_guesses_do_not_bend_the_law_of_samples(drafter, builder):
    assert surprise(builder, verify.TreeRejection(), drafter=drafter(DRAFT, whole_law=False)) > 1e-4


class DrawsTwins:
    """Draws among proposals without looking whether a token stands there twice: what the sampled trees must avoid."""

    sampled, chain, nodes = True, True, 1

    def grow(self, drafter, root, limits, budget, *, vocab_size, generator=None):
        law = DRAFT[root]
        twice = law.index_add(1, torch.tensor([0]), law[:, :1])  # token 0 stands there twice, each time with its mass
        child = torch.multinomial(twice, 1, generator=generator)
        tree = DraftTree(
            tokens=torch.cat([root[:, None], child], 1),
            parents=torch.tensor([[-1, 0]]).expand(len(root), -1),
            num_nodes=torch.full_like(root, 2),
            scores=torch.tensor([[0.0, -1.0]]).expand(len(root), -1),
            draft_probs=torch.stack([law, torch.zeros_like(law)], 1),
        )
        going = limits > 0
        return trees.topology.prune(tree, going[:, None].expand(-1, 2)) if not bool(going.all()) else tree


def test_twins_that_are_drawn_twice_as_often_would_bend_it():
    assert surprise(DrawsTwins(), verify.TreeRejection()) < 1e-9


def test_a_real_model_is_not_fed_ids_it_does_not_have():
    model, prompt = tiny_model("llama"), torch.tensor([[5, 6, 7]])
    uniform = torch.full((97, 97), 1 / 97)
    for change in (lambda found: found.tokens + 97, lambda found: found.tokens - 97):
        generator = SpeculativeGenerator(model, spoilt(tokens=change)(uniform, whole_law=False), trees.Chain(3))
        with pytest.raises((ShapeError, IndexError)):
            generator.generate(prompt, max_new_tokens=8, do_sample=False)
    drafter = spoilt(tokens=first_again)(uniform, whole_law=False)
    generator = SpeculativeGenerator(model, drafter, trees.BestFirst(6))
    found = generator.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, greedy(model, input_ids=prompt, max_new_tokens=8))
