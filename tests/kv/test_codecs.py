"""Laws of the codecs: rows stand for themselves, errors stay within what the format allows, bits are counted right."""

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import kv
from specdec.errors import ShapeError, UnsupportedError
from specdec.kv import _checks
from specdec.ops import quantize
from specdec.protocols import KVCodec
from tests.kv.codecs import CODECS
from tests.trees.random_trees import caught
from tests.unchecked import unchecked

STEPS = {"int8": 0.5 / 127, "int4": 0.5 / 15, "fp8 per token": 2**-4, "fp8 per head": 2**-4, "nvfp4": 0.25}
"""Largest error of a number, as a share of the largest number of its row (for INT4: of twice that)."""


def rows(seed: int, slots: int, dim: int, style: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows like a cache's: noise, one channel far from zero, a few large channels, zeros, huge and tiny numbers."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 3, slots, dim, generator=generator)
    if style == "shifted":
        noise[..., dim // 3] += 100
    elif style == "outliers":
        noise[..., :: max(1, dim // 4)] *= 20
    elif style == "zeros":
        noise[:, :, ::2] = 0
    elif style == "huge":
        noise *= 1e4
    elif style == "tiny":
        noise *= 1e-30
    return noise.to(dtype)


CASES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "slots": st.integers(1, 9),
    "dim": st.sampled_from([16, 64, 80, 96]),
    "style": st.sampled_from(["noise", "shifted", "outliers", "zeros", "huge", "tiny"]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
}


def coded(codec: KVCodec, given_rows: Tensor, state: tuple[Tensor, ...]) -> Tensor:
    return codec.decode(codec.encode(given_rows, state), state, given_rows.dtype)


@pytest.mark.parametrize("name", CODECS)
@given(**CASES)
def test_a_row_depends_on_itself_and_the_state_alone(name: str, **inputs: Any) -> None:
    codec, whole = CODECS[name], rows(**inputs)
    state = codec.fit(whole)
    parts = codec.encode(whole, state)
    assert all(part.shape[:3] == whole.shape[:3] for part in parts)
    for slot in range(whole.shape[2]):
        for part, alone in zip(parts, codec.encode(whole[:, :, slot : slot + 1], state), strict=True):
            assert torch.equal(part[:, :, slot : slot + 1], alone)
    decoded = codec.decode(parts, state, whole.dtype)
    assert decoded.dtype == whole.dtype
    assert decoded.shape == whole.shape
    assert bool(decoded.isfinite().all()) or whole.dtype == torch.float16, "huge float16 rows may round to infinity"


def law_error(codec: KVCodec, name: str, seed: int, slots: int, dim: int, style: str) -> None:
    whole = rows(seed, slots, dim, style)
    error = (coded(codec, whole, codec.fit(whole)) - whole).abs().amax(-1)
    largest = whole.abs().amax(-1) if name != "fp8 per head" else whole.abs().amax((-1, -2), keepdim=True)[..., 0]
    assert bool((error <= largest * STEPS[name] * (2 if name == "int4" else 1) * 1.02 + 1e-37).all())


ERRORS = {key: value for key, value in CASES.items() if key != "dtype"} | {
    "style": st.sampled_from(["noise", "outliers", "zeros", "huge"])
}


@pytest.mark.parametrize("name", STEPS)
@given(**ERRORS)
def test_errors_stay_within_the_format(name: str, **inputs: Any) -> None:
    law_error(CODECS[name], name, **inputs)


class Truncating(kv.Int8):
    """Rounds towards zero: its errors are twice as large."""

    def encode(self, rows: Tensor, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        scales = rows.float().abs().amax(-1, keepdim=True) / 127
        return (rows / scales.masked_fill(scales == 0, 1)).trunc().to(torch.int8), scales


def test_a_codec_that_truncates_is_caught() -> None:
    caught(law_error, Truncating(), "int8", **ERRORS)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_bits_are_those_that_are_stored(name: str, dim: int) -> None:
    codec, whole = CODECS[name], rows(0, 5, dim, "noise", torch.bfloat16)
    parts = codec.encode(whole, codec.fit(whole))
    stored = sum(part.numel() * part.element_size() for part in parts) * 8 / whole.numel()
    assert codec.bits_per_element(dim, torch.bfloat16) == pytest.approx(stored)


def test_e1_a_shifted_channel_costs_a_centred_codec_nothing() -> None:
    """INT4 keys of models with a bias: one channel far from zero takes the range of its group."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 256, 64, generator=generator)
    values = torch.randn(1, 1, 256, 64, generator=generator)
    query = torch.randn(1, 1, 32, 64, generator=generator) / 8
    shift = 100.0 * torch.nn.functional.one_hot(torch.tensor(7), 64)

    def error(codec: KVCodec, given_keys: Tensor) -> float:
        def attend(used: Tensor) -> Tensor:
            return (query @ used.transpose(-1, -2)).softmax(-1) @ values

        wanted = attend(given_keys)
        return float((attend(coded(codec, given_keys, codec.fit(given_keys))) - wanted).norm() / wanted.norm())

    centred = kv.INT4.keys
    assert error(centred, keys + shift) <= 1.2 * error(centred, keys)
    for other in (kv.Int4(), kv.Hadamard(kv.Int4())):
        assert error(other, keys + shift) > 3 * error(other, keys), "the check would not notice"


def test_a_rotation_serves_integers_and_not_floats() -> None:
    whole = rows(0, 64, 128, "outliers")

    def error(codec: KVCodec) -> float:
        return float((coded(codec, whole, codec.fit(whole)) - whole).norm())

    assert error(kv.Hadamard(kv.Int8())) < 0.5 * error(kv.Int8())
    assert error(kv.Hadamard(kv.FP8())) > 0.9 * error(kv.FP8())
    assert error(kv.INT8.keys) < 0.4 * error(kv.FP8_INT8.keys)


def test_padding_teaches_nothing() -> None:
    whole = rows(0, 8, 64, "shifted")
    real = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
    poisoned = whole.clone()
    poisoned[0, :, :3] = 1e6
    for codec in (kv.INT4.keys, kv.FP8(scale="head")):
        for clean, dirty in zip(codec.fit(whole, real), codec.fit(poisoned, real), strict=True):
            assert torch.equal(clean, dirty)
        assert not all(map(torch.equal, codec.fit(whole), codec.fit(poisoned)))


def test_what_exceeds_a_fitted_scale_is_clamped() -> None:
    codec, whole = kv.FP8(scale="head"), torch.ones(1, 1, 2, 16)
    state = codec.fit(whole)
    assert coded(codec, 100 * whole, state).unique().tolist() == [2.0]


def test_nvfp4_rounds_to_the_nearest_code_ties_to_even() -> None:
    numbers = torch.tensor([0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.0])
    expected = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    for sign in (1, -1):
        codes = quantize.to_e2m1(sign * numbers)
        sizes = torch.tensor(quantize.E2M1)[(codes & 7).int()]
        assert sizes.tolist() == expected
        assert [bool(code > 7) for code in codes] == [sign < 0 and number != 0 for number in numbers.tolist()]


def test_nibbles_come_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    packed = quantize.pack_nibbles(codes)
    assert packed.shape == (2, 8)
    assert torch.equal(quantize.unpack_nibbles(packed), codes)


def _unchecked_fp8(scale: Any) -> kv.FP8:
    """FP8 without the check of annotations, which only tests have."""
    codec = object.__new__(kv.FP8)
    object.__setattr__(codec, "scale", scale)
    codec.__post_init__()
    return codec


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: _unchecked_fp8("row"), UnsupportedError, "'token' or 'head', got 'row'"),
        (lambda: _checks.require_codec("Hadamard", kv.Int8), UnsupportedError, "Hadamard takes a codec such as"),
        (lambda: kv.Int4(group=0), UnsupportedError, "group must be 1 or more"),
        (lambda: _checks.require_rows("Int8", None), ShapeError, "Int8: rows must be a tensor .* got None"),
        (lambda: kv.Int4().bits_per_element(80), ShapeError, "rows of 80 numbers have no whole groups of 32"),
        (lambda: kv.NVFP4().bits_per_element(24), ShapeError, "no whole blocks of 16"),
    ],
)
def test_what_cannot_be_stored_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


ROWS = torch.randn(2, 3, 4, 32)
NO_PARTS: dict[str, Any] = {
    "codes alone": lambda parts: parts[0],
    "no scales": lambda parts: parts[:1],
    "one more": lambda parts: (*parts, parts[-1]),
    "scales first": lambda parts: parts[::-1],
    "scales of another batch": lambda parts: (parts[0], *(part[:1] for part in parts[1:])),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("codec", [kv.Int8(), kv.FP8(), kv.Int4(), kv.NVFP4(), kv.Hadamard(kv.Int8())], ids=str)
@pytest.mark.parametrize("name", NO_PARTS)
def test_what_encode_does_not_give_is_not_decoded(codec: KVCodec, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = codec.encode(ROWS)
    unchecked(monkeypatch, *(sys.modules[type(each).__module__] for each in (codec, kv.Int8())))
    with pytest.raises(ShapeError, match="decode takes what encode gives"):
        codec.decode(NO_PARTS[name](parts))


@pytest.mark.parametrize("codec", [kv.Int8(), kv.FP8(), kv.Int4(), kv.NVFP4()], ids=str)
@pytest.mark.parametrize("rows", [ROWS.tolist(), ROWS.long(), ROWS > 0, torch.tensor(1.0), None], ids=lambda _: "")
def test_what_is_no_row_is_not_encoded(codec: KVCodec, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, sys.modules[type(codec).__module__])
    with pytest.raises(ShapeError, match="rows must be a tensor"):
        codec.encode(rows)


def test_codecs_are_values() -> None:
    assert kv.Hadamard(kv.Int8()) == kv.Hadamard(kv.Int8())
    assert len({*CODECS.values()}) == len(CODECS)
    for one, other in itertools.combinations(CODECS.values(), 2):
        assert one != other
    assert all(isinstance(codec, KVCodec) for codec in CODECS.values())


@pytest.mark.parametrize("codec", [kv.FP8(scale="head"), kv.Centered(kv.Int8())], ids=str)
def test_a_codec_that_learns_from_a_prompt_asks_for_what_it_learnt(codec: KVCodec) -> None:
    rows = torch.randn(1, 2, 5, 8)
    parts = codec.encode(rows, codec.fit(rows))
    for call in (lambda: codec.encode(rows), lambda: codec.decode(parts)):
        with pytest.raises(ShapeError, match=r"state = codec\.fit\(rows\)"):
            call()


@pytest.mark.parametrize("codec", [kv.FP8(scale="head"), kv.Centered(kv.Int8())], ids=str)
def test_what_was_learnt_belongs_to_one_batch(codec: KVCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, sys.modules[type(codec).__module__])
    two, one = torch.randn(2, 2, 5, 8), torch.randn(1, 2, 5, 8)
    state = codec.fit(two)
    parts = codec.encode(two, state)
    for call in (lambda: codec.encode(one, state), lambda: codec.decode(tuple(part[:1] for part in parts), state)):
        with pytest.raises(ShapeError, match=r"the state was fitted to \[2, 2\] batch rows and heads, got \[1, 2"):
            call()
    with pytest.raises(ShapeError, match=r"state = codec\.fit\(rows\)"):
        codec.encode(two, (1, 2))
    for rows in (two[:, :, :0], two[0]):
        with pytest.raises(ShapeError, match="fit takes rows"):
            codec.fit(rows)
    for real in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.bool), [True]):
        with pytest.raises(ShapeError, match=r"real must be boolean \[2, 5\]"):
            codec.fit(two, real)


@pytest.mark.parametrize("codec", [kv.Int8(), kv.FP8(), kv.Int4(), kv.NVFP4(), kv.Hadamard(kv.Int8())], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.bool, "float16", None])
def test_rows_are_decoded_to_floating_point_numbers(codec: KVCodec, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = codec.encode(ROWS)
    unchecked(monkeypatch, sys.modules[type(codec).__module__])
    with pytest.raises(UnsupportedError, match="dtype must be one of floating-point numbers"):
        codec.decode(parts, dtype=kind)


@pytest.mark.parametrize("codec", [*CODECS.values(), kv.Plain()], ids=str)
@pytest.mark.parametrize("dim", [0, -16, 16.0, True, "16"])
def test_channels_are_counted(codec: KVCodec, dim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    while codec is not None:
        unchecked(monkeypatch, sys.modules[type(codec).__module__])
        outer, codec = codec, getattr(codec, "inner", None)
    with pytest.raises(UnsupportedError, match=r"\(dim=.*\): expected a whole number above 0"):
        outer.bits_per_element(dim)
