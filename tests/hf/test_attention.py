"""Verify attention by our op inside unmodified models: the same tokens, and the model as it was."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import SpeculativeGenerator, drafters, kv, ops, trees
from specdec.errors import ShapeError, UnsupportedError
from specdec.hf import attention
from specdec.hf.attention import Columns, TreeContext
from specdec.hf.rows import Encoded
from specdec.hf.target import ModelTarget
from specdec.protocols import KVCodec
from tests import helpers
from tests.kv.codecs import CODECS
from tests.trees.random_trees import caught

NEW = 24
BUSHY = trees.Fixed([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)])
kernel = pytest.mark.skipif(not ops.available("tree_attention", "cpu")[0], reason="triton is not installed")


def run(family: str, prompts: str, impl: attention.Attention, **options: Any) -> helpers.Run:
    return helpers.speculate(
        helpers.model(family),
        helpers.oracle(helpers.text(prompts, NEW, family), rank=1),
        BUSHY,
        attention=impl,
        **helpers.batch(helpers.PROMPTS[prompts]),
        **{"max_new_tokens": NEW, **options},
    )


@pytest.mark.parametrize("family", [family for family in helpers.DISTINCT if family != "kimi_linear"])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_greedy_tokens_equal_plain_generate(family: str, prompts: str) -> None:
    helpers.assert_equal(run(family, prompts, "reference"), helpers.text(prompts, NEW, family))


@kernel
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_kernel_serves_a_model(family: str) -> None:
    target = helpers.model(family, dtype=torch.float32)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 8}
    expected = helpers.plain(target, **request)
    drafter = helpers.oracle(expected, rank=1)
    output = helpers.speculate(target, drafter, BUSHY, attention="triton", **request).output
    assert output.tolist() == expected.tolist()


def _without_padding(self: ModelTarget, lengths: Tensor, visible: Tensor, impl: ops.Impl) -> TreeContext:
    self.starts = None
    return CONTEXT(self, lengths, visible, impl)


def _without_windows(self: ModelTarget, lengths: Tensor, visible: Tensor, impl: ops.Impl) -> TreeContext:
    context = CONTEXT(self, lengths, visible, impl)
    columns = {None: context.columns[None]}
    return TreeContext(context.visible, context.depths, columns, (None,) * len(context.windows), impl)


def _from_the_first_slot(self: ModelTarget, lengths: Tensor, visible: Tensor, impl: ops.Impl) -> TreeContext:
    context = CONTEXT(self, lengths, visible, impl)
    columns = {window: Columns(lengths, place.starts) for window, place in context.columns.items()}
    return TreeContext(context.visible, context.depths, columns, context.windows, impl)


CONTEXT = ModelTarget._tree_context


@pytest.mark.parametrize(
    ("wrong", "family"),
    [(_without_padding, "llama"), (_without_windows, "gemma3"), (_from_the_first_slot, "gemma3")],
)
def test_a_wrong_context_is_noticed(wrong: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelTarget, "_tree_context", wrong)
    try:
        output = run(family, "ragged", "reference").output.tolist()
    except ShapeError:  # the op's own check of lengths
        return
    assert output != helpers.text("ragged", NEW, family).tolist()


def test_the_model_keeps_its_own_attention() -> None:
    target = helpers.model()
    before = target.config._attn_implementation
    generator = SpeculativeGenerator(target, tree=trees.Chain(3), attention="reference")
    for _ in generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=4, do_sample=False):
        assert target.config._attn_implementation == before

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle of a forward")

    handle = target.model.layers[1].register_forward_hook(fail)
    try:
        rounds = generator.rounds(**helpers.batch(helpers.ONE), max_new_tokens=4, do_sample=False)
        with pytest.raises(RuntimeError, match="in the middle"):
            list(rounds)
    finally:
        handle.remove()
    assert target.config._attn_implementation == before


def test_on_a_cpu_auto_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "tree_attention", None)
    assert run("llama", "one", "auto").output.tolist() == helpers.text("one", NEW).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "asks for weights"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}, "has gaps"),
    ],
)
def test_what_the_op_cannot_serve_is_refused_before_any_forward(options: dict[str, Any], message: str) -> None:
    target = helpers.model("llama", attn_implementation="eager")
    request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, **options}
    with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=message):
        helpers.speculate(target, drafters.PromptLookupDrafter(), trees.Chain(2), attention="reference", **request)
    assert calls == []


def test_keys_that_are_made_after_the_cache_was_read_are_the_model_s_own_affair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Multi-head latent attention: the cache holds what keys and values are made of."""
    target, request = helpers.model("kimi_linear"), {**helpers.batch(helpers.ONE), "max_new_tokens": 4}
    parts = drafters.PromptLookupDrafter(), trees.Chain(2)
    with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=r"what its cache holds.*'model'"):
        helpers.speculate(target, *parts, attention="reference", **request)
    assert calls == []
    monkeypatch.setattr(ops, "available", lambda *_: (True, ""))
    assert attention.choose("auto", torch.device("cuda"), weights=False, prompt=None, latent=True) is None


def test_auto_falls_back_where_the_op_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "available", lambda *_: (True, ""))
    cuda, gaps = torch.device("cuda"), torch.tensor([[True, False, True]])
    assert attention.choose("auto", cuda, weights=False, prompt=None) == "auto"
    assert attention.choose("auto", cuda, weights=True, prompt=None) is None
    assert attention.choose("auto", cuda, weights=False, prompt=gaps) is None
    assert attention.choose("triton", cuda, weights=False, prompt=~gaps.cumsum(-1).bool()) == "triton"
    assert attention.choose("model", cuda, weights=False, prompt=None) is None


@pytest.mark.parametrize(("asked", "message"), [("flash", "got 'flash'"), ("triton", "not on 'meta'")])
def test_what_cannot_be_had_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        inspect.unwrap(attention.choose)(asked, torch.device("meta"), weights=False, prompt=None)


def test_a_bias_by_position_is_refused() -> None:
    rows = Encoded(kv.Plain(), (torch.zeros(1),), (), torch.float32)
    options = {"position_bias": torch.zeros(1), attention.CONTEXT: None}
    with pytest.raises(UnsupportedError, match="adds a bias by position"):
        attention.attend(torch.nn.Linear(1, 1), torch.zeros(1), rows, rows, None, **options)


STORED: dict[str, KVCodec] = {
    **CODECS,
    "nvfp4, rotated": kv.Hadamard(kv.NVFP4()),
    "nvfp4, centred": kv.Centered(kv.NVFP4()),
}
READ = {
    "key": st.sampled_from(sorted(STORED)),
    "value": st.sampled_from(sorted(STORED)),
    "seed": st.integers(0, 2**32),
    "softcap": st.sampled_from([None, None, 3.0]),
    "sinks": st.booleans(),
}


def law_read(key: str, value: str, seed: int, softcap: float | None, sinks: bool) -> None:
    """Attention over rows as they are stored is attention over what they stand for."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, rows = noise(2, 4, 3, 16), (noise(2, 2, 9, 16) + noise(16), noise(2, 2, 9, 16))
    kept = []
    for name, each in zip((key, value), rows, strict=True):
        state = STORED[name].fit(each)
        kept.append(Encoded(STORED[name], STORED[name].encode(each, state), state, torch.float32))
    mask = torch.tensor([[[0b001], [0b011], [0b101]]] * 2)
    options: Any = {"softcap": softcap, "sinks": noise(4) if sinks else None, "impl": "reference"}
    found = attention.read(query, *kept, mask, torch.tensor([6, 4]), **options)
    decoded = [each.decode() for each in kept]
    wanted = ops.tree_attention(query, *decoded, mask, torch.tensor([6, 4]), **options)
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)


@given(**READ)
def test_stored_rows_are_read_as_what_they_stand_for(**inputs: Any) -> None:
    law_read(**inputs)


def test_a_mean_left_out_of_capped_scores_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_scores_shift", lambda _: True)
    caught(law_read, **READ)


@pytest.mark.parametrize("name", sorted(STORED))
def test_codes_reach_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in codes are never decoded, values only if their mean is kept apart."""
    rows = torch.randn(1, 2, 9, 16)
    state = STORED[name].fit(rows)
    kept = Encoded(STORED[name], STORED[name].encode(rows, state), state, torch.float32)
    read: list[torch.dtype] = []
    attend = ops.tree_attention

    def watched(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        read.extend((keys.dtype, values.dtype))
        return attend(query, keys, values, *rest, **options)

    monkeypatch.setattr(ops, "tree_attention", watched)
    attention.read(torch.randn(1, 4, 1, 16), kept, kept, torch.ones(1, 1, 1, dtype=torch.int64), torch.tensor([8]))
    assert read[0] == kept.parts[0].dtype
    assert (read[1] == kept.parts[0].dtype) == (not isinstance(kept.codec, kv.Centered))
