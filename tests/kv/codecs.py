"""Every codec of the library by name, and an exact one that has all that a codec may have."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import kv
from specdec.protocols import KVCodec

CODECS: dict[str, KVCodec] = {
    "plain": kv.Plain(),
    "fp8 per token": kv.FP8(),
    "fp8 per head": kv.FP8(scale="head"),
    "int8": kv.Int8(),
    "int8, rotated": kv.Hadamard(kv.Int8()),
    "int4": kv.Int4(group=16),
    "int4, rotated": kv.Hadamard(kv.Int4(group=16)),
    "int4, centred and rotated": kv.Centered(kv.Hadamard(kv.Int4(group=16))),
    "nvfp4": kv.NVFP4(),
    "fp8 per head, centred": kv.Centered(kv.FP8(scale="head")),
}


@dataclass(frozen=True)
class Digits:
    """Exact for whole numbers: a state, and two parts of different widths and dtypes."""

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        return 64 + 64

    def fit(self, rows: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        return (rows[:, :, :1].round() + 1,)

    def encode(self, rows: Tensor, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        numbers = (rows - state[0]).to(torch.int64)
        return (numbers // 7).to(rows.dtype), torch.cat([numbers % 7, numbers % 7], -1)

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return (parts[0] * 7 + parts[1].chunk(2, -1)[0] + state[0]).to(dtype)
