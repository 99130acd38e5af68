"""Rows as eight-bit codes with a scale each: the arithmetic of `kv.Int8` and `kv.FP8`, and of the kernel that writes.

A largest number is multiplied by a reciprocal: a division by a constant is one on a CPU and a multiplication on CUDA,
and scales would differ in their last bit.
"""

import torch
from jaxtyping import Float, Float32, Int8, UInt8
from torch import Tensor

LARGEST_INT8 = 127
LARGEST_E4M3 = 448.0


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
