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
    """A model that drafts from the target's states, a `torch.nn.Module`; it is `Recurrent` or `Parallel`.

    **Laws.** A row depends on its token, its state and the rows that it sees; rows of a tree change no committed row.
    """

    @property
    def spec(self) -> Any:
        """At least `family`, `feature_layers`, `feature_size`, `vocab_size`, `depth` and `longest`.

        `depth` is how many tokens are drafted by default, `longest` the most that can be; None is any number.
        """

    @property
    def shortlist(self) -> Shortlist | None:
        """The target's tokens that logits are about; None for all."""

    @property
    def remembers(self) -> bool:
        """Whether a row reads earlier ones; if not, only the last committed row is ever run."""

    def check_complete(self) -> None:
        """Raises `UnsupportedError` if something that is borrowed is missing."""

    def committed(
        self,
        tokens: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows features"],
        rows: Rows,
        last: States | None,
    ) -> States:
        """Runs committed tokens, each with the target's states before it.

        Args:
            tokens: ids.
            features: the target's states, side by side, in the dtype of the first parameter.
            rows: their places.
            last: outputs of the row before the first of them; None at the start of a text.
        """


@runtime_checkable
class Recurrent(FeatureModel, Protocol):
    """Drafts a level of a tree per forward."""

    def drafted(self, tokens: Int[Tensor, "batch rows"], parents: States, rows: Rows, depth: int) -> States:
        """Runs drafted tokens, each with its parent's outputs.

        Args:
            tokens: ids.
            parents: outputs of the row before each.
            rows: their places.
            depth: of the tokens in the tree; 1 for those after the root.
        """

    def logits(self, normed: Float[Tensor, "batch rows hidden"]) -> Float[Tensor, "batch rows vocab"]:
        """Logits over the draft vocabulary of the token after each row."""


@runtime_checkable
class Parallel(FeatureModel, Protocol):
    """Drafts all tokens of a path at once, none of them knowing the others."""

    def slots(self, last: States, cache: FeatureCache, count: int) -> Float[Tensor, "batch slots vocab"]:
        """Logits of the `count` tokens after the root.

        Args:
            last: outputs of each text's last row.
            cache: the text.
            count: tokens.
        """
