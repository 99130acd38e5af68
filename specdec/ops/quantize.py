"""Rows as codes with scales: the arithmetic of `specdec.kv`, and of the kernels that read and write codes.

A largest number is multiplied by a reciprocal: a division by a constant is one on a CPU and a multiplication on CUDA,
and scales would differ in their last bit.

Codes of four bits share a byte: the low half holds the first half of the row, the high half the second.
"""

import itertools

import torch
from jaxtyping import Float, Float16, Float32, Int8, UInt8
from torch import Tensor

LARGEST_INT8 = 127
LARGEST_E4M3 = 448.0
LARGEST_INT4 = 15
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 of a four-bit float stand for; bit 3 is the sign."""
NVFP4_GROUP = 16
"""Numbers that share an E4M3 scale in NVFP4."""


def to_int8(rows: Float[Tensor, "*lead dim"]) -> tuple[Int8[Tensor, "*lead dim"], Float32[Tensor, "*lead 1"]]:
    """INT8 codes, symmetric, and the float32 scale of each row.

    Args:
        rows: any shape; each row along the last dimension has its own scale.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import to_int8
        >>> codes, scales = to_int8(torch.tensor([[1.0, -2.0, 0.5, 0.0]]))
        >>> codes
        tensor([[  64, -127,   32,    0]], dtype=torch.int8)
    """
    exact = rows.float()
    scales = exact.abs().amax(-1, keepdim=True) * (1 / LARGEST_INT8)
    codes = (exact / scales.masked_fill(scales == 0, 1)).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return codes.to(torch.int8), scales


def to_fp8(rows: Float[Tensor, "*lead dim"]) -> tuple[UInt8[Tensor, "*lead dim"], Float32[Tensor, "*lead 1"]]:
    """FP8 E4M3 codes as bytes, and the float32 scale of each row.

    Args:
        rows: any shape; each row along the last dimension has its own scale.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import to_fp8
        >>> codes, scales = to_fp8(torch.tensor([[7.0, -3.5, 0.0]]))
        >>> codes.view(torch.float8_e4m3fn).float() * scales
        tensor([[ 7.0000, -3.5000,  0.0000]])
    """
    exact = rows.float()
    scales = exact.abs().amax(-1, keepdim=True) * (1 / LARGEST_E4M3)
    return to_e4m3(exact / scales.masked_fill(scales == 0, 1)), scales


def to_e4m3(numbers: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Nearest E4M3 number, as its byte; what is too large becomes the largest, where a plain cast would give NaN."""
    return numbers.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def to_int4(
    rows: Float[Tensor, "*lead dim"], group: int
) -> tuple[UInt8[Tensor, "*lead packed"], Float16[Tensor, "*lead groups"], Float16[Tensor, "*lead groups"]]:
    """INT4 codes in pairs, and a float16 scale and zero point for each group of channels.

    Args:
        rows: any shape, an even number of channels last.
        group: channels that share a scale; divides the last dimension.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import to_int4
        >>> packed, scales, zeros = to_int4(torch.tensor([0.0, 1.0, 15.0, 4.0]), group=4)
        >>> packed.tolist(), scales.tolist(), zeros.tolist()
        ([240, 65], [1.0], [0.0])
    """
    groups = rows.float().unflatten(-1, (-1, group))
    lowest, highest = groups.amin(-1), groups.amax(-1)
    # Codes are chosen for the rounded scale and zero point: what is decoded is as near as it can be.
    scales, zeros = _to_half((highest - lowest) * (1 / LARGEST_INT4)), _to_half(lowest)
    steps = scales.float().masked_fill(scales == 0, 1).unsqueeze(-1)
    codes = ((groups - zeros.float().unsqueeze(-1)) / steps).round_().clamp_(0, LARGEST_INT4)
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scales, zeros


def from_int4(
    packed: UInt8[Tensor, "*lead packed"],
    scales: Float16[Tensor, "*lead groups"],
    zeros: Float16[Tensor, "*lead groups"],
) -> Float32[Tensor, "*lead dim"]:
    """Codes times scales plus zero points.

    Args:
        packed: codes in pairs.
        scales: one for each group.
        zeros: zero points, like `scales`.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import from_int4
        >>> one = torch.ones(1, 1, dtype=torch.float16)
        >>> from_int4(torch.tensor([[0x40, 0x21]], dtype=torch.uint8), 2 * one, -one)
        tensor([[-1.,  1.,  7.,  3.]])
    """
    codes = unpack_nibbles(packed).float().unflatten(-1, (scales.shape[-1], -1))
    rows: Tensor = (codes * scales.float().unsqueeze(-1) + zeros.float().unsqueeze(-1)).flatten(-2)
    return rows


def to_nvfp4(
    rows: Float[Tensor, "*lead dim"],
) -> tuple[UInt8[Tensor, "*lead packed"], UInt8[Tensor, "*lead groups"], Float32[Tensor, "*lead 1"]]:
    """E2M1 codes in pairs, E4M3 scales of 16 channels as bytes, and the float32 scale of each row.

    Args:
        rows: any shape, a multiple of 16 channels last.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import to_nvfp4
        >>> packed, scales, row_scales = to_nvfp4(torch.tensor([6.0, 3.0, 0.5, -1.0] + 12 * [0.0]))
        >>> packed.tolist(), scales.view(torch.float8_e4m3fn).float()
        ([7, 5, 1, 10, 0, 0, 0, 0], tensor([448.]))
    """
    blocks = rows.float().unflatten(-1, (-1, NVFP4_GROUP))
    largest = blocks.abs().amax(-1)
    row_scales = largest.amax(-1, keepdim=True) * (1 / (E2M1[-1] * LARGEST_E4M3))
    row_steps = row_scales.masked_fill(row_scales == 0, 1)
    scales = (largest / (E2M1[-1] * row_steps)).clamp_max(LARGEST_E4M3).to(torch.float8_e4m3fn)
    steps = (scales.float() * row_steps).unsqueeze(-1)
    packed = pack_nibbles(to_e2m1(blocks / steps.masked_fill(steps == 0, 1)).flatten(-2))
    return packed, scales.view(torch.uint8), row_scales


def from_nvfp4(
    packed: UInt8[Tensor, "*lead packed"],
    scales: Tensor,
    row_scales: Float32[Tensor, "*lead 1"],
) -> Float32[Tensor, "*lead dim"]:
    """Codes times both scales.

    Args:
        packed: codes in pairs.
        scales: E4M3, one for each 16 channels, as bytes or typed.
        row_scales: one for each row.

    Example:
        >>> import torch
        >>> from specdec.ops.quantize import from_nvfp4
        >>> scale = torch.tensor([2.0]).to(torch.float8_e4m3fn)
        >>> from_nvfp4(torch.tensor([0x90] * 8, dtype=torch.uint8), scale, torch.tensor([0.25]))[7:9]
        tensor([ 0.0000, -0.2500])
    """
    codes = unpack_nibbles(packed).to(torch.int32)
    # The bits of an E2M1 number are those of a float16 whose exponent is counted from 15 instead of 1.
    numbers = ((codes & 8) << 12 | (codes & 7) << 9).to(torch.int16).view(torch.float16).float() * 2.0**14
    steps = (scales.view(torch.float8_e4m3fn).float() * row_scales).unsqueeze(-1)
    rows: Tensor = (numbers.unflatten(-1, (scales.shape[-1], -1)) * steps).flatten(-2)
    return rows


def to_e2m1(numbers: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Nearest E2M1 code, ties to the even one; bit 3 is the sign."""
    sizes = numbers.abs()
    codes = torch.zeros_like(sizes, dtype=torch.uint8)
    for code, (lower, upper) in enumerate(itertools.pairwise(E2M1)):
        middle = (lower + upper) / 2
        codes += (sizes >= middle if code % 2 else sizes > middle).to(torch.uint8)
    return codes | ((numbers < 0).to(torch.uint8) << 3)


def pack_nibbles(codes: UInt8[Tensor, "*lead dim"]) -> UInt8[Tensor, "*lead packed"]:
    """Codes below 16 `[..., dim]` as bytes `[..., dim / 2]`: the second half of the row in the high bits.

    >>> pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist()
    [49, 66]
    """
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack_nibbles(packed: UInt8[Tensor, "*lead packed"]) -> UInt8[Tensor, "*lead dim"]:
    """Inverse of `pack_nibbles`."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _to_half(numbers: Float[Tensor, "..."]) -> Float16[Tensor, "..."]:
    """float16, clamped to its finite range."""
    limit = torch.finfo(torch.float16).max
    return numbers.clamp(-limit, limit).half()
