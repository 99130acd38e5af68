"""Which codec holds what: keys, values, and other ones for single layer types."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.errors import UnsupportedError
from specdec.kv._checks import require_codec
from specdec.kv.centered import Centered
from specdec.kv.fp8 import FP8
from specdec.kv.hadamard import Hadamard
from specdec.kv.int4 import Int4
from specdec.kv.int8 import Int8
from specdec.kv.plain import Plain
from specdec.protocols import KVCodec

STATES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What a cache stores its rows with.

    Args:
        keys: codec of the keys, after their rotary embedding.
        values: codec of the values.
        layers: another configuration for a layer type, such as `sliding_attention`.
        states: dtype of the states of recurrent layers at rest; None leaves them in float32, as the models do. float16
            halves them, at an error of about 0.001; bfloat16 is for those who have measured it.

    Raises:
        UnsupportedError: for something that is no codec, or an unknown layer type.

    >>> from specdec import kv
    >>> config = kv.KVCacheConfig(keys=kv.Hadamard(kv.Int8()), values=kv.Int8())
    >>> config.bits_per_element(128)
    8.25
    """

    keys: KVCodec = field(default_factory=Plain)
    values: KVCodec = field(default_factory=Plain)
    layers: Mapping[str, "KVCacheConfig"] = field(default_factory=dict)
    states: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_codec("KVCacheConfig: keys=", self.keys)
        require_codec("KVCacheConfig: values=", self.values)
        layers: Any = self.layers
        if not isinstance(layers, Mapping) or not all(isinstance(inner, KVCacheConfig) for inner in layers.values()):
            raise UnsupportedError(
                f"KVCacheConfig: layers= takes {{layer type: KVCacheConfig(...)}}, got {self.layers!r}."
            )
        unknown = set(self.layers) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedError(
                f"KVCacheConfig: layers= names {sorted(unknown)}; layer types are full_attention, sliding_attention."
            )
        if any(inner.layers or inner.states for inner in self.layers.values()):
            raise UnsupportedError(
                "KVCacheConfig: a configuration inside layers= has no layers= or states= of its own."
            )
        if self.states not in STATES:
            raise UnsupportedError(f"KVCacheConfig: states= takes {', '.join(map(str, STATES))}, got {self.states!r}.")

    def for_layer(self, layer_type: str) -> "KVCacheConfig":
        """The configuration of a layer type."""
        return self.layers.get(layer_type, self)

    def bits_per_element(self, dim: int, value_dim: int | None = None, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a cached number, mean over keys of `dim` and values of `value_dim` (the same if None)."""
        width = dim if value_dim is None else value_dim
        total = self.keys.bits_per_element(dim, dtype) * dim + self.values.bits_per_element(width, dtype) * width
        return total / (dim + width)


INT8 = KVCacheConfig(keys=Hadamard(Int8()), values=Int8())
"""Rotated INT8 keys, INT8 values: half of BF16, and the first to try."""

FP8_INT8 = KVCacheConfig(keys=Hadamard(FP8()), values=Int8())
"""Rotated FP8 keys, INT8 values: the pair of the 27B-on-one-4090 article. `INT8` is as small and more accurate."""

INT8_INT4 = KVCacheConfig(keys=Hadamard(Int8()), values=Int4())
"""Rotated INT8 keys, INT4 values."""

INT4 = KVCacheConfig(keys=Centered(Hadamard(Int4())), values=Int4())
"""Centred and rotated INT4 keys, INT4 values: less than a third of BF16."""
