"""The model drafter: its law, its bookkeeping, its vocabularies and its positions (field log, classes a, d, e, f).

The strongest check of the bookkeeping: a drafter that runs the target itself must never be wrong, whatever trees are
asked for and whatever rounds came before. `Twin` adds that, before every round, its answers equal those of a drafter
that was started on the committed text just now.
"""

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees, verify
from specdec.drafters import CombinedDrafter, ModelDrafter, PromptLookupDrafter, VocabularyMap
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf import open_model
from specdec.protocols import DraftContext, Drafter, TreeBuilder
from specdec.testing import OracleDrafter, check_drafter, table_model, tiny_model
from specdec.trees import topology
from specdec.types import Candidates, Frontier, Round
from tests import helpers
from tests.drafters.tokenizers import byte_level

ONE = [[5, 6, 7, 8]]
FOUR = [[5, 6, 7], [5, 9, 8, 7, 6, 5, 4, 3, 2], list(range(20, 37)), [11]]
PROMPTS = {"one": ONE, "ragged": FOUR}
SHAPES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "best first": trees.BestFirst(nodes=8, branch=3, depth=4),
    "fixed": trees.Fixed([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 1, 0)]),
}


@functools.cache
def like(family: str, noise: float = 0.02, **options: Any) -> PreTrainedModel:
    """A model that often agrees with the tiny model of its family."""
    model = copy.deepcopy(helpers.model(family, **options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_(noise * (weight.std() if weight.numel() > 1 else 0) * draw.to(weight.dtype))
    return model


class Scripted(helpers.Recorder):
    """Budgets by script, cycled; 0 drafts nothing."""

    def __init__(self, *budgets: int) -> None:
        super().__init__()
        self._script = budgets

    def budget(self) -> int:
        return self._script[(len(self.rounds) - 1) % len(self._script)]


class Twin:
    """A model drafter whose every answer is compared with that of a drafter that has just begun."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, drafter: ModelDrafter, fresh: ModelDrafter) -> None:
        self._drafter, self._fresh = drafter, fresh
        self.compared = 0

    def start(self, context: DraftContext) -> None:
        self._drafter.start(context)
        self._context = context
        rows = zip(context.tokens.tolist(), context.mask.tolist(), strict=True)
        self._texts = [[token for token, real in zip(*row, strict=True) if real] for row in rows]

    def children(self, frontier: Frontier, count: int) -> Candidates:
        if frontier.depth == 0:
            batch = helpers.batch(self._texts)
            mask = batch["attention_mask"].bool()
            self._fresh.start(dataclasses.replace(self._context, tokens=batch["input_ids"], mask=mask))
        mine, theirs = self._drafter.children(frontier, count), self._fresh.children(frontier, count)
        shown = frontier.valid[:, :, None]
        assert torch.equal(mine.tokens[frontier.valid], theirs.tokens[frontier.valid])
        for one, other in ((mine.log_probs, theirs.log_probs), (mine.probs, theirs.probs)):
            close = torch.isclose(one, other, rtol=1e-4, atol=1e-6) | ~shown
            assert bool(close.all()), f"depth {frontier.depth}: the context is not the committed text"
        self.compared += 1
        return mine

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        self._drafter.commit(tokens, counts, features)
        for text, new, count in zip(self._texts, tokens.tolist(), counts.tolist(), strict=True):
            text += new[:count]

    def finish(self) -> None:
        self._drafter.finish()


def run(
    target: PreTrainedModel,
    drafter: Drafter,
    tree: TreeBuilder,
    prompts: str | Sequence[Sequence[int]],
    *,
    controller: helpers.Recorder | None = None,
    **request: Any,
) -> tuple[Tensor, list[Round]]:
    """Ids and rounds of one call."""
    recorder = controller or helpers.Recorder()
    rows = PROMPTS[prompts] if isinstance(prompts, str) else prompts
    generator = SpeculativeGenerator(target, drafter, tree, controller=recorder)
    defaults = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
    return generator.generate(**helpers.batch(rows), **{**defaults, **request}), recorder.rounds


def reference(target: PreTrainedModel, prompts: str | Sequence[Sequence[int]], tokens: int = 24, **request: Any) -> Any:
    rows = PROMPTS[prompts] if isinstance(prompts, str) else prompts
    return helpers.plain(target, **helpers.batch(rows), max_new_tokens=tokens, **request).tolist()


def assert_never_wrong(rounds: list[Round]) -> None:
    """No round ended at a node that has children: the drafter's best is what the target takes."""
    drafted = 0
    for round in rounds[1:]:
        for row, (accepted, committed) in enumerate(
            zip(round.num_accepted.tolist(), round.num_committed.tolist(), strict=True)
        ):
            if committed <= accepted:
                continue  # stopped on the way, or before
            last = round.path[row, accepted - 1] if accepted else torch.tensor(0)
            assert int(topology.num_children(round.tree.parents)[row, last]) == 0
            drafted += int(round.tree.num_nodes[row]) > 1
    assert drafted > 0, "nothing was drafted"


# --------------------------------------------------------------------------------------------------- bookkeeping


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_drafter_that_runs_the_target_is_never_wrong(family, prompts, shape):
    target = helpers.model(family)
    output, rounds = run(target, ModelDrafter(target), SHAPES[shape], prompts, eos_token_id=[38, 61])
    assert output.tolist() == reference(target, prompts, eos_token_id=[38, 61])
    assert_never_wrong(rounds)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("branches", [(1, 1, 1), (3, 2, 1)])
def test_sampled_drafts_of_the_target_itself_are_always_accepted(prompts, branches):
    target = helpers.model()
    _, rounds = run(
        target,
        ModelDrafter(target),
        trees.Sampled(branches),
        prompts,
        do_sample=True,
        top_k=0,
        temperature=0.8,
        generator=torch.Generator().manual_seed(3),
    )
    assert_never_wrong(rounds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("script", [(4, 0), (0, 0, 0, 4), (1, 0, 8, 2, 0, 0, 3)], ids=str)
def test_c2_rounds_without_drafts_in_between_change_nothing(shape, script):
    """A round with no draft after an accepted one read the wrong slot."""
    target = helpers.model()
    output, rounds = run(
        target, ModelDrafter(target), SHAPES[shape], "ragged", controller=Scripted(*script), max_new_tokens=32
    )
    assert output.tolist() == reference(target, "ragged", 32)
    assert_never_wrong(rounds)
    assert any(int(round.tree.width) == 1 for round in rounds[1:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("shape", SHAPES)
def test_e10_every_round_drafts_what_a_fresh_drafter_would(family, shape):
    """Drafter context that is stale after acceptance, or its own guesses: no error, only lost speed."""
    target, draft = helpers.model(family), like(family)
    twin = Twin(ModelDrafter(draft), ModelDrafter(draft))
    output, rounds = run(
        target, twin, SHAPES[shape], "ragged", controller=Scripted(4, 4, 0, 2, 8, 0, 0, 4), max_new_tokens=40
    )
    assert output.tolist() == reference(target, "ragged", 40)
    assert {"partial", "empty"} < helpers.kinds(rounds)
    assert twin.compared > 10


def test_e10_a_sampled_tree_under_a_temperature_drafts_what_a_fresh_drafter_would():
    target, draft = helpers.model(), like("llama")
    twin = Twin(ModelDrafter(draft), ModelDrafter(draft))
    _, rounds = run(
        target,
        twin,
        trees.Sampled((3, 2, 1)),
        "ragged",
        do_sample=True,
        temperature=0.7,
        generator=torch.Generator().manual_seed(1),
    )
    assert {"partial", "zero"} <= helpers.kinds(rounds)


class Forgetful(ModelDrafter):
    """A wrong drafter: of the tokens it has not run it keeps the last one."""

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        super().commit(tokens, counts, features)
        for row in self._rows:
            row.waiting = row.waiting[-1:]


class Stubborn(ModelDrafter):
    """A wrong drafter: it keeps what it has run, whether it was accepted or not."""

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        runner = self._started()
        width = sum(level.usable.shape[1] for level in self._levels)
        keep = runner.keep
        everything = torch.arange(width).expand(tokens.shape[0], -1)
        runner.keep = lambda *_: keep(everything, torch.full_like(counts, width))  # type: ignore[method-assign]
        super().commit(tokens, counts, features)


@pytest.mark.parametrize("mutant", [Forgetful, Stubborn])
def test_e10_a_stale_context_is_noticed(mutant):
    draft = helpers.model() if mutant is Forgetful else like("llama")
    twin = Twin(mutant(draft), ModelDrafter(draft))
    with pytest.raises(AssertionError):
        run(helpers.model(), twin, trees.Chain(3), "ragged")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_drafter_keeps_the_laws_of_its_seam(family):
    """Answers follow from the committed tokens and the path alone: not from requests, rows, or an earlier ask."""
    rows = [[5, 6, 7, 5, 6, 9, 5, 6], [8, 9, 8, 9, 8], [4, 4]]
    check_drafter(ModelDrafter(helpers.model(family)), context(rows))
    check_drafter(CombinedDrafter(PromptLookupDrafter(), ModelDrafter(helpers.model(family))), context(rows))


def context(rows: Sequence[Sequence[int]], vocab_size: int = 97, temperature: float = 0.0) -> DraftContext:
    batch = helpers.batch(rows)
    return DraftContext(
        tokens=batch["input_ids"],
        mask=batch["attention_mask"].bool(),
        vocab_size=vocab_size,
        temperature=temperature,
        open_model=open_model,
    )


def roots(rows: Sequence[Sequence[int]]) -> Frontier:
    return Frontier.from_root(torch.tensor([row[-1] for row in rows]), valid=torch.ones(len(rows), dtype=torch.bool))


@pytest.mark.parametrize("sources", ["lookup first", "model first", "two models"])
@pytest.mark.parametrize("shape", SHAPES)
def test_combined_with_other_sources_in_one_tree_it_stays_lossless(sources, shape):
    """Nodes that another source proposed are run like its own; their rows are kept when they are accepted."""
    target = helpers.model("gemma3")
    rows = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 9, 9, 9]]
    parts: dict[str, tuple[Drafter, ...]] = {
        "lookup first": (PromptLookupDrafter(), ModelDrafter(like("gemma3"))),
        "model first": (ModelDrafter(like("gemma3")), PromptLookupDrafter()),
        "two models": (ModelDrafter(like("gemma3")), ModelDrafter(like("gemma3", noise=0.5))),
    }
    output, rounds = run(target, CombinedDrafter(*parts[sources]), SHAPES[shape], rows)
    assert output.tolist() == reference(target, rows)
    assert {"partial"} < helpers.kinds(rounds)


def test_combined_with_a_perfect_source_it_is_never_wrong():
    """The oracle's nodes are accepted; the model has run them, and its own next proposals show it."""
    target = helpers.model()
    known = torch.tensor(reference(target, "ragged"))
    twin = Twin(ModelDrafter(target), ModelDrafter(target))
    both = CombinedDrafter(OracleDrafter(known, [2, 0, 1]), twin)
    output, rounds = run(target, both, trees.BestFirst(nodes=9, branch=3, depth=4), "ragged")
    assert output.tolist() == known.tolist()
    assert helpers.kinds(rounds) >= {"partial", "zero"}
    assert twin.compared > 10


def test_b7_a_row_that_stopped_is_not_asked_about():
    """Finished rows: the drafter is told, drafts nothing for them and widens no tree for them."""
    target = helpers.model()
    first = reference(target, "ragged")[1][17]
    asked: list[tuple[list[bool], list[bool]]] = []

    class Watched(ModelDrafter):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            answer = super().children(frontier, count)
            asked.append((frontier.valid.any(-1).tolist(), (answer.log_probs > -torch.inf).flatten(1).any(-1).tolist()))
            return answer

    output, rounds = run(target, Watched(target), trees.Chain(3), "ragged", eos_token_id=[first])
    assert output[1, 17:].tolist() == [first] + [0] * (output.shape[1] - 18)
    assert asked
    for valid, answered in asked:
        assert not valid[1]
        assert not answered[1]
    assert all(int(round.tree.num_nodes[1]) == 1 for round in rounds)


def test_outside_a_request_it_says_so_and_finishing_twice_is_harmless():
    drafter = ModelDrafter(helpers.model())
    drafter.finish()
    with pytest.raises(SpecdecError, match=r"call start\(context\) first"):
        drafter.children(roots([[5, 6]]), 1)
    drafter.start(context([[5, 6]]))
    drafter.finish()
    drafter.finish()
    with pytest.raises(UnsupportedError, match="open_model"):
        drafter.start(dataclasses.replace(context([[5]]), open_model=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_tokenizer": object()}, "pass both or neither"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"overflow": "wrap"}, "'stop', 'window'"),
        ({"tokenizer": object(), "vocabulary": VocabularyMap([0], [0], target_size=97, draft_size=97)}, "pass one"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    # Under tests, jaxtyping looks at the annotation first.
    with pytest.raises((UnsupportedError, TypeCheckError), match=message):
        ModelDrafter(helpers.model(), **options)


# ----------------------------------------------------------------------------------------------------------- law


@pytest.mark.parametrize("requested", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("own", [None, 0.5])
def test_a14_the_returned_law_is_the_softmax_of_the_draft_logits(requested, own):
    """Raw logits returned, processed ones drawn from: the law must be the one that draws follow."""
    draft, rows = like("llama"), [[5, 6, 7], [8, 9, 10, 11, 12]]
    drafter = ModelDrafter(draft, temperature=own)
    drafter.start(context(rows, temperature=requested))
    answer = drafter.children(roots(rows), 5)
    temperature = own or requested or 1.0
    with torch.no_grad():
        logits = [draft(torch.tensor([row])).logits[0, -1].float() for row in rows]
    for row, expected in enumerate(logits):
        law = torch.softmax(expected / temperature, -1)
        assert torch.allclose(answer.probs[row, 0], law, rtol=1e-4, atol=1e-7)
        assert torch.equal(answer.probs[row, 0, answer.tokens[row, 0]].log(), answer.log_probs[row, 0].exp().log())
        assert answer.tokens[row, 0].tolist() == expected.topk(5).indices.tolist()


def test_a14_draws_follow_the_returned_law():
    """20,000 draws from one fixed state against the returned law: total variation below .02."""
    probs = torch.tensor([[0.4, 0.35, 0.15, 0.1]] * 4)
    draft = table_model(probs.flip(1))
    drafter = ModelDrafter(draft)
    rows = [[1]] * 2_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(10):
        drafter.start(context(rows, vocab_size=4, temperature=0.6))
        tree = trees.Sampled((1,)).grow(
            drafter,
            torch.ones(2_000, dtype=torch.int64),
            torch.ones(2_000, dtype=torch.int64),
            1,
            vocab_size=4,
            generator=generator,
        )
        counts += torch.bincount(tree.tokens[:, 1], minlength=4)
        law = tree.draft_probs[0, 0]
    assert float((counts / counts.sum() - law).abs().sum() / 2) < 0.02
    assert torch.allclose(law, (probs.flip(1)[0].log() / 0.6).softmax(-1), atol=1e-6)


# -------------------------------------------------------------------------------------------------- vocabularies


class Entries:
    """A tokenizer of which only the size matters."""

    def __init__(self, entries: int) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return self._entries


@contextmanager
def ids_seen(model: PreTrainedModel) -> Iterator[list[int]]:
    """Smallest and largest id that enters a word embedding."""
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.extend([int(args[0].min()), int(args[0].max())])
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize(("rows", "draft_rows"), [(104, 97), (97, 104), (104, 90), (90, 104)])
@pytest.mark.parametrize("shape", SHAPES)
def test_d1_padded_vocabularies_of_one_tokenizer(rows, draft_rows, shape):
    """Same tokenizer of 90 entries, different padding: refused, or padding rows proposed."""
    target, draft = helpers.model("llama", vocab_size=rows), helpers.model("llama", vocab_size=draft_rows, seed=1)
    prompts = [[5, 6, 7], [8, 9]]
    output, rounds = run(target, ModelDrafter(draft, tokenizer=Entries(90)), SHAPES[shape], prompts)
    assert output.tolist() == reference(target, prompts)
    drafted = [token for round in rounds for row in round.tree.tokens[:, 1:].tolist() for token in row]
    inner = [round.tree.tokens[row, 1 : int(n)] for round in rounds for row, n in enumerate(round.tree.num_nodes)]
    assert drafted
    assert int(torch.cat(inner).max()) < 90


def concentrated(size: int, law: dict[int, list[float]], tokens: list[int]) -> Tensor:
    """A table over `size` tokens that only ever says `tokens`, with a law after each of them."""
    probs = torch.zeros(size, size, dtype=torch.float64)
    for row in range(size):
        probs[row, tokens] = torch.tensor(law.get(row, law[tokens[0]]), dtype=torch.float64)
    return probs


def assert_law(
    target_probs: Tensor, drafter: Drafter, tree: TreeBuilder, verifier: Any, start: int, *, tokens: int = 4
) -> None:
    """Sampled outputs of `tokens` tokens against their exact probabilities, by chi-square."""
    target, rows, counts = table_model(target_probs), 1_500, dict[tuple[int, ...], int]()
    generator = SpeculativeGenerator(target, drafter, tree, verifier)
    chance = torch.Generator().manual_seed(11)
    for _ in range(2):
        output = generator.generate(
            torch.full((rows, 1), start),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            generator=chance,
            pad_token_id=0,
            eos_token_id=None,
        )
        for row in output[:, 1:].tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert generator.stats.accepted > 0
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        expected = {
            (*path, token): weight * float(target_probs[(path or (start,))[-1], token])
            for path, weight in expected.items()
            for token in target_probs[(path or (start,))[-1]].nonzero().flatten().tolist()
        }
    assert set(counts) <= set(expected)
    # Outcomes that are too rare for the test's approximation are counted together.
    common = [path for path in sorted(expected) if 2 * rows * expected[path] >= 5]
    observed = [counts.get(path, 0) for path in common]
    wanted = [2 * rows * expected[path] for path in common]
    if len(common) < len(expected):
        observed.append(2 * rows - sum(observed))
        wanted.append(2 * rows - sum(wanted))
    result = stats.chisquare(observed, wanted)
    assert result.pvalue > 1e-4, result


RULES = {
    "rejection": (trees.Sampled((1, 1)), verify.Rejection()),
    "block": (trees.Sampled((1, 1)), verify.BlockVerification()),
    "tree rejection": (trees.Sampled((2, 2)), verify.TreeRejection()),
    "traversal": (trees.Sampled((2, 1)), verify.Traversal()),
    "target only": (trees.BestFirst(nodes=5, branch=2, depth=2), verify.TargetOnly()),
}


@pytest.mark.parametrize("rule", RULES)
def test_d1_sampled_outputs_keep_the_mass_of_rows_that_only_the_target_has(rule):
    """The draft has 97 rows of a tokenizer of 90 entries; the target often says 95, 99 and 103."""
    tokens = [3, 95, 99, 103]
    law = {3: [0.4, 0.3, 0.2, 0.1], 95: [0.1, 0.2, 0.3, 0.4], 99: [0.7, 0.1, 0.1, 0.1], 103: [0.25] * 4}
    draft = table_model(concentrated(97, {3: [0.6, 0.4]}, [3, 5]))
    drafter = ModelDrafter(draft, tokenizer=Entries(90))
    assert_law(concentrated(104, law, tokens), drafter, *RULES[rule], start=3)


@pytest.mark.parametrize("rule", RULES)
def test_d7_a_shortlist_of_two_tokens_leaves_the_others_their_mass(rule):
    """Statistics and residual computed inside the shortlist: tokens 0 and 1 must come out with .40 and .35."""
    probs = torch.tensor([[0.40, 0.35, 0.15, 0.10]] * 4, dtype=torch.float64)
    draft = table_model(torch.tensor([[0.3, 0.7]] * 2))
    shortlist = VocabularyMap([2, 3], [0, 1], target_size=4, draft_size=2)
    assert_law(probs, ModelDrafter(draft, vocabulary=shortlist), *RULES[rule], start=0)


def test_d7_a_law_that_is_not_the_law_of_the_draws_is_noticed():
    class Unscattered(VocabularyMap):
        def propose(self, logits: Tensor, count: int, temperature: float = 1.0) -> Any:
            tokens, log_probs, law = super().propose(logits, count, temperature)
            return tokens, log_probs, law.softmax(-1)

    probs = torch.tensor([[0.40, 0.35, 0.15, 0.10]] * 4, dtype=torch.float64)
    draft = table_model(torch.tensor([[0.3, 0.7]] * 2))
    shortlist = Unscattered([2, 3], [0, 1], target_size=4, draft_size=2)

    class Claims(ModelDrafter):
        def children(self, frontier: Frontier, count: int) -> Candidates:
            answer = super().children(frontier, count)
            return dataclasses.replace(answer, probs=None)

    class Mutant(trees.Sampled):
        """Draws from the proposals, reports the drafter's wrong law."""

        def grow(self, drafter: Drafter, *args: Any, **kwargs: Any) -> Any:
            tree = super().grow(drafter, *args, **kwargs)
            wrong = tree.draft_probs.roll(1, -1) if tree.draft_probs is not None else None
            return dataclasses.replace(tree, draft_probs=wrong)

    with pytest.raises(AssertionError):
        assert_law(probs, Claims(draft, vocabulary=shortlist), Mutant((1, 1)), verify.Rejection(), start=0)


@pytest.mark.parametrize(("entries", "draft_entries"), [(300, 400), (400, 300)])
@pytest.mark.parametrize("shape", SHAPES)
def test_d2_d4_two_tokenizers(entries, draft_entries, shape):
    """Draft texts are longer or shorter than the target's; draft ids never reach the target, nor the reverse."""
    target = helpers.model("llama", vocab_size=entries + 4)
    draft = helpers.model("gpt2", vocab_size=draft_entries + 9, seed=2)
    one, other = byte_level(entries, "english"), byte_level(draft_entries, "numbers")
    prompts = [one.encode("the cat sat on the mat"), one.encode("one two three")]
    twin = Twin(*(ModelDrafter(draft, tokenizer=other, target_tokenizer=one) for _ in range(2)))
    with ids_seen(target) as ids, ids_seen(draft) as draft_ids:
        output, rounds = run(target, twin, SHAPES[shape], prompts)
    assert output.tolist() == reference(target, prompts)
    assert 0 <= min(ids) <= max(ids) < entries + 4
    assert 0 <= min(draft_ids) <= max(draft_ids) < draft_entries
    assert any(int(round.tree.width) > 1 for round in rounds)


@pytest.mark.parametrize("rule", ["rejection", "tree rejection", "target only"])
def test_d2_two_tokenizers_keep_the_law_of_sampled_outputs(rule):
    one, other = byte_level(300, "english"), byte_level(400, "numbers")
    words = one.encode("a") + one.encode("t") + one.encode("<end>")
    alone = next(token for token in range(300) if len(other.encode(one.decode([token]))) > 1)
    tokens = [*words, alone]
    shared = [other.convert_tokens_to_ids(one.convert_ids_to_tokens(token)) for token in words]
    law = {tokens[0]: [0.4, 0.3, 0.2, 0.1], tokens[1]: [0.1, 0.2, 0.3, 0.4], tokens[2]: [0.25] * 4}
    draft = table_model(concentrated(400, {shared[0]: [0.2, 0.5, 0.3]}, shared))
    drafter = ModelDrafter(draft, tokenizer=other, target_tokenizer=one)
    assert_law(concentrated(300, law, tokens), drafter, *RULES[rule], start=tokens[0])


def test_d4_a_draft_vocabulary_of_400_and_a_target_of_97():
    """Draft-side ids that reach the target."""
    target, draft = helpers.model(), helpers.model("llama", vocab_size=400, seed=1)
    with ids_seen(target) as ids:
        output, _ = run(target, ModelDrafter(draft), trees.BestFirst(nodes=8, branch=4, depth=3), "ragged")
    assert output.tolist() == reference(target, "ragged")
    assert max(ids) < 97


def test_d5_a_reduced_draft_vocabulary_without_a_map_is_refused_and_with_one_is_obeyed():
    target, draft = helpers.model(), helpers.model("llama", vocab_size=32, seed=1)
    with pytest.raises(UnsupportedError, match="its vocabulary is reduced"):
        run(target, ModelDrafter(draft, tokenizer=Entries(97)), trees.Chain(3), "one")
    descending = VocabularyMap(range(96, 64, -1), range(32), target_size=97, draft_size=32)
    drafter = ModelDrafter(draft, vocabulary=descending)
    rows = [[96, 95, 80], [70, 66]]
    drafter.start(context(rows))
    answer = drafter.children(roots(rows), 4)
    with torch.no_grad():
        best = draft(torch.tensor([[0, 1, 16]])).logits[0, -1].topk(4).indices
    assert answer.tokens[0, 0].tolist() == (96 - best).tolist()
    output, _ = run(target, drafter, trees.Chain(3), "ragged")
    assert output.tolist() == reference(target, "ragged")
    with pytest.raises(UnsupportedError, match="build the map with target_size=104"):
        run(helpers.model("llama", vocab_size=104), drafter, trees.Chain(3), "one")


# ----------------------------------------------------------------------------------------------------- positions


def shorter(family: str, positions: int) -> PreTrainedModel:
    """The tiny model of a family, built for fewer positions, with the same weights otherwise."""
    target = helpers.model(family)
    names = ["n_positions", "max_position_embeddings"] if family == "gpt2" else ["max_position_embeddings"]
    model = tiny_model(family, **dict.fromkeys(names, positions))
    weights = {
        name: weight[: model.state_dict()[name].shape[0]] if name.endswith("wpe.weight") else weight
        for name, weight in target.state_dict().items()
    }
    model.load_state_dict(weights)
    return model


@contextmanager
def positions_seen(model: PreTrainedModel) -> Iterator[list[int]]:
    """Position ids of every forward; the largest of each."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


LONG = [list(range(3, 43)), [5, 6, 7]]
OVERFLOW = [
    ("gpt2", "stop"),
    ("gpt2", "window"),
    ("llama", "stop"),
    ("llama", "window"),
    ("llama", "extend"),
]


@pytest.mark.parametrize(("family", "overflow"), OVERFLOW)
@pytest.mark.parametrize("rows", [LONG[:1], LONG, [LONG[1], LONG[1][::-1]]], ids=["long", "both", "short"])
@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_e14_a_drafter_with_32_positions(family, overflow, rows, shape, caplog):
    """Reads beyond a table of positions, at the start (a prompt of 40) or later (34 tokens after a prompt of 3)."""
    target, draft = helpers.model(family), shorter(family, 32)
    drafter = ModelDrafter(draft, overflow=overflow)
    with positions_seen(draft) as seen, caplog.at_level(logging.WARNING):
        output, rounds = run(target, drafter, SHAPES[shape], rows, max_new_tokens=40)
        again, _ = run(target, drafter, SHAPES[shape], rows, max_new_tokens=40)
    assert output.tolist() == again.tolist() == reference(target, rows, 40)
    warnings = [record.message for record in caplog.records if "positions" in record.message]
    beyond = [round for round in rounds if bool((lengths_before(rows, rounds, round) > 34).all())]
    accepted = sum(int(round.num_accepted.sum()) for round in beyond)
    drafted = sum(int((round.tree.num_nodes - 1).sum()) for round in beyond)
    if overflow == "extend":
        assert max(seen) > 32
        assert not warnings
        assert accepted > 0, "the same weights: nothing is ever rejected"
        return
    assert max(seen, default=0) < 32
    assert len(warnings) == 1
    action = {"stop": "stops drafting", "window": "a window of recent tokens"}[overflow]
    assert action in warnings[0]
    assert (drafted > 0) == (overflow == "window")
    if rows is LONG[:1] and overflow == "stop":
        assert not seen


def lengths_before(rows: Sequence[Sequence[int]], rounds: list[Round], round: Round) -> Tensor:
    """Committed tokens per row when a round was drafted."""
    lengths = torch.tensor([len(row) for row in rows])
    return lengths + sum(earlier.num_committed for earlier in rounds[: round.index])


def test_e14_rows_with_positions_left_go_on_when_others_have_none():
    target, draft = helpers.model("gpt2"), shorter("gpt2", 32)
    _, rounds = run(target, ModelDrafter(draft), trees.Chain(3), LONG, max_new_tokens=20)
    assert all(int(round.tree.num_nodes[0]) == 1 for round in rounds)
    assert_never_wrong(rounds)
    assert sum(int(round.num_accepted[1]) for round in rounds) > 10


def test_e14_a_drafter_that_has_stopped_runs_nothing():
    target, draft = helpers.model("gpt2"), shorter("gpt2", 32)
    with helpers.forwards(draft) as calls:
        run(target, ModelDrafter(draft), trees.Chain(3), LONG[1:], max_new_tokens=28)
        before = len(calls)
        run(target, ModelDrafter(draft), trees.Chain(3), LONG[1:], max_new_tokens=60)
    assert 0 < len(calls) - before <= before + 3, "30 more tokens, no more passes than up to the last position"


@pytest.mark.parametrize("family", ["gpt2", "biogpt", "opt", "gptj"])
def test_e14_a_table_of_positions_cannot_be_extended(family):
    import transformers

    made = {
        "gpt2": lambda: helpers.model("gpt2"),
        "opt": lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=97,
                hidden_size=16,
                ffn_dim=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                word_embed_proj_dim=16,
                max_position_embeddings=32,
            )
        ),
        "biogpt": lambda: transformers.BioGptForCausalLM(
            transformers.BioGptConfig(
                vocab_size=97,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=32,
            )
        ),
        "gptj": lambda: transformers.GPTJForCausalLM(
            transformers.GPTJConfig(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=32, rotary_dim=4)
        ),
    }[family]()
    with pytest.raises(UnsupportedError, match=r"extend.*a table of (32|512) rows"):
        ModelDrafter(made, overflow="extend")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_e14_the_target_never_runs_a_position_beyond_its_limit(family, shape):
    """Limit 64, prompt 50, 14 new tokens, deep trees: no position from 64 on."""
    target = shorter(family, 64)
    deep = {"chain": trees.Chain(8), "best first": trees.BestFirst(nodes=20, branch=2, depth=8)}.get(
        shape, SHAPES[shape]
    )
    rows = [list(range(3, 53)), [7, 8, 9]]
    for prompts in (rows, rows[:1]):
        with positions_seen(target) as seen:
            output, rounds = run(target, ModelDrafter(helpers.model(family)), deep, prompts, max_new_tokens=14)
        assert output.tolist() == reference(target, prompts, 14)
        assert max(seen) < 64
        assert_never_wrong(rounds)


# ------------------------------------------------------------------------------------------ types, configurations

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def near_tie(target: PreTrainedModel, ids: Tensor, prompt: int) -> None:
    """Every produced token has the largest logit of one pass over the text, or one within rounding of it."""
    with torch.no_grad():
        logits = target(ids).logits[:, prompt - 1 : -1].float()
    gap = logits.max(-1).values - logits.gather(-1, ids[:, prompt:, None]).squeeze(-1)
    # Two passes differ by some units in the last place, whatever decodes.
    assert float(gap.max()) <= 16 * torch.finfo(target.dtype).eps * float(logits.abs().max())


@pytest.mark.parametrize("target_type", DTYPES)
@pytest.mark.parametrize("draft_type", DTYPES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_f7_dtypes_of_target_and_draft_are_independent(target_type, draft_type, sampled):
    """A clash between two configurations' types."""
    target = helpers.model("llama", dtype=DTYPES[target_type])
    draft = like("llama", dtype=DTYPES[draft_type])
    tree = trees.Sampled((2, 1, 1)) if sampled else SHAPES["best first"]
    chance = torch.Generator().manual_seed(0)
    output, rounds = run(target, ModelDrafter(draft), tree, "one", do_sample=sampled, generator=chance)
    assert any(int(round.tree.width) > 1 for round in rounds)
    assert sum(int(round.num_accepted.sum()) for round in rounds) > 0
    if not sampled:
        near_tie(target, output, len(ONE[0]))
        if target_type == "fp32":
            assert output.tolist() == reference(target, "one")


def test_f10_two_drafters_of_one_model_share_nothing_and_change_no_configuration():
    """Two speculators share one parameter object; the first changes it for the second."""
    target, draft = helpers.model(), like("llama")
    before = [model.config.to_dict() for model in (target, draft)]
    settings = [model.generation_config.to_dict() for model in (target, draft)]
    attributes = [set(vars(model)) for model in (target, draft)]
    first, second = ModelDrafter(draft, temperature=0.5), ModelDrafter(draft, overflow="window")
    alone, _ = run(target, ModelDrafter(draft), SHAPES["fixed"], "ragged")
    # Two requests at once, interleaved round by round.
    generators = [SpeculativeGenerator(target, drafter, SHAPES["fixed"]) for drafter in (first, second)]
    request = {**helpers.batch(FOUR), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    committed: list[list[Round]] = [[], []]
    streams = [generator.rounds(**request) for generator in generators]
    for pair in zip(*streams, strict=False):
        for rounds, round in zip(committed, pair, strict=True):
            rounds.append(round)
    for rounds, stream in zip(committed, streams, strict=True):
        rounds.extend(stream)
    for rounds in committed:
        texts = [[] for _ in FOUR]
        for round in rounds:
            for row, count in enumerate(round.num_committed.tolist()):
                texts[row] += round.committed[row, :count].tolist()
        assert texts == alone[:, 17:].tolist()
    assert [model.config.to_dict() for model in (target, draft)] == before
    assert [model.generation_config.to_dict() for model in (target, draft)] == settings
    assert [set(vars(model)) for model in (target, draft)] == attributes


def test_the_controller_may_start_the_drafter_late():
    """A drafter that begins in the middle of a request knows all that was committed before."""
    target = helpers.model()
    output, rounds = run(
        target, ModelDrafter(target), trees.Chain(4), "ragged", controller=Scripted(*[0] * 9, *[4] * 9)
    )
    assert output.tolist() == reference(target, "ragged")
    assert_never_wrong(rounds)
