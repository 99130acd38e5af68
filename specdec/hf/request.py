"""A prepared `generate` call: what transformers resolved, bound to the parts that will serve it."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.hf.ledger import TokenLedger
from specdec.hf.records import Records
from specdec.hf.target import ModelTarget
from specdec.protocols import Verifier
from specdec.types import Round

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

    def result(self) -> Any:
        """What `model.generate` returns for this request."""
        sequences = self.ledger.sequences().to(self.prompt.device)
        if not self.config.return_dict_in_generate:
            return sequences
        cache = self.target.cache.to_dynamic(self.target.model.config) if self.config.use_cache else None
        make: Any = GenerateDecoderOnlyOutput  # its annotations promise less than plain generate returns
        return make(
            sequences=sequences,
            scores=self.records.output_scores(),
            logits=self.records.output_logits(),
            attentions=self.records.output_attentions(),
            hidden_states=self.records.output_hidden_states(),
            cache=cache,
        )


def in_plain_mode(rounds: Generator[Round, None, None]) -> Iterator[Round]:
    """Makes each round without gradients and outside of inference mode, of which the caller notices nothing.

    Tensors that are made in inference mode cannot be changed outside of it, and buffers stay for later requests.
    """
    try:
        while True:
            with torch.inference_mode(False), torch.no_grad():
                round = next(rounds, None)
            if round is None:
                return
            yield round
    finally:
        rounds.close()


@dataclass(frozen=True, slots=True)
class Attachment(AbstractContextManager[Any]):
    """What `attach` of a generator returns: `with generator.attach():` detaches at the end of the block."""

    generator: Any

    def __enter__(self) -> Any:
        return self.generator

    def __exit__(self, *error: object) -> None:
        self.generator.detach()
