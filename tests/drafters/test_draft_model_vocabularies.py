"""The model drafter with a vocabulary or a tokenizer of its own (field log, class d)."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees, verify
from specdec.drafters import ModelDrafter, VocabularyMap
from specdec.errors import UnsupportedError
from specdec.protocols import Drafter, TreeBuilder
from specdec.testing import table_model
from tests import helpers
from tests.drafters.draft_models import SHAPES, Twin, context, reference, roots, run
from tests.drafters.tokenizers import byte_level


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
    rows, counts = 2_000, dict[tuple[int, ...], int]()
    generator = SpeculativeGenerator(table_model(target_probs), drafter, tree, verifier)
    output = generator.generate(
        torch.full((rows, 1), start),
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        generator=torch.Generator().manual_seed(11),
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
    common = [path for path in sorted(expected) if rows * expected[path] >= 5]
    observed = [counts.get(path, 0) for path in common]
    wanted = [rows * expected[path] for path in common]
    if len(common) < len(expected):
        observed.append(rows - sum(observed))
        wanted.append(rows - sum(wanted))
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
    class Mutant(trees.Sampled):
        """A wrong builder: reports another law than it draws from."""

        def grow(self, *args: Any, **kwargs: Any) -> Any:
            tree = super().grow(*args, **kwargs)
            wrong = tree.draft_probs.roll(1, -1) if tree.draft_probs is not None else None
            return dataclasses.replace(tree, draft_probs=wrong)

    probs = torch.tensor([[0.40, 0.35, 0.15, 0.10]] * 4, dtype=torch.float64)
    draft = table_model(torch.tensor([[0.3, 0.7]] * 2))
    shortlist = VocabularyMap([2, 3], [0, 1], target_size=4, draft_size=2)
    with pytest.raises(AssertionError):
        assert_law(probs, ModelDrafter(draft, vocabulary=shortlist), Mutant((1, 1)), verify.Rejection(), start=0)


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


def test_sizes_that_differ_without_a_tokenizer_are_mentioned_once(caplog):
    target, draft = helpers.model("llama", vocab_size=104), helpers.model("llama", vocab_size=97, seed=1)
    drafter = ModelDrafter(draft)
    with caplog.at_level(logging.WARNING):
        run(target, drafter, SHAPES["chain"], [[5, 6, 7]])
        run(target, drafter, SHAPES["chain"], [[5, 6, 7]])
    assert ["97 ids and the target 104" in record.message for record in caplog.records] == [True]
