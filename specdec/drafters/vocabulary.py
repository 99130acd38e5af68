"""One object for every conversion between target ids and draft ids.

Ids have a type: nothing else in the library turns one kind into the other. Rows of a padded embedding that no
tokenizer entry uses are never proposed. Laws convert with the ids: the draft's law is restricted to the tokens that
both vocabularies share, renormalised, and scattered to the target's size with zero elsewhere, so it stays exactly the
law that drafts are drawn from (token-level intersection, arXiv 2502.05202).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import UnsupportedError

_SPACES = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece write a leading space


class VocabularyMap:
    """Tokens that a draft model and a target share.

    Args:
        target_ids: shared tokens as target ids.
        draft_ids: the same tokens as draft ids, in the same order.
        target_size: rows of the target's logits.
        draft_size: rows of the draft's logits.
        pieces: draft ids to feed for target ids that are not shared.

    Raises:
        UnsupportedError: if the map is not one-to-one, leaves a vocabulary, or is empty.

    Example:
        >>> import torch
        >>> from specdec.drafters import VocabularyMap
        >>> shared = VocabularyMap([2, 5], [0, 1], target_size=6, draft_size=3)
        >>> shared.law(torch.tensor([[0.0, 0.0, 9.0]])).tolist()
        [[0.0, 0.0, 0.5, 0.0, 0.0, 0.5]]
        >>> shared.to_draft(5)
        [1]
    """

    def __init__(
        self,
        target_ids: Sequence[int],
        draft_ids: Sequence[int],
        *,
        target_size: int,
        draft_size: int,
        pieces: dict[int, list[int]] | None = None,
    ) -> None:
        """Checks the map."""
        if len(target_ids) != len(draft_ids) or len(target_ids) == 0:
            raise UnsupportedError(
                f"the vocabularies share no tokens ({len(target_ids)} target ids, {len(draft_ids)} draft ids); "
                "pass the tokenizers that belong to the two models."
            )
        for name, ids, size in (("target", target_ids, target_size), ("draft", draft_ids, draft_size)):
            if min(ids) < 0 or max(ids) >= size:
                raise UnsupportedError(f"{name} ids span {min(ids)}..{max(ids)}, outside 0..{size - 1}.")
            if len(set(ids)) != len(ids):
                raise UnsupportedError(f"the vocabulary map is not one-to-one: {name} ids repeat.")
        self.target_size, self.draft_size = target_size, draft_size
        self._target = torch.tensor(target_ids, dtype=torch.int64)
        self._draft = torch.tensor(draft_ids, dtype=torch.int64)
        self._whole = bool((self._draft == torch.arange(draft_size)[: len(draft_ids)]).all()) and bool(
            (self._target == torch.arange(len(target_ids))).all()
        )
        self._pieces = {target: [draft] for target, draft in zip(target_ids, draft_ids, strict=True)}
        self._pieces.update({target: list(ids) for target, ids in (pieces or {}).items() if target not in self._pieces})
        self._table = torch.full((target_size,), -1, dtype=torch.int64).scatter_(0, self._target, self._draft)

    @staticmethod
    def same_tokenizer(target_size: int, draft_size: int, entries: int | None = None) -> "VocabularyMap":
        """Two models over one tokenizer, whose embeddings may be padded to different sizes.

        `entries` is the tokenizer's size; without it every id that both models have is shared.

        Raises:
            UnsupportedError: if the draft lacks rows for entries that the target has. That is a reduced vocabulary,
                whose ids need not be the first ones.
        """
        if entries is not None and draft_size < min(entries, target_size):
            raise UnsupportedError(
                f"the draft model has {draft_size} rows of logits for a tokenizer of {entries} entries: its vocabulary "
                "is reduced, and nothing says which tokens its ids stand for; pass vocabulary=VocabularyMap(...)."
            )
        count = min(target_size, draft_size, entries if entries is not None else target_size)
        ids = range(count)
        return VocabularyMap(ids, ids, target_size=target_size, draft_size=draft_size)

    @staticmethod
    def from_tokenizers(target: Any, draft: Any, *, target_size: int, draft_size: int) -> "VocabularyMap":
        """Two tokenizers: tokens with the same text are shared, all others are fed as their text's draft tokens."""
        draft_by_text: dict[str, int] = {}
        for token, index in sorted(draft.get_vocab().items(), key=lambda item: item[1]):
            if index < draft_size:
                draft_by_text.setdefault(_text(token), index)
        pairs: dict[int, int] = {}
        pieces: dict[int, list[int]] = {}
        for token, index in sorted(target.get_vocab().items(), key=lambda item: item[1]):
            if index >= target_size:
                continue
            match = draft_by_text.get(_text(token))
            if match is not None and match not in pairs:
                pairs[match] = index
            elif match is not None:
                pieces[index] = [match]  # another token with the same text
            else:
                fed = draft.encode(target.decode([index]), add_special_tokens=False)
                pieces[index] = [piece for piece in fed if piece < draft_size]
        return VocabularyMap(
            list(pairs.values()), list(pairs), target_size=target_size, draft_size=draft_size, pieces=pieces
        )

    def __len__(self) -> int:
        """Number of shared tokens."""
        return self._target.shape[0]

    def shared_ids(self, target_ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The draft id of each target id, or -1 where the draft has no single token for it."""
        return self._table.to(target_ids.device)[target_ids]

    def to_draft(self, target_id: int) -> list[int]:
        """Draft ids to feed for a target id; at least one (id 0 where the draft has no text for it)."""
        return list(self._pieces.get(target_id) or [0])

    def law(self, logits: Float[Tensor, "*rows draft_vocab"], temperature: float = 1.0) -> Float[Tensor, "*rows vocab"]:
        """The draft's law over target ids: shared tokens only, renormalised; zero elsewhere."""
        return self._scatter(self.log_law(logits, temperature).exp())

    def propose(
        self, logits: Float[Tensor, "*rows draft_vocab"], count: int, temperature: float = 1.0
    ) -> tuple[Int[Tensor, "*rows rank"], Float[Tensor, "*rows rank"], Float[Tensor, "*rows vocab"]]:
        """The best `count` shared tokens as target ids, their log-probabilities, and the whole law (see `law`)."""
        shared = self.log_law(logits, temperature)
        best = shared.topk(min(count, len(self)), dim=-1)
        return self._target.to(logits.device)[best.indices], best.values, self._scatter(shared.exp())

    def log_law(
        self, logits: Float[Tensor, "*rows draft_vocab"], temperature: float = 1.0
    ) -> Float[Tensor, "*rows shared"]:
        """Log-probabilities of the shared tokens, in the map's order."""
        logits = logits[..., : len(self)] if self._whole else logits[..., self._draft.to(logits.device)]
        return torch.log_softmax(logits.float() / temperature, -1)

    def _scatter(self, shared: Float[Tensor, "*rows shared"]) -> Float[Tensor, "*rows vocab"]:
        if self._whole and shared.shape[-1] == self.target_size:
            return shared
        law = shared.new_zeros(*shared.shape[:-1], self.target_size)
        law[..., self._target.to(law.device)] = shared
        return law


def _text(token: str) -> str:
    for mark in _SPACES:
        token = token.replace(mark, " ")
    return token
