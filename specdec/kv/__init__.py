"""Codecs of the key/value cache: the same rows in fewer bits.

A cache takes `KVCacheConfig(keys=..., values=...)`, and per layer type another one. The presets are configurations like
any other: `kv.INT8` is the one to try first.
"""

from specdec.kv.centered import Centered
from specdec.kv.config import FP8_INT8, INT4, INT8, INT8_INT4, KVCacheConfig
from specdec.kv.fp8 import FP8
from specdec.kv.hadamard import Hadamard
from specdec.kv.int4 import Int4
from specdec.kv.int8 import Int8
from specdec.kv.nvfp4 import NVFP4
from specdec.kv.plain import Plain

__all__ = [
    "FP8",
    "FP8_INT8",
    "INT4",
    "INT8",
    "INT8_INT4",
    "NVFP4",
    "Centered",
    "Hadamard",
    "Int4",
    "Int8",
    "KVCacheConfig",
    "Plain",
]
