"""Field log, class (c): every cache type states how it rewinds, and rewinding is checked, not assumed.

After every round, lengths are those of the committed text and states those of a fresh pass over it. Each test is named
after its row of the log; rows about windows (C5, C6) and caches of transformers are in `tests/hf`.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdec import drafters, kv, trees
from specdec.hf.cache import RowCache
from specdec.hf.recurrent import RecurrentLayer, RecurrentStates
from specdec.hf.target import ModelTarget
from specdec.protocols import TreeBuilder
from specdec.testing import OracleDrafter
from tests import helpers
from tests.hf import device_runs
from tests.hf.hybrid import (
    EXACT,
    FLOAT64,
    HYBRID,
    PLAIN,
    Hybrid,
    States,
    difference,
    exact,
    folded,
    plain_cache,
    recurrent,
)
from tests.hf.texts import ROWS, draft, model

NEW = 24
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(4),
    "tree": trees.Fixed(
        [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)]
    ),
}
RANK = {"chain": 0, "tree": 1}
"""Place of the right token among its siblings."""


@contextmanager
def watched() -> Iterator[list[tuple[list[int], States]]]:
    """Lengths and states after every round of every request inside."""
    seen: list[tuple[list[int], States]] = []
    keep = RowCache.keep

    def kept(self: RowCache, nodes: Tensor, counts: Tensor) -> None:
        keep(self, nodes, counts)
        seen.append((self.lengths.tolist(), folded(self.recurrent)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCache, "keep", kept)
        yield seen


def check_states(family: str, seen: list[tuple[list[int], States]], output: Tensor, prompts: str) -> None:
    """States after each round are those of a fresh pass over the row's committed text; inside `exact`."""
    target, width = helpers.model(family), helpers.START[prompts]
    for lengths, states in seen:
        for row, (prompt, length) in enumerate(zip(helpers.PROMPTS[prompts], lengths, strict=True)):
            text = output[row, width - len(prompt) : length].tolist()
            assert difference(states, row, recurrent(plain_cache(target, text))) <= EXACT


def run(
    family: str, prompts: str, tree: str, schedule: list[Any], *, new: int = NEW, **request: Any
) -> tuple[helpers.Run, Tensor]:
    """An oracle's run, and what plain generate gives."""
    asked = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": new, **request}
    reference = helpers.plain(helpers.model(family), **asked)
    drafter = OracleDrafter(reference, schedule, rank=RANK[tree])
    return helpers.speculate(helpers.model(family), drafter, TREES[tree], codecs=FLOAT64, **asked), reference


def c1(family: str, tree: str, schedule: list[Any], prompts: str = "ragged") -> helpers.Run:
    """Text and states of a run, in float64 throughout."""
    helpers.model(family)
    with exact(), watched() as seen:
        made, reference = run(family, prompts, tree, schedule, new=17)
        assert made.output.tolist() == reference.tolist()
        check_states(family, seen, made.output, prompts)
    assert len(seen) > 3
    return made


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("tree", TREES)
def test_c1_rejected_tokens_leave_no_trace_in_the_state(family, tree):
    """Hybrid models repeat, or emit runs of one token."""
    assert c1(family, tree, [2, 0, 4, 1]).kinds >= {"partial", "zero"}


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize(("tree", "prompts"), [("chain", "one"), ("tree", "ragged")])
def test_c2_a_round_without_drafts_after_an_accepted_one(family, tree, prompts):
    """It reads the state behind the accepted path. In a batch, rows draft nothing while others do."""
    schedule = [4, None, 4, None, 0]
    shifted = [schedule[row:] + schedule[:row] for row in range(len(helpers.PROMPTS[prompts]))]
    assert c1(family, tree, shifted, prompts).kinds >= {"full", "zero", "empty"}


def _nothing_is_dropped(patch: pytest.MonkeyPatch) -> None:
    keep = RecurrentLayer.keep

    def kept(self: RecurrentLayer, nodes: Tensor, counts: Tensor) -> None:
        rows = 0 if self.nodes is None else self.nodes.inputs.shape[1]
        keep(self, torch.arange(rows).expand(len(nodes), -1), torch.full_like(counts, rows))

    patch.setattr(RecurrentLayer, "keep", kept)


def _rounds_of_one_row_fold_nothing(patch: pytest.MonkeyPatch) -> None:
    """The path of the round before is forgotten where nothing was drafted."""
    begin = RecurrentStates.begin

    def begun(self: RecurrentStates, visible: Tensor) -> None:
        if visible.shape[1] == 1:
            for layer in self.layers:
                layer.path = None
        begin(self, visible)

    patch.setattr(RecurrentStates, "begin", begun)


@pytest.mark.parametrize("mutate", [_nothing_is_dropped, _rounds_of_one_row_fold_nothing])
def test_c1_c2_wrong_states_are_noticed(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        c1("qwen3_5", "chain", [4, None, 0], "one")


def test_c1_the_text_that_a_wrong_state_gives_is_noticed(monkeypatch):
    """The symptom of the log: the text differs within two dozen tokens."""
    _nothing_is_dropped(monkeypatch)
    made, reference = run("qwen3_next", "one", "chain", [2, 0, 4, 1])
    assert made.output.tolist() != reference.tolist()


LONG = 208


def long(family: str, schedule: Any, **request: Any) -> helpers.Run:
    drafter = OracleDrafter(helpers.text("one", LONG, family), schedule, rank=1)
    asked = {**helpers.batch(helpers.ONE), "max_new_tokens": LONG, **request}
    return helpers.speculate(helpers.model(family), drafter, TREES["tree"], **asked)


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_c1_a_long_text_and_stop_tokens_inside_its_blocks(family):
    """More than 200 tokens with states in float32, as transformers has them; then it ends where a token is first."""
    reference, start = helpers.text("one", LONG, family), helpers.START["one"]
    helpers.assert_equal(long(family, helpers.MIXED), reference)
    new = reference[0, start:].tolist()
    assert len(new) == LONG
    assert len(set(itertools.pairwise(new[-40:]))) > 12, "the text is a loop"
    drafted = set()
    for place in sorted({new.index(token) for token in new})[-3::2]:
        assert place > 40
        stopped = long(family, [9], eos_token_id=new[place])
        assert stopped.output.tolist() == reference[:, : start + place + 1].tolist()
        last = stopped.rounds[-1]
        drafted.add(bool(last.path[0, int(last.num_committed[0]) - 1] >= 0))
    assert True in drafted, "no stop token was drafted"


# ----------------------------------------------------------------------------------------------------------- C4 and C8

SPLITS = range(1, 7)
"""Tokens of a pass: one to two more than the convolution reaches."""


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("size", SPLITS)
def test_c4_states_after_one_pass_equal_those_of_single_steps(family, size):
    """From a cache that holds something: a chain at once, one token at a time, and as the rest of a prompt."""
    assert model(family).config.get_text_config().linear_conv_kernel_dim + 2 == SPLITS[-1]
    chain = draft(size, [size, size], "chain")
    with exact():
        together, single = (Hybrid(model(family), ROWS[:2], cache=FLOAT64) for _ in range(2))
        assert together.error(chain) <= EXACT
        together.commit([size - 1] * 2)
        for step in range(size):
            root = draft(0, [1, 1])
            root = type(root)(chain.tokens[:, step : step + 1], root.parents, root.num_nodes, root.scores)
            single._tree = root
            single.target.verify(root)
            single.commit([0, 0])
        for texts in (together, single):
            assert texts.state_error() <= EXACT
        text = ROWS[2] + chain.tokens[0].tolist()
        cache = plain_cache(model(family), ROWS[2])
        kwargs = {"cache": cache, "position_ids": torch.arange(len(ROWS[2]), len(text))[None]}
        rest = ModelTarget(model(family), torch.tensor([text[-size:]]), model_kwargs=kwargs, cache=FLOAT64)
        rest.prefill()
        steps = recurrent(plain_cache(model(family), text, step=1))
        assert difference(folded(rest.cache.recurrent), 0, steps) <= EXACT


@pytest.mark.parametrize("family", HYBRID)
def test_c8_length_is_not_read_from_a_recurrent_layer(family):
    """Layer 0 knows no length; neither does transformers ask it."""
    texts = Hybrid(model(family), [list(range(3, 23))])
    assert isinstance(texts.target.cache.layers[0], RecurrentLayer)
    assert texts.target.lengths.tolist() == [20]
    assert texts.target.cache.get_seq_length() == 20
    texts.error(draft(1, [5]))
    texts.commit([4])
    texts.error(draft(2, [1]))
    assert texts.target.lengths.tolist() == [len(texts.texts[0])]
    assert texts.target.cache.get_seq_length() == len(texts.texts[0])
    assert texts.target.cache.to_dynamic(texts.model.config).get_seq_length() == len(texts.texts[0])


# ----------------------------------------------------------------------------------------------------------------- C10

CODECS = {"plain": kv.KVCacheConfig(), "coded": kv.KVCacheConfig(keys=kv.Int8(), values=kv.Int8())}
LAYERS = {"full and sliding": "gemma3", "full and recurrent": "qwen3_5"}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", ["chain", "tree", "batch", "empty"])
def test_c10_each_cache_class_rewinds_by_what_it_is(layers, codec, shape):
    """A quantized key/value cache is no recurrent state, nor the reverse: drafting changes no token with any."""
    family, prompts = LAYERS[layers], "ragged" if shape == "batch" else "one"
    tree, target = "chain" if shape == "chain" else "tree", helpers.model(family)
    options: dict[str, Any] = {"codecs": CODECS[codec]}
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 12}
    never = drafters.PromptLookupDrafter()
    expected = helpers.speculate(target, never, TREES[tree], **options, **request, num_draft_tokens=0).output
    if codec == "plain":
        assert expected.tolist() == helpers.plain(target, **request).tolist()
    schedule = [None] if shape == "empty" else [2, 0, None, 4, 1]
    made = helpers.speculate(
        target, OracleDrafter(expected, schedule, rank=RANK[tree]), TREES[tree], **options, **request
    )
    assert made.output.tolist() == expected.tolist()
    assert made.kinds == ({"empty"} if shape == "empty" else {*made.kinds, "zero", "partial", "empty"})


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("codec", CODECS)
def test_c10_the_caches_of_device_rounds_too(layers, codec):
    target = helpers.model(LAYERS[layers])
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 12}
    options = {"codecs": CODECS[codec], "num_draft_tokens": 0}
    expected = helpers.speculate(target, drafters.PromptLookupDrafter(), TREES["chain"], **options, **request).output
    made = device_runs.serve(
        device_runs.generator(target, cache=CODECS[codec]), device_runs.oracle(expected), **request
    )
    assert made.output.tolist() == expected.tolist()
    assert made.kinds >= {"zero", "partial", "empty"}


def test_c10_each_layer_holds_what_its_type_says():
    """Codecs are for rows of keys and values; states have a dtype and no codec."""
    coded = Hybrid(model("qwen3_5"), ROWS[:2], cache=kv.KVCacheConfig(keys=kv.Int8(), values=kv.Int8()))
    plain = Hybrid(model("qwen3_5"), ROWS[:2])
    for index, kind in enumerate(coded.model.config.layer_types):
        layer, other = (texts.target.cache.layers[index] for texts in (coded, plain))
        assert isinstance(layer, RecurrentLayer) == (kind == "linear_attention")
        if isinstance(layer, RecurrentLayer):
            assert layer.state.dtype == torch.float32
            before = index < coded.model.config.layer_types.index("full_attention")
            assert torch.equal(layer.state, other.state) == before, "what stands before attention sees no codec"
        else:
            assert layer.keys.dtype == torch.int8


# ----------------------------------------------------------------------------------------------------------------- C11


@pytest.mark.parametrize(("family", "place"), list(zip(HYBRID, [2, 3, 4, 5], strict=True)))
def test_c11_a_cache_that_ends_in_an_end_token_holds_all_but_that_token(family, place):
    """Off-by-one rewind when the last cached token is an end token; a state cannot be cut afterwards."""
    target, request = helpers.model(family), helpers.batch(helpers.ONE)
    text, start = helpers.text("one", NEW, family), helpers.START["one"]
    end = int(text[0, start + place])
    request |= {"max_new_tokens": NEW, "eos_token_id": end, "return_dict_in_generate": True}
    expected = helpers.plain(target, **request).sequences
    first = helpers.speculate(target, OracleDrafter(text, [4]), TREES["chain"], **request)
    assert first.output.sequences.tolist() == expected.tolist()
    assert first.output.cache.get_seq_length() == expected.shape[1] - 1 < start + NEW - 1
    assert type(first.output.cache) is DynamicCache
    fresh = recurrent(plain_cache(target, expected[0, :-1].tolist()))
    assert difference(recurrent(first.output.cache), 0, fresh) <= PLAIN
    more = {"input_ids": expected, "max_new_tokens": 12}
    reference = helpers.plain(target, **more)
    second = helpers.speculate(target, helpers.oracle(reference), TREES["tree"], **more, cache=first.output.cache)
    assert second.output.tolist() == reference.tolist()
    assert second.kinds >= {"full", "empty", "zero"}
    assert helpers.plain(target, **more, cache=first.output.cache).tolist() == reference.tolist()
