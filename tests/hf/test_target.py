"""The target against the model itself: every node's logits equal a full forward over that node's own text.

Full forwards run without a cache, without padding and one text at a time, so nothing that the target keeps or builds
can hide in the reference.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig

from specdec import trees
from specdec.errors import UnsupportedError
from specdec.hf import masks, support
from specdec.hf.cache import RowLayer
from specdec.hf.target import ModelTarget, open_model
from specdec.protocols import ModelRunner, Target
from specdec.types import DraftTree
from tests import helpers
from tests.hf.texts import ROWS, Texts, draft, float64_softmax, model, play
from tests.trees.random_trees import caught

SDPA = [family for family in helpers.DISTINCT if family != "gpt_oss"]  # sinks have no place in torch's sdpa
CASES = [(family, "sdpa") for family in SDPA] + [(family, "eager") for family in helpers.DISTINCT]


@pytest.mark.parametrize(("family", "implementation"), CASES)
@pytest.mark.parametrize("rows", [ROWS[1:2], ROWS[:2]], ids=["one", "ragged"])
def test_c6_g8_every_node_equals_a_full_forward_over_its_own_text(family, implementation, rows):
    """Ring buffers that drop too much, windows by row instead of position, rows that see their siblings."""
    with float64_softmax():
        target_model = model(family, implementation)
        # The full forward computes the rule of recurrent layers in float32, whatever the model's dtype.
        exact = "linear_attention" not in getattr(target_model.config, "layer_types", [])
        assert play(Texts(target_model, rows), seed=1, rounds=3) <= (1e-10 if exact else 1e-4)


@pytest.mark.parametrize("family", [family for family in helpers.DISTINCT if family not in ("gpt2", "gpt_oss")])
def test_eager_attention_is_as_exact_as_its_float32_softmax(family):
    """What the test above leaves out: transformers' own rounding, of the order of 1e-7 in logits around 1."""
    assert play(Texts(model(family, "eager"), ROWS[:2]), seed=1, rounds=2) <= 1e-5


FULL_3X3 = [-1, *[0] * 3, *[1] * 3, *[2] * 3, *[3] * 3]
SHAPES = {
    "one node": [-1],
    "four children": [-1, 0, 0, 0, 0],
    "a chain of five": [-1, 0, 1, 2, 3, 4],
    "full three by three": FULL_3X3,
    "breadth first, last child first": [-1, 0, 0, 0, 3, 3, 2, 1, 7, 4, 4],
    "depth first": [-1, 0, 1, 2, 1, 0, 5, 6, 5],
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_g8_tree_shapes(family, shape):
    """Code that was written for one shape."""
    parents = torch.tensor([SHAPES[shape]])
    tokens = torch.arange(20, 20 + parents.shape[1])[None]
    tree = DraftTree(tokens, parents, torch.tensor([parents.shape[1]]), torch.zeros(parents.shape))
    texts = Texts(model(family), ROWS[1:2])
    assert texts.error(tree) <= 1e-10
    texts.commit([parents.shape[1] - 1])
    assert texts.error(tree) <= 1e-10


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("nodes", "style"), [(64, "any"), (65, "deep"), (130, "any"), (100, "chain")])
def test_g8_trees_of_more_nodes_than_a_mask_word_or_a_window_holds(family, nodes, style):
    """64 nodes are one word of ancestor bits."""
    tree = draft(nodes, [nodes], style)
    texts = Texts(model(family), ROWS[:1])
    texts._tree = tree
    logits = texts.target.verify(tree).logits
    for node in [*random.Random(nodes).sample(range(nodes), 12), nodes - 1]:
        assert (logits[0, node] - texts.full(texts.texts[0] + texts.path(0, node))).abs().max() <= 1e-10
    texts.commit([nodes - 1])
    assert texts.error(draft(1, [4])) <= 1e-10


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 2, 3, 6])
def test_c5_windows_shorter_than_tree_and_prompt(window, implementation):
    """Mask width and key width computed from different rules, once the window is reached within a draft."""
    target_model = model("mistral", implementation, sliding_window=window)
    with float64_softmax(), shapes_checked():
        assert play(Texts(target_model, ROWS[:3]), seed=window, rounds=6, most=9) <= 1e-10


@contextmanager
def shapes_checked() -> Iterator[list[int]]:
    """Checks in every layer of every forward that the mask has a column for each key."""
    columns: list[int] = []
    update, build = RowLayer.update, ModelTarget._mask
    widths: dict[int | None, int] = {}
    with pytest.MonkeyPatch.context() as patch:

        def updated(self: RowLayer, keys: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            shown = update(self, keys, *args, **kwargs)
            if self.plan is not None and widths:
                assert shown[0].shape[2] == shown[1].shape[2] == widths[self.sliding_window]
                columns.append(shown[0].shape[2])
            return shown

        def built(self: ModelTarget, *args: Any) -> Any:
            made = build(self, *args)
            widths.clear()
            masks_of = made if isinstance(made, dict) else dict.fromkeys(self._kinds, made)
            if made is not None:
                widths.update({window: masks_of[kind].shape[-1] for kind, window in self._kinds.items()})
            return made

        patch.setattr(RowLayer, "update", updated)
        patch.setattr(ModelTarget, "_mask", built)
        yield columns


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4_shared", "phi3"])
def test_c5_each_layer_gets_as_many_mask_columns_as_keys(family):
    with shapes_checked() as columns:
        play(Texts(model(family), ROWS), seed=5, rounds=4)
    assert len(columns) > 4


@pytest.mark.parametrize("level", range(8))
def test_c6_appends_of_every_size_at_every_fill_level_of_a_window(level):
    """A ring buffer that never evicts, or evicts too much, if more than one token arrives."""
    target_model = model("mistral", sliding_window=6)
    for size in range(1, 9):
        texts = Texts(target_model, [list(range(3, 4 + level))])
        assert texts.error(draft(size, [size], "chain")) <= 1e-10
        texts.commit([size - 1])
        assert texts.error(draft(1, [2])) <= 1e-10


def test_c8_length_is_not_read_from_a_sliding_layer():
    """Sequence length capped at the window."""
    texts = Texts(model("gemma3"), [list(range(3, 23))])
    assert texts.model.config.layer_types[0] == "sliding_attention"
    assert texts.target.lengths.tolist() == [20]
    play(texts, seed=2, rounds=3)
    assert texts.target.lengths.tolist() == [len(texts.texts[0])]
    assert {layer.get_seq_length() for layer in texts.target.cache.row_layers} == {texts.target.lengths.item()}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@given(seed=st.integers(0, 2**32), rows=st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(max_examples=10)
def test_after_every_round_the_state_equals_a_fresh_pass(family, seed, rows):
    """The rule of class c: a cache is what a fresh pass over the committed tokens would have made."""
    rng = random.Random(seed)
    texts = Texts(model(family), [[rng.randrange(97) for _ in range(length)] for length in rows])
    play(texts, seed, rounds=3)
    fresh = Texts(model(family), texts.texts)
    roots = draft(seed, [1] * len(rows))
    assert torch.allclose(texts.target.verify(roots).logits, fresh.target.verify(roots).logits, atol=1e-10, rtol=0)
    for mine, theirs in zip(texts.target.cache.row_layers, fresh.target.cache.row_layers, strict=True):
        for row, text in enumerate(texts.texts):
            reach = len(text) if mine.sliding_window is None else min(len(text), mine.sliding_window - 1)
            ends = [int(target.lengths[row]) for target in (texts.target, fresh.target)]
            kept = [
                layer.keys[row, :, end - reach - layer.base : end - layer.base]
                for layer, end in zip((mine, theirs), ends, strict=True)
            ]
            assert torch.allclose(*kept, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), rounds=st.integers(1, 3))
@settings(max_examples=8)
def test_rows_appended_level_by_level_equal_the_tree_at_once(family, seed, sizes, rounds):
    """A drafter's runner and a target are the same machine."""
    whole, parts = Texts(model(family), ROWS[:2]), Texts(model(family), ROWS[:2])
    assert isinstance(whole.target, Target)
    assert isinstance(parts.target, ModelRunner)
    rng = random.Random(seed)
    for _ in range(rounds):
        tree = draft(rng.randrange(2**32), [sum(sizes)] * 2)
        visible = trees.topology.ancestor_matrix(tree.parents)
        expected, start = whole.target.verify(tree).logits, 0
        for rows in sizes:
            part = slice(start, start + rows)
            start += rows
            depths = visible[:, part].sum(-1) - 1
            found = parts.target.append(tree.tokens[:, part], depths, visible[:, part, :start])
            assert torch.allclose(found.logits, expected[:, part], atol=1e-10, rtol=0)
        leaves = [rng.randrange(sum(sizes)) for _ in range(2)]
        for texts in (whole, parts):
            texts._tree = tree
            texts.commit(leaves)
        assert whole.target.lengths.tolist() == parts.target.lengths.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 3, 8, 50])
def test_a_prompt_in_chunks_leaves_the_same_state(family, chunk):
    whole = Texts(model(family), ROWS[:3])
    parts = Texts(model(family), ROWS[:3], generation_config=GenerationConfig(prefill_chunk_size=chunk))
    assert torch.allclose(whole.first.logits, parts.first.logits, atol=1e-10, rtol=0)
    assert play(parts, seed=chunk, rounds=3) <= 1e-10


def test_features_are_the_hidden_states_of_the_chosen_layers():
    texts = Texts(model("llama"), ROWS[1:2], feature_layers=(0, 2))

    @torch.no_grad()
    def expected(text: list[int]) -> Tensor:
        states = texts.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[0], states[2]], -1)[0]

    assert torch.allclose(texts.first.features[0], expected(texts.texts[0]), atol=1e-10)
    tree = draft(3, [5])
    output = texts.target.verify(tree)
    texts._tree = tree
    for node in range(5):
        state = expected(texts.texts[0] + texts.path(0, node))[-1]
        assert torch.allclose(output.features[0, node], state, atol=1e-10)


def test_the_committed_length_is_what_positions_follow_from():
    """Class a's rule, at the target: positions derive from committed tokens, in each row."""
    texts = Texts(model("gpt2"), ROWS)
    widest = max(map(len, ROWS))
    for _ in range(3):
        play(texts, seed=3, rounds=1)
        assert texts.target.lengths.tolist() == [
            widest + len(text) - len(row) for text, row in zip(texts.texts, ROWS, strict=True)
        ]
        assert texts.target.depth_limit.tolist() == [512 - 1 - len(text) for text in texts.texts]


def test_a_second_verify_replaces_the_first():
    """Law of the seam: a tree that was not committed leaves nothing behind."""
    texts = Texts(model("gemma3"), ROWS[:2])
    assert texts.error(draft(1, [5, 3])) <= 1e-10
    assert texts.error(draft(2, [4, 6])) <= 1e-10
    texts.commit([3, 2])
    assert texts.error(draft(3, [2, 2])) <= 1e-10


def test_e14_no_limit_where_the_model_names_none(monkeypatch):
    monkeypatch.setattr(support, "position_limit", lambda _: None)
    assert Texts(model("llama"), ROWS[:1]).target.depth_limit is None


@pytest.mark.parametrize("layout", ["left", "right", "holes"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_b2_an_opened_model_runs_the_marked_tokens_wherever_they_stand(family, layout):
    """Left and right padding, and gaps: a row is its marked tokens and nothing else."""
    width, rng = 20, random.Random(4)
    tokens, mask = torch.full((4, width), 77), torch.zeros(4, width, dtype=torch.bool)
    for row, text in enumerate(ROWS):
        places = {
            "left": range(width - len(text), width),
            "right": range(len(text)),
            "holes": sorted(rng.sample(range(width), len(text))),
        }[layout]
        tokens[row, list(places)] = torch.tensor(text)
        mask[row, list(places)] = True
    target = open_model(model(family), tokens, mask)
    texts = Texts(model(family), ROWS)
    tree = draft(1, [3] * 4)
    assert texts.error(tree) <= 1e-10
    assert torch.allclose(target.verify(tree).logits, texts.target.verify(tree).logits, atol=1e-10, rtol=0)


def test_one_mask_for_layers_with_different_windows_is_refused():
    config = model("llama").config
    kinds = ["sliding_attention", "full_attention"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.hf.compat.get_layer_types_and_kwargs", lambda _: (kinds, [{"sliding_window": 4}, {}]))
        with pytest.raises(UnsupportedError, match="a single attention mask"):
            ModelTarget(model("llama"), torch.tensor([[5]]))
        patch.setattr(
            "specdec.hf.compat.get_layer_types_and_kwargs",
            lambda _: (["sliding_attention"] * 2, [{"sliding_window": 4}, {"sliding_window": 9}]),
        )
        patch.setattr("specdec.hf.compat.has_layer_types", lambda _: True)
        with pytest.raises(UnsupportedError, match="one attention mask per layer type"):
            ModelTarget(model("llama"), torch.tensor([[5]]))
    assert config is model("llama").config


def test_position_axes_without_one_for_the_text_are_refused():
    with pytest.raises(UnsupportedError, match=r"\(4, batch, seq\) with the text's axis first"):
        ModelTarget(model("llama"), torch.tensor([[5]]), model_kwargs={"position_ids": torch.zeros(3, 1, 1)})


def wrong(mutate: Callable[[pytest.MonkeyPatch], None], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        assert play(Texts(model("gemma3"), ROWS[:2]), seed, rounds=3) <= 1e-10


def _positions_by_row(patch: pytest.MonkeyPatch) -> None:
    append = ModelTarget.append
    patch.setattr(
        ModelTarget,
        "append",
        lambda self, tokens, depths, visible: append(
            self, tokens, torch.arange(tokens.shape[1]).expand_as(depths), visible
        ),
    )


def _position_counts_drafts(patch: pytest.MonkeyPatch) -> None:
    keep = ModelTarget.keep

    def counted(self: ModelTarget, rows: Tensor, counts: Tensor) -> None:
        keep(self, rows, counts)
        self.next_position = self.next_position + 1

    patch.setattr(ModelTarget, "keep", counted)


def _drops_a_slot_of_the_window(patch: pytest.MonkeyPatch) -> None:
    build = masks.visible_slots

    def short(lengths, depths, pending, visible, prompt, window, first, end):
        return build(lengths, depths, pending, visible, prompt, window and window - 1, first, end)

    patch.setattr(masks, "visible_slots", short)


@pytest.mark.parametrize("mutate", [_positions_by_row, _position_counts_drafts, _drops_a_slot_of_the_window])
def test_a_wrong_target_is_noticed(mutate):
    caught(wrong, mutate, seed=st.integers(0, 9))
