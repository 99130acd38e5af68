"""Rows as they are."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.kv._checks import require_rows
from specdec.ops._checks import require_whole


@dataclass(frozen=True, slots=True)
class Plain:
    """Stores rows in the model's own dtype.

    >>> from specdec import kv
    >>> kv.Plain().bits_per_element(128, torch.bfloat16)
    16.0
    """

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, for rows of `dim` numbers of `dtype`."""
        require_whole("Plain", dim=dim)
        return 8.0 * dtype.itemsize

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """Nothing to learn."""
        return ()

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The rows."""
        require_rows("Plain", rows)
        return (rows,)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """The rows."""
        return parts[0]
