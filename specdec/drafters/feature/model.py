"""The seam between feature drafters and their models."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.shortlist import Shortlist


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Outputs of rows.

    Attributes:
        normed: what the output head reads.
        fed: what the rows of the next tokens receive in place of a state of the target.
    """

    normed: Float[Tensor, "batch rows hidden"]
    fed: Float[Tensor, "batch rows fed"]

    def at(self, index: Int[Tensor, "batch rows"]) -> "States":
        """The outputs of some rows."""
        picked = (each.gather(1, index[:, :, None].expand(-1, -1, each.shape[-1])) for each in (self.normed, self.fed))
        return States(*picked)


@runtime_checkable
class FeatureModel(Protocol):
    """A model that drafts from the target's states. It is a `torch.nn.Module`.

    **Laws.** A row depends on its token, its state and the rows that it sees; rows of a tree change no committed row.
    """

    @property
    def spec(self) -> Any:
        """At least `family`, `feature_layers`, `vocab_size` and `depth`."""

    @property
    def shortlist(self) -> Shortlist | None:
        """The target's tokens that `logits` are about; None for all."""

    @property
    def parallel(self) -> bool:
        """Whether all tokens of a path are drafted at once, by `slots`, none of them knowing the others."""

    def check_complete(self) -> None:
        """Raises `UnsupportedError` if something that is borrowed is missing."""

    def combine(self, features: Float[Tensor, "batch rows features"]) -> Float[Tensor, "batch rows fed"]:
        """The target's states as those that rows receive."""

    def __call__(
        self, tokens: Int[Tensor, "batch rows"], states: Float[Tensor, "batch rows fed"], rows: Rows
    ) -> States:
        """Runs rows."""

    def slots(self, last: States, cache: FeatureCache, count: int) -> Float[Tensor, "batch slots hidden"]:
        """Normed outputs that predict `count` tokens after the last row; of parallel models alone."""

    def logits(self, normed: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """Logits over the draft vocabulary."""
