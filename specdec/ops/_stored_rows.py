"""Rows of a cache as they are stored: numbers, or codes with scales. What form they have, and what they stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.ops.quantize import NVFP4_GROUP, from_int4, from_nvfp4

PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
FORMS = {
    (torch.int8, torch.float32): "int8",
    (torch.uint8, torch.float32): "fp8",
    (torch.float8_e4m3fn, torch.float32): "fp8",
    (torch.uint8, torch.float16, torch.float16): "int4",
    (torch.uint8, torch.uint8, torch.float32): "nvfp4",
    (torch.uint8, torch.float8_e4m3fn, torch.float32): "nvfp4",
}
"""Forms by the dtypes of codes and scales."""


def form_of(parts: tuple[Tensor, ...]) -> str:
    """How rows are stored: `plain`, `int8`, `fp8`, `int4` or `nvfp4`; an empty string if they have no known form."""
    dtypes = tuple(part.dtype for part in parts)
    if len(dtypes) == 1 and dtypes[0] in PLAIN:
        return "plain"
    return FORMS.get(dtypes, "")


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Keys or values `[..., heads, slots, dim]` of an attention call.

    Attributes:
        codes: numbers or codes; codes of four bits come in pairs.
        scales: what the codes need: nothing, scales of rows, or scales of groups and zero points or scales of rows.
    """

    codes: Tensor
    scales: tuple[Tensor, ...]

    @property
    def form(self) -> str:
        """As `form_of` tells."""
        return form_of((self.codes, *self.scales))

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return len(self.scales) == 2

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self.codes.shape[-1] * (2 if self.packed else 1)

    @property
    def bytes_per_element(self) -> int | float:
        """Size of a stored number, without its scales."""
        return 0.5 if self.packed else self.codes.element_size()

    @property
    def numbers(self) -> Tensor:
        """The codes in the dtype that they are to be read in."""
        return self.codes.view(torch.float8_e4m3fn) if self.form == "fp8" else self.codes

    @property
    def row_scales(self) -> Tensor | None:
        """The scale of each row, if its codes are of eight bits."""
        return self.scales[0] if len(self.scales) == 1 else None

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """Of codes of four bits: scales of groups, E4M3 ones as bytes, and zero points or scales of rows."""
        return tuple(scale.view(torch.uint8) if scale.element_size() == 1 else scale for scale in self.scales)

    def mismatch(self) -> str:
        """What is wrong with the scales of known form; an empty string if nothing is."""
        groups = self.scales[0].shape[-1] if self.form == "int4" else self.dim // NVFP4_GROUP
        if self.form == "int4" and (groups == 0 or self.dim % groups):
            return f"{groups} groups, which do not divide rows of {self.dim} numbers"
        if self.form == "nvfp4" and self.dim % NVFP4_GROUP:
            return f"rows of {self.dim} numbers, which have no whole groups of {NVFP4_GROUP}"
        widths = {"int4": (groups, groups), "nvfp4": (groups, 1)}.get(self.form, (1,) * len(self.scales))
        wanted = [[*self.codes.shape[:3], width] for width in widths]
        came = [list(scale.shape) for scale in self.scales]
        return "" if came == wanted else f"shapes {came}, expected {wanted}"

    def decode(self, dtype: torch.dtype) -> Tensor:
        """What the rows stand for; those of four bits as their codec decodes them."""
        if self.form == "int4":
            return from_int4(self.codes, *self.scales).to(dtype)
        if self.form == "nvfp4":
            return from_nvfp4(self.codes, *self.scales).to(dtype)
        numbers = self.numbers.to(dtype)
        return numbers * self.scales[0].to(dtype) if self.scales else numbers
