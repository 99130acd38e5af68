"""What a drafter takes from its target where it has none of its own: the embedding and the output head."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError

Rows = Callable[[Tensor], Tensor]
"""An embedding (ids to rows) or an output head (rows to logits)."""


class Borrower:
    """A model whose embedding and output head may be the target's.

    What is borrowed is used where it is: not copied (the rows of a shortlist excepted), not registered, in its own
    dtype.
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    shortlist: Shortlist | None
    _borrowed: dict[str, Rows]

    def _own(self, spec: Any, shortlist: Shortlist | None) -> None:
        """Makes the parts that the specification calls the drafter's own."""
        found = (spec.vocab_size, spec.vocab_size) if shortlist is None else (len(shortlist.ids), shortlist.vocab_size)
        if found != (spec.draft_vocab_size, spec.vocab_size):
            raise UnsupportedError(
                f"{type(self).__name__}: the head has {spec.draft_vocab_size} of {spec.vocab_size} tokens; pass a "
                f"shortlist of as many, got {'none' if shortlist is None else f'{found[0]} of {found[1]}'}."
            )
        self._sizes = spec.vocab_size, spec.hidden_size
        self._borrowed, self.shortlist = {}, shortlist
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if spec.own_embedding else None
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) if spec.own_head else None

    def borrow(self, target: Any) -> Any:
        """Takes from a target what the drafter has not of its own, its embedding and output head; returns the model.

        Args:
            target: a model with `get_input_embeddings` and `get_output_embeddings`.

        Raises:
            UnsupportedError: if their sizes are not those that the drafter needs.
        """
        head, embedding = target.get_output_embeddings(), target.get_input_embeddings().weight
        for name, own, found in (
            ("an embedding", self.embed_tokens, embedding),
            ("an output head", self.lm_head, head.weight),
        ):
            if own is None and tuple(found.shape) != self._sizes:
                raise UnsupportedError(
                    f"the drafter borrows {name} of {' x '.join(map(str, self._sizes))}, the target's is "
                    f"{' x '.join(map(str, found.shape))}."
                )

        def embed(tokens: Tensor) -> Tensor:
            return nn.functional.embedding(tokens.to(embedding.device), embedding)  # some models' own modules scale

        kept = None if self.shortlist is None else self.shortlist.ids.to(head.weight.device)
        rows_of_list = None if kept is None or self.lm_head is not None else head.weight.detach()[kept]

        def project(hidden: Tensor) -> Tensor:
            hidden, place = hidden.to(head.weight), hidden.device
            logits = head(hidden) if rows_of_list is None else nn.functional.linear(hidden, rows_of_list)
            return cast(Tensor, logits.to(place))

        self._borrowed = {"embedding": embed, "output head": project}
        return self

    def check_complete(self) -> None:
        """Raises `UnsupportedError` if something is neither the drafter's own nor borrowed."""
        for name, own in (("embedding", self.embed_tokens), ("output head", self.lm_head)):
            if own is None and name not in self._borrowed:
                raise UnsupportedError(
                    f"the drafter has no {name} of its own; take the target's: model.borrow(target)."
                )

    def _embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Rows of the embedding, where and as the drafter computes."""
        rows: Rows = self.embed_tokens or self._borrowed["embedding"]
        return rows(tokens).to(like)

    def _project(self, hidden: Tensor) -> Tensor:
        """Logits of the draft vocabulary."""
        head: Rows = self.lm_head or self._borrowed["output head"]
        return head(hidden)
