"""Root mean square normalisation of few rows, with the sum that follows it in some models; one launch."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.ops import _dispatch
from specdec.ops._checks import demands, tensors


@dataclass(frozen=True, slots=True, eq=False)
class NormCall:
    """Checked arguments of one call."""

    rows: Tensor
    scale: Tensor
    eps: float
    residual: Tensor | None


def rms_norm(
    rows: Float[Tensor, "rows width"],
    scale: Float[Tensor, " width"],
    eps: float,
    *,
    residual: Float[Tensor, "rows width"] | None = None,
    impl: _dispatch.Impl = "auto",
) -> Float[Tensor, "rows width"]:
    """Each row over the root of its mean square, times a scale.

    Computed in float32 (in float64 for rows of that). The dtype of the scale says where the result is rounded: if it is
    that of the rows, the normalised row is rounded before it is scaled, as Llama does; a float32 scale is multiplied
    first, as Gemma does. What models scale by is not always their weight: Gemma 3 and Qwen3.5 add one to it.

    Args:
        rows: rows, any strides.
        scale: what each number is multiplied with, of the rows' dtype or in float32.
        eps: what is added to the mean square.
        residual: added to the rounded result, which is rounded once more.
        impl: which implementation runs; see `specdec.ops`.

    Raises:
        ShapeError: for shapes, dtypes and devices that do not belong together.
        UnsupportedError: if `impl="triton"` cannot run here or does not take the arguments.

    Example:
        >>> import torch
        >>> from specdec import ops
        >>> ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.5)  # a mean square of 12.5, and a half
        tensor([[0.8321, 1.1094]])
    """
    tensors("rms_norm", {"rows": rows, "scale": scale}, {"residual": residual})
    call = NormCall(rows, scale, eps, residual)
    _check(call)
    if rows.numel() == 0:
        return torch.zeros_like(rows)
    kernel: Any = _dispatch.choose("rms_norm", impl, rows.device, rows, scale, residual)
    reason = kernel.refusal(call) if kernel is not None else ""
    if reason and impl == "triton":
        raise UnsupportedError(f"rms_norm: the kernel takes {reason}.")
    if kernel is None or reason:
        return norm(rows, scale, eps, residual)
    found: Tensor = kernel.launch(call)
    return found


def norm(given: Tensor, scale: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """The definition in plain torch, for rows of any shape `[..., width]`."""
    wide = given.to(torch.promote_types(given.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    found = scale * normal.to(given.dtype) if scale.dtype == given.dtype else (normal * scale).to(given.dtype)
    return found if residual is None else residual + found


def _check(call: NormCall) -> None:
    """Raises for arguments that do not belong together."""
    demand = demands("rms_norm")
    rows, scale, residual = call.rows, call.scale, call.residual
    demand(
        rows.dim() == 2,
        f"rows must be [rows, width], got {list(rows.shape)}; reshape(-1, width) puts them below each other",
    )
    demand(rows.is_floating_point(), f"rows must hold floating-point numbers, got {rows.dtype}")
    demand(list(scale.shape) == [rows.shape[1]], f"scale must be [{rows.shape[1]}], got {list(scale.shape)}")
    kinds = list(dict.fromkeys((rows.dtype, torch.float32)))
    demand(scale.dtype in kinds, f"scale must be {' or '.join(map(str, kinds))}, got {scale.dtype}")
    given: Any = call.eps
    demand(
        isinstance(given, int | float) and given >= 0,
        f"eps must be a number from 0 on, got {given!r}; give that of the model, such as 1e-6",
    )
    if residual is not None:
        demand(residual.shape == rows.shape, f"residual must be {list(rows.shape)}, got {list(residual.shape)}")
        demand(residual.dtype == rows.dtype, f"residual must be {rows.dtype} like rows, got {residual.dtype}")
    devices = {each.device for each in (rows, scale, residual) if each is not None}
    demand(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")
