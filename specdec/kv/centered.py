"""Rows less their mean over the prompt: what all keys of a head have in common needs no bits.

A channel that is shifted in every key (models with a bias on keys have such channels) takes the range of its group, and
no rotation removes a shift. The mean does; it is learned once, from the prompt, and stored once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.kv._checks import require_codec, require_fitted, require_floating, require_prompt, require_rows
from specdec.protocols import KVCodec


@dataclass(frozen=True, slots=True)
class Centered:
    """Subtracts each channel's mean over the prompt, per batch row and head, and encodes the rest with `inner`.

    Args:
        inner: the codec of the centred rows.

    >>> from specdec import kv
    >>> keys = torch.randn(1, 2, 256, 64) + 100 * torch.nn.functional.one_hot(torch.tensor(5), 64)
    >>> codec = kv.Centered(kv.Int4())
    >>> state = codec.fit(keys)
    >>> bool((codec.decode(codec.encode(keys, state), state) - keys).abs().max() < 0.5)
    True
    """

    inner: KVCodec

    def __post_init__(self) -> None:
        require_codec("Centered", self.inner)

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """As `inner`: one mean per batch row and head does not count."""
        return self.inner.bits_per_element(dim, dtype)

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """The mean `[batch, heads, 1, dim]`, and what `inner` learns from centred rows."""
        require_prompt("Centered", rows, real)
        exact = rows.float()
        if real is None:
            mean = exact.mean(2, keepdim=True)
        else:
            weights = real[:, None, :, None].float()
            mean = (exact * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp_min(1)
        return (mean, *self.inner.fit(exact - mean, real))

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The centred rows, encoded."""
        require_rows("Centered", rows)
        require_fitted("Centered", state, rows)
        return self.inner.encode(rows.float() - state[0], state[1:])

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """The decoded rows plus the mean."""
        require_floating("Centered", dtype)
        rows = self.inner.decode(parts, state[1:], torch.float32)
        require_fitted("Centered", state, rows)
        return (rows + state[0]).to(dtype)
