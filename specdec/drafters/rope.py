"""Rotary position embeddings of drafters, from the keys of published configurations.

The frequencies are those of the forms that transformers calls `default`, `linear`, `llama3`, `yarn` and `proportional`;
other forms are refused by name. Halves of a head are rotated against each other.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import UnsupportedError

KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""Forms, and the keys that each of them reads."""

WHOLE = ("original_max_position_embeddings",)
"""Of these, what readers want as a whole number."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Args:
        theta: base of the frequencies.
        dim: numbers of a head that are rotated; the rest stay.
        kind: form of the frequencies.
        options: what the form needs, as pairs of key and number, with the keys of published configurations.

    Raises:
        UnsupportedError: for another form, or one without the keys it needs.

    Example:
        >>> import torch
        >>> from specdec.drafters.rope import Rope
        >>> cos, sin = Rope(theta=1e4, dim=4).tables(torch.tensor([[0, 1]]), torch.float32)
        >>> cos.shape, cos[0, 0].tolist()
        (torch.Size([1, 2, 4]), [1.0, 1.0, 1.0, 1.0])
    """

    theta: float
    dim: int
    kind: str = "default"
    options: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"rope: type {self.kind!r} is not known; it must be one of {', '.join(KINDS)}.")
        if self.dim < 2 or self.dim % 2:
            raise UnsupportedError(f"rope: the rotated part of a head must be even and above 0, got {self.dim}.")
        try:
            self.frequencies()
        except KeyError as error:
            raise UnsupportedError(f"rope: type {self.kind!r} needs {error.args[0]!r}, which is not given.") from None

    def to_config(self, head_dim: int) -> dict[str, Any]:
        """The block `rope_parameters` of a published configuration with this embedding."""
        share = {} if self.dim == head_dim else {"partial_rotary_factor": self.dim / head_dim}
        options = {key: int(value) if key in WHOLE else value for key, value in self.options}
        return {"rope_type": self.kind, "rope_theta": self.theta, **share, **options}

    def frequencies(self, dtype: torch.dtype = torch.float32) -> tuple[Float[Tensor, " half"], float]:
        """Radians per position of each pair of numbers, and a factor on the tables."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).to(dtype) / self.dim
        plain, given = 1.0 / self.theta**exponents, dict(self.options)
        if self.kind == "linear":
            return plain / given["factor"], 1.0
        if self.kind == "proportional":
            turning = int(given.get("partial_rotary_factor", 1.0) * self.dim // 2)
            still = torch.arange(self.dim // 2) >= turning
            return (plain / given.get("factor", 1.0)).masked_fill(still, 0.0), 1.0
        if self.kind == "llama3":
            return self._llama3(plain, given), 1.0
        if self.kind == "yarn":
            return self._yarn(exponents, given)
        return plain, 1.0

    def _llama3(self, plain: Tensor, given: dict[str, float]) -> Tensor:
        """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
        factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
        length = given["original_max_position_embeddings"]
        wavelength = 2 * math.pi / plain
        blend = (length / wavelength - low) / (high - low)
        between = (1 - blend) * plain / factor + blend * plain
        slow, fast = wavelength > length / low, wavelength < length / high
        return torch.where(slow, plain / factor, torch.where(fast, plain, between))

    def _yarn(self, exponents: Tensor, given: dict[str, float]) -> tuple[Tensor, float]:
        """YaRN (arXiv 2309.00071): dimensions that turn often are kept, those that turn rarely are interpolated."""
        factor, length = given["factor"], given["original_max_position_embeddings"]
        attention = given.get("attention_factor")
        if attention is None:
            scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")

            def grown(slope: float) -> float:
                return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0

            attention = grown(scale) / grown(scale_all) if scale and scale_all else grown(1.0)

        def turns(count: float) -> float:
            return self.dim * math.log(length / (count * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = turns(given.get("beta_fast") or 32.0), turns(given.get("beta_slow") or 1.0)
        if given.get("truncate", 1.0):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (torch.arange(self.dim // 2, dtype=exponents.dtype) - low) / ((high - low) or 0.001)
        kept, turning = 1 - ramp.clamp(0, 1), self.theta**exponents
        return (1.0 / (factor * turning)) * (1 - kept) + (1.0 / turning) * kept, attention

    def tables(
        self, positions: Int[Tensor, "batch rows"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "batch rows dim"], Float[Tensor, "batch rows dim"]]:
        """Cosines and sines at the positions; angles are computed in float32, for float64 in float64."""
        exact = torch.promote_types(dtype, torch.float32)
        frequencies, factor = _known(self, exact, positions.device)
        angles = positions[..., None].to(exact) * frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@lru_cache(maxsize=32)
def _frequencies(rope: Rope, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """The frequencies where they are needed; asked for in every forward."""
    frequencies, factor = rope.frequencies(dtype)
    return frequencies.to(device), factor


_known = torch.compiler.disable(_frequencies)
"""Compiled code would compute them anew in each forward."""


def rotate(
    heads: Float[Tensor, "batch heads rows head_dim"], tables: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads rows head_dim"]:
    """The heads turned by the angles of their rows."""
    cos, sin = (table[:, None] for table in tables)
    turned, kept = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned
