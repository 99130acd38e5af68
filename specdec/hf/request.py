"""A prepared `generate` call: what transformers resolved, bound to the parts that will serve it."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec.hf.ledger import TokenLedger
from specdec.hf.records import Records
from specdec.hf.target import ModelTarget
from specdec.protocols import Verifier

Execution: TypeAlias = Literal["host", "device", "auto"]
"""Where the rounds of a request run."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prepared call: what transformers resolved, bound to the parts that will serve it.

    `obstacle` says why its rounds run on the host; it is empty if they run on the device.
    """

    target: ModelTarget
    ledger: TokenLedger
    records: Records
    config: GenerationConfig
    prompt: Tensor
    streamer: Any
    verifier: Verifier
    nodes: int
    generator: torch.Generator | None
    obstacle: str
