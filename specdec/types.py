"""The values that pass between the parts of a round: frozen, batched, with shapes in the annotations.

Words used here and everywhere: the *root* (node 0) is the last committed token, which is not yet in the target's
cache; *depth* counts from the root (0); *ancestors* include the node itself; *log-probabilities* are natural.
A row of a batch that has fewer nodes than the widest row is padded at the end (`DraftTree.num_nodes`).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Drafted tokens of one round, in topological order (a parent comes before its children).

    Attributes:
        tokens: token ids; node 0 is the root. Padding repeats the root's token, so every id is valid.
        parents: parent node of each node; -1 for the root and for padding.
        num_nodes: nodes in use per row, root included; nodes at and after this index are padding.
        scores: drafter's log-probability of the path from the root to the node; 0 at the root, -inf on padding.
        draft_probs: the law from which the children of each node were *drawn*, in index order and without
            replacement. None says that the tree is deterministic: its shape and tokens do not depend on a draw.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    num_nodes: Int[Tensor, " batch"]
    scores: Float[Tensor, "batch nodes"]
    draft_probs: Float[Tensor, "batch nodes vocab"] | None = None

    @property
    def width(self) -> int:
        """Rows of the verify forward: nodes of the widest row, root included."""
        return self.tokens.shape[1]

    @property
    def valid(self) -> Bool[Tensor, "batch nodes"]:
        """True where a node is in use."""
        return torch.arange(self.width, device=self.tokens.device) < self.num_nodes[:, None]

    @staticmethod
    def from_root(root: Int[Tensor, " batch"]) -> "DraftTree":
        """The tree of an empty round: each row holds its root and nothing else."""
        tokens = root[:, None]
        return DraftTree(
            tokens=tokens,
            parents=torch.full_like(tokens, -1),
            num_nodes=torch.ones_like(root),
            scores=torch.zeros(tokens.shape, dtype=torch.float32, device=root.device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """The nodes of one level for which a drafter is asked to propose children.

    Attributes:
        tokens: token id of each frontier node.
        parents: index of the node's parent *in the previous frontier*; -1 at the root level.
        valid: False on padding, whose answers are ignored.
        depth: depth of these nodes; 0 for the root.
    """

    tokens: Int[Tensor, "batch frontier"]
    parents: Int[Tensor, "batch frontier"]
    valid: Bool[Tensor, "batch frontier"]
    depth: int

    @staticmethod
    def from_root(root: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]) -> "Frontier":
        """The first frontier of a round: the root of each row."""
        tokens = root[:, None]
        return Frontier(tokens=tokens, parents=torch.full_like(tokens, -1), valid=valid[:, None], depth=0)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """A drafter's answer: which tokens may follow each frontier node, best first.

    Attributes:
        tokens: proposed token ids; distinct within a node. Any valid id where there is no proposal.
        log_probs: log-probability of each proposal given the path to its node, in falling order; -inf where there
            is no proposal.
        probs: the drafter's whole law at each node, if it has one; needed to *draw* children outside the top ones.
    """

    tokens: Int[Tensor, "batch frontier rank"]
    log_probs: Float[Tensor, "batch frontier rank"]
    probs: Float[Tensor, "batch frontier vocab"] | None = None

    def law(self, vocab_size: int) -> Float[Tensor, "batch frontier vocab"]:
        """The law to draw children from: `probs`, or the proposals normalised and scattered over the vocabulary.

        A node without proposals has an all-zero law.
        """
        if self.probs is not None:
            return self.probs
        weights = self.log_probs.exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        dense = torch.zeros(*weights.shape[:2], vocab_size, dtype=weights.dtype, device=weights.device)
        return dense.scatter_add_(-1, self.tokens, weights)


@dataclass(frozen=True, slots=True, eq=False)
class TargetLaw:
    """The target's next-token law at one node of each row, after every logits processor.

    Attributes:
        scores: processed logits (natural log, not normalised).
        greedy: True when the request asks for the most likely token instead of a draw.
    """

    scores: Float[Tensor, "batch vocab"]
    greedy: bool

    @property
    def probs(self) -> Float[Tensor, "batch vocab"]:
        """Probabilities; one-hot on the first maximum when greedy."""
        if self.greedy:
            chosen = self.scores.argmax(-1, keepdim=True)
            return torch.zeros_like(self.scores).scatter_(-1, chosen, 1.0)
        return self.scores.softmax(-1)

    def draw(self, generator: torch.Generator | None = None) -> Int[Tensor, " batch"]:
        """One token per row: the first maximum when greedy, else one multinomial draw (as `generate` does)."""
        if self.greedy:
            return self.scores.argmax(-1)
        return torch.multinomial(self.probs, num_samples=1, generator=generator).squeeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What verification decided.

    Attributes:
        path: accepted nodes from depth 1 on, in order; -1 after the last one.
        num_accepted: accepted drafted tokens per row, bonus excluded.
        bonus: the target-drawn token that ends the round, per row.
    """

    path: Int[Tensor, "batch depth"]
    num_accepted: Int[Tensor, " batch"]
    bonus: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True, eq=False)
class TargetOutput:
    """What one target forward gives for the nodes of a tree.

    Attributes:
        logits: raw logits per node (for a prefill: of the last prompt token only, as node 0).
        features: hidden states of the layers a drafter asked for, concatenated; for a prefill, of every prompt token.
        hidden_states: per layer, when the request asks for them; for a prefill, of every prompt token.
        attentions: per layer, over the columns of `attention_columns`, when the request asks for them.
    """

    logits: Float[Tensor, "batch nodes vocab"]
    features: Float[Tensor, "batch rows features"] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CommittedRows:
    """Keys and values of the committed tokens in one layer of the target, as its attention reads them.

    Attributes:
        keys: turned to their positions.
        values: likewise by slot.
        positions: position of each slot's token.
        real: False on padding and on slots that hold nothing committed.
        next: position of the next token, the root.
    """

    keys: Float[Tensor, "batch kv_heads slots dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    positions: Int[Tensor, "batch slots"]
    real: Bool[Tensor, "batch slots"]
    next: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Wall time of one round by stage, in seconds."""

    draft: float = 0.0
    grow: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the stages, in seconds."""
        return self.draft + self.grow + self.verify + self.accept + self.commit


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round as it happened: the tree, the nodes taken, the tokens committed.

    Attributes:
        index: 0 for the prefill, which is a round without drafts.
        tree: the verified tree.
        path: committed nodes from depth 1 on, after every stop; -1 after the last one.
        num_accepted: committed tokens that were drafted, per row.
        committed: tokens committed, per row, in order; -1 after the last one.
        num_committed: tokens committed per row: `num_accepted` plus the bonus token, unless a stop cut it off.
        budget: tree budget that was asked for.
        times: wall time by stage, in seconds.
    """

    index: int
    tree: DraftTree
    path: Int[Tensor, "batch depth"]
    num_accepted: Int[Tensor, " batch"]
    committed: Int[Tensor, "batch new"]
    num_committed: Int[Tensor, " batch"]
    budget: int
    times: StageTimes = field(default_factory=StageTimes)
