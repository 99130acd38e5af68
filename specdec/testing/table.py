"""A target and a drafter whose next-token law is a table over the last token: every probability is known exactly.

They speak the protocols and nothing else: no model, no cache, no transformers. A loop, a tree builder or a verifier
that is right with them is right about everything but the model. `table_model` is the same idea as a real model.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.errors import ShapeError
from specdec.protocols import DraftContext
from specdec.trees import topology
from specdec.types import Candidates, DraftTree, Frontier, TargetOutput


class TableTarget:
    """A `Target` whose law after token i is `probs[i]`, whatever came before.

    It remembers the text in its cache and refuses what would corrupt the cache of a real model: a node without a
    parent, an id outside the vocabulary, a commit of nodes that are not a root path of the verified tree.

    Args:
        probs: next-token law after each token; rows sum to 1.
        prompt: token ids of each row, at least one.

    Attributes:
        cached: the text in the cache, per row. After a round it is all committed tokens but the last one.
        passes: how often the target ran, the prefill included.

    Raises:
        ShapeError: if `probs` is not a table of laws, or the prompt does not fit it.

    Example:
        >>> import torch
        >>> from specdec import DraftTree
        >>> from specdec.testing import TableTarget
        >>> target = TableTarget(torch.tensor([[0.0, 1.0], [0.75, 0.25]]), torch.tensor([[1, 0]]))
        >>> target.prefill().logits.softmax(-1)  # after the prompt's last token, 0
        tensor([[[0., 1.]]])
        >>> target.verify(DraftTree.from_root(torch.tensor([1]))).logits.softmax(-1)
        tensor([[[0.7500, 0.2500]]])
        >>> target.commit(torch.tensor([[0]]), torch.tensor([1]))
        >>> target.cached
        [[1, 0, 1]]
    """

    def __init__(self, probs: Float[Tensor, "vocab vocab"], prompt: Int[Tensor, "batch prompt"]) -> None:
        self._logits = _checked(probs).log()
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            raise ShapeError(f"prompt must be [batch, prompt] with at least one token a row, got {list(prompt.shape)}.")
        self._check_ids(prompt)
        self._prompt = prompt
        self._tree: DraftTree | None = None
        self.cached: list[list[int]] = [[] for _ in prompt]
        self.passes = 0

    @property
    def vocab_size(self) -> int:
        """Rows of the table."""
        return self._logits.shape[0]

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Committed tokens per row; 0 before the prefill."""
        return torch.tensor([len(row) for row in self.cached], device=self._prompt.device)

    @property
    def depth_limit(self) -> None:
        """None: a table has no positions to run out of."""
        return None

    def prefill(self) -> TargetOutput:
        """The laws after the prompts."""
        self.cached = self._prompt.tolist()
        return self._output(self._prompt[:, -1:])

    def verify(self, tree: DraftTree) -> TargetOutput:
        """The law at every node.

        Raises:
            ShapeError: for a tree that a model could not run.
        """
        self._check_ids(tree.tokens)
        topology.require_trees("verify", tree, len(self._prompt))
        self._tree = tree
        return self._output(tree.tokens)

    def commit(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Keeps a root path of the verified tree in each row; rows with a count of 0 keep nothing.

        Raises:
            ShapeError: if it is no root path, or no tree was verified since the last commit.
        """
        if self._tree is None:
            raise ShapeError("commit() was called without a tree; call verify() first, and commit once.")
        topology.require_path("commit", self._tree.parents, nodes, counts)
        for row, (tokens, path, count) in enumerate(
            zip(self._tree.tokens.tolist(), nodes.tolist(), counts.tolist(), strict=True)
        ):
            self.cached[row] += [tokens[node] for node in path[:count]]
        self._tree = None

    def _output(self, tokens: Int[Tensor, "batch nodes"]) -> TargetOutput:
        self.passes += 1
        return TargetOutput(logits=self._logits[tokens])

    def _check_ids(self, tokens: Int[Tensor, "batch nodes"]) -> None:
        if bool(((tokens < 0) | (tokens >= self.vocab_size)).any()):
            raise ShapeError(
                f"token ids must lie in 0..{self.vocab_size - 1}, got {tokens.tolist()}. "
                "If a drafter proposed them, `specdec.testing.check_drafter` finds out."
            )


class TableDrafter:
    """A drafter whose law after token i is `probs[i]`, with its whole law or with proposals alone.

    Args:
        probs: next-token law after each token. Tokens of probability 0 are not proposed; a row of zeros says nothing.
        whole_law: whether answers carry `Candidates.probs`.

    Example:
        >>> import torch
        >>> from specdec import Frontier
        >>> from specdec.testing import TableDrafter
        >>> drafter = TableDrafter(torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
        >>> roots = Frontier.from_root(torch.tensor([0, 1]), valid=torch.tensor([True, True]))
        >>> drafter.children(roots, count=2).log_probs.exp()
        tensor([[[0.7500, 0.2500]],
        <BLANKLINE>
                [[1.0000, 0.0000]]])
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, probs: Float[Tensor, "vocab vocab"], *, whole_law: bool = True) -> None:
        self._probs = _checked(probs, silence=True)
        self._whole_law = whole_law

    def start(self, context: DraftContext) -> None:
        """Nothing to remember: the law depends on the last token alone."""

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """The most likely tokens after each frontier token."""
        probs = self._probs[frontier.tokens]
        best = probs.topk(min(count, probs.shape[-1]), dim=-1)
        return Candidates(best.indices, best.values.log(), probs if self._whole_law else None)

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Nothing to learn."""

    def finish(self) -> None:
        """Nothing to forget."""


def _checked(probs: Float[Tensor, "rows columns"], *, silence: bool = False) -> Float[Tensor, "vocab vocab"]:
    """The table; raises `ShapeError` unless it is square and its rows are laws (or, with `silence`, zeros)."""
    if probs.ndim != 2 or probs.shape[0] != probs.shape[1]:
        raise ShapeError(f"probs must be [vocab, vocab], one law for each last token, got {list(probs.shape)}.")
    total = probs.sum(-1)
    lawful = (total - 1).abs() < 1e-4
    if bool((probs < 0).any()) or not bool((lawful | (total == 0) & silence).all()):
        raise ShapeError(
            f"each row of probs must be a law: no entry below 0, and a sum of 1; got sums {total.tolist()}."
        )
    return probs
