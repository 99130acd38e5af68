"""Where the tokens of a request stand: padding of its prompts, positions on every axis, windows of the layers."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.hf import compat

AXES = 4
"""Position axes of models that also read images: the text's, and the temporal, vertical and horizontal ones."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptGeometry:
    """Padding and positions of a batch of prompts.

    Attributes:
        mask: False on padding; None if there is none.
        following: position of the token after the prompt, on the text's axis.
        axes: how far the other axes are from the text's, from there on; None if positions have one axis, or all agree.
    """

    mask: Bool[Tensor, "batch prompt"] | None
    following: Int[Tensor, " batch"]
    axes: Int[Tensor, "axes batch"] | None

    @classmethod
    def of(cls, kwargs: dict[str, Any], input_ids: Tensor, generation_config: Any) -> "PromptGeometry":
        """Reads the arguments of `generate`.

        Raises:
            UnsupportedError: for positions of another shape.
        """
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        embeds = kwargs.get("inputs_embeds")
        columns = embeds.shape[1] if embeds is not None else input_ids.shape[1]
        prompt = mask.bool() if mask is not None and not bool(mask.all()) else None
        if positions is not None:
            if positions.dim() == 3 and positions.shape[0] == 1:  # all axes alike, as `generate` continues a cache
                positions = positions[0]
            if positions.dim() == 2:
                return cls(prompt, positions[:, -1].to(torch.int64) + 1, None)
            if positions.dim() != 3 or positions.shape[0] != AXES:
                raise UnsupportedError(
                    f"position_ids of shape {tuple(positions.shape)}; expected (batch, seq), or ({AXES}, batch, seq) "
                    "with the text's axis first."
                )
            last = positions[:, :, -1].to(torch.int64)
            axes = last - last[:1]
            return cls(prompt, last[0] + 1, axes if bool(axes.any()) else None)
        if prompt is not None:
            return cls(prompt, prompt.sum(-1), None)
        length = compat.prompt_length(generation_config, mask, columns)
        return cls(None, torch.full((input_ids.shape[0],), length, dtype=torch.int64, device=input_ids.device), None)

    def positions(self, text: Int[Tensor, "batch rows"]) -> Tensor:
        """Positions as the model takes them, on every axis that it has."""
        return text if self.axes is None else text + self.axes[:, :, None].to(text.device)


def layer_windows(decoder: Any, name: str) -> dict[str, int | None]:
    """Window of each layer type; every type of the model has a mask, also those without keys of their own.

    Args:
        decoder: the model's configuration.
        name: of the model, for messages.

    Raises:
        UnsupportedError: if the model takes fewer masks than it has windows.
    """
    kinds, arguments = compat.get_layer_types_and_kwargs(decoder)
    several = compat.has_layer_types(decoder)
    found = {
        (kind, kwargs.get("sliding_window")) for kind, kwargs in zip(kinds, arguments, strict=True) if kind != "dummy"
    }
    if len(found) > (len({kind for kind, _ in found}) if several else 1):
        raise UnsupportedError(
            f"{name} mixes windows {sorted(found, key=str)} but takes "
            f"{'one attention mask per layer type' if several else 'a single attention mask'}; "
            "such models are not supported."
        )
    return dict(found)
