"""Medusa (arXiv 2401.10774): heads on the target's last state, each of which predicts a later token by itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.drafters.feature.cache import FeatureCache, Rows
from specdec.drafters.feature.model import States
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Medusa heads.

    Attributes:
        feature_layers: the target's last state.
        feature_size: its width.
        hidden_size: the same.
        vocab_size: ids of the target.
        draft_vocab_size: tokens that are drafted.
        heads: tokens that are predicted beside the target's own.
        blocks: residual blocks of each head.

    Raises:
        UnsupportedError: if there are none of either.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    heads: int
    blocks: int = 1
    own_embedding: bool = True
    own_head: bool = True

    def __post_init__(self) -> None:
        if self.heads < 1 or self.blocks < 1:
            raise UnsupportedError(f"Medusa: heads {self.heads} and blocks {self.blocks} must be 1 or more.")

    @property
    def family(self) -> str:
        """For messages."""
        return "medusa"

    @property
    def depth(self) -> int:
        """Tokens that are drafted."""
        return self.heads

    @property
    def longest(self) -> int | None:
        """Most tokens that can be drafted."""
        return self.heads


class MedusaBlock(nn.Module):
    """A linear layer with SiLU, and the row itself."""

    def __init__(self, size: int) -> None:
        """Random weights."""
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, rows: Float[Tensor, "*lead size"]) -> Float[Tensor, "*lead size"]:
        """`x + silu(linear(x))`."""
        return rows + nn.functional.silu(self.linear(rows))


class MedusaModel(nn.Module):
    """Medusa heads.

    Args:
        spec: what they are.
        shortlist: the target's tokens that the heads have, if these are not all.

    Example:
        >>> import torch
        >>> from specdec.drafters import MedusaModel, MedusaSpec, States
        >>> spec = MedusaSpec(
        ...     feature_layers=(2,), feature_size=8, hidden_size=8, vocab_size=50, draft_vocab_size=50, heads=3)
        >>> state = torch.randn(1, 1, 8)
        >>> MedusaModel(spec).slots(States(state, state), cache=None, count=2).shape
        torch.Size([1, 2, 50])
    """

    def __init__(self, spec: MedusaSpec, shortlist: Shortlist | None = None) -> None:
        """Random weights."""
        super().__init__()
        self.spec, self.shortlist = spec, shortlist

        def head() -> nn.Sequential:
            blocks = (MedusaBlock(spec.hidden_size) for _ in range(spec.blocks))
            return nn.Sequential(*blocks, nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False))

        self.heads = nn.ModuleList(head() for _ in range(spec.heads))

    @property
    def remembers(self) -> bool:
        """Only the last state is read."""
        return False

    def check_complete(self) -> None:
        """Nothing can be missing."""

    def committed(
        self,
        tokens: Int[Tensor, "batch rows"],
        features: Float[Tensor, "batch rows features"],
        rows: Rows,
        last: States | None,
    ) -> States:
        """The target's state is all there is."""
        return States(normed=features, fed=features)

    def slots(
        self,
        last: States,
        cache: FeatureCache | None,
        count: int,
    ) -> Float[Tensor, "batch slots vocab"]:
        """Logits of the first `count` heads."""
        return torch.cat([head(last.normed) for head in list(self.heads)[:count]], 1)
