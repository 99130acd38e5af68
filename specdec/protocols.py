"""The seams of the library: what a part must offer to take its place in a round.

Nothing has to inherit from these classes; an object with the right members fits. Rules that types cannot say stand
under **Laws** and are tested. The order of a round is in `specdec.rounds`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.types import Candidates, CommittedRows, DraftTree, Frontier, Round, TargetLaw, TargetOutput, Verdict


@runtime_checkable
class Target(Protocol):
    """The model that is being accelerated, bound to one batch of prompts.

    **Laws.** `verify` never changes what is committed; after `commit`, `lengths` grows by `counts` and everything
    past it is dead. `verify(tree).logits[b, n]` are the logits after row b's committed tokens and the path to n.
    """

    @property
    def vocab_size(self) -> int:
        """Number of logits per node."""

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Committed cache slots per row (left padding included)."""

    @property
    def depth_limit(self) -> Int[Tensor, " batch"] | None:
        """Deepest node that still has a position in the model, per row; None when positions are unbounded."""

    def prefill(self) -> TargetOutput:
        """Runs the prompt; the output holds the logits after its last token as node 0."""

    def verify(self, tree: DraftTree) -> TargetOutput:
        """One forward over all nodes, each seeing the committed tokens and its own ancestors."""

    def commit(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Keeps the first `counts[b]` of `nodes[b]` (a root path) in the cache and drops the rest of the tree."""


@runtime_checkable
class ModelRunner(Protocol):
    """A causal model that a drafter drives itself: rows may be appended level by level and kept selectively.

    `specdec.hf.ModelTarget` is one. Rows appended since the last `keep` are *pending*.
    """

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Committed cache slots per row."""

    @property
    def depth_limit(self) -> Int[Tensor, " batch"] | None:
        """Largest depth a row may be appended at, per batch row; None when positions are unbounded."""

    def append(
        self,
        tokens: Int[Tensor, "batch rows"],
        depths: Int[Tensor, "batch rows"],
        visible: Bool[Tensor, "batch rows pending"],
    ) -> TargetOutput:
        """Runs new rows after the pending ones.

        Row i of batch row b sits `depths[b, i]` positions after the last committed token's successor and sees all
        committed tokens plus the pending rows marked in `visible` (earlier pending rows first, then the new rows;
        itself included).
        """

    def keep(self, rows: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Commits the first `counts[b]` of the pending rows `rows[b]`, in that order, and drops the others."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftContext:
    """What a drafter is told when a request starts to draft.

    Attributes:
        tokens: committed token ids (prompt and what was generated so far), left-aligned as the caller gave them.
        mask: False on padding.
        vocab_size: size of the target's logits; proposals must be smaller ids.
        temperature: the request's temperature; 0 for greedy.
        features: the target's features of all committed tokens that are in its cache, if the drafter asked for them.
        open_model: turns a causal model object into a `ModelRunner` bound to `tokens` without the last token.
        generator: source of randomness for draws.
        rows: the target's keys and values now, of the last layer of a type that computes its own; for drafters that
            attend to them. `full_attention` holds all tokens, `sliding_attention` those that the next token sees.
    """

    tokens: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]
    vocab_size: int
    temperature: float = 0.0
    features: Float[Tensor, "batch rows features"] | None = None
    open_model: Callable[[Any, Int[Tensor, "batch prompt"], Bool[Tensor, "batch prompt"]], ModelRunner] | None = None
    generator: torch.Generator | None = None
    rows: Callable[[str], CommittedRows] | None = None


@runtime_checkable
class Drafter(Protocol):
    """Answers one question: for these frontier nodes, which tokens may come next?

    **Laws.** Answers depend only on the committed tokens, the path to the node and `generator`. Proposals are
    distinct, valid target ids in falling order of `log_probs`; `probs`, where given, is exactly the law a draw
    would follow. `start` forgets every earlier request; nothing of the caller's is changed.

    A drafter that can propose only some of the target's tokens may have an attribute `shortlist`, a
    `drafters.Shortlist`: statistics then count the tokens that it misses.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's `hidden_states` whose values the drafter reads; empty for none."""

    def start(self, context: DraftContext) -> None:
        """Begins a request. Called before the first draft, never for a request that drafts nothing."""

    def children(self, frontier: Frontier, count: int) -> Candidates:
        """At most `count` proposals per frontier node. The first frontier of a round is the roots."""

    def commit(
        self,
        tokens: Int[Tensor, "batch new"],
        counts: Int[Tensor, " batch"],
        features: Float[Tensor, "batch new features"] | None = None,
    ) -> None:
        """Tells which tokens a round committed: the first `counts[b]` of `tokens[b]`; the last is the next root.

        `features[b, i]` belongs to the token before `tokens[b, i]` (it is the state that predicted it).
        """

    def finish(self) -> None:
        """Ends the request; a drafter with a memory across requests learns from it here."""


@runtime_checkable
class TreeBuilder(Protocol):
    """Decides which nodes to draft.

    **Laws.** At most `budget` nodes beside the root; none deeper than `limits[b]`; siblings carry distinct tokens.
    If the tree has `draft_probs`, how many children a node gets is decided before any of them is drawn.
    """

    @property
    def nodes(self) -> int:
        """Tree budget: most nodes the builder ever drafts, root excluded."""

    @property
    def sampled(self) -> bool:
        """Whether children are drawn at random, so that the tree carries `draft_probs`."""

    @property
    def chain(self) -> bool:
        """Whether every tree is a chain: no node ever has two children."""

    def grow(
        self,
        drafter: Drafter,
        root: Int[Tensor, " batch"],
        limits: Int[Tensor, " batch"],
        budget: int,
        *,
        vocab_size: int,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Grows the tree of one round; rows with `limits[b] == 0` keep their root only."""


@runtime_checkable
class Verifier(Protocol):
    """Turns the target's laws at the nodes of a tree into a path and a bonus token.

    **Laws.** If `lossless`, the law of the committed tokens is the target's, for every tree it accepts.
    """

    @property
    def lossless(self) -> bool:
        """Whether the output law equals the target's."""

    @property
    def stepwise(self) -> bool:
        """Whether a decision at a node needs the law of that node alone (then `step` is offered)."""

    def check(self, builder: TreeBuilder) -> None:
        """Raises `UnsupportedError` for a tree builder whose trees this rule cannot verify without bias."""

    def __call__(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch nodes vocab"],
        *,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """Verifies a whole tree at once."""


@runtime_checkable
class StepVerifier(Verifier, Protocol):
    """A verifier that walks down from the root and looks at one node at a time."""

    def step(
        self,
        tree: DraftTree,
        node: Int[Tensor, " batch"],
        law: TargetLaw,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The token to commit after `node`, and the child that carries it (-1 when the token ends the round)."""


@runtime_checkable
class Ledger(Protocol):
    """The committed tokens of a request, and everything that plain decoding does once per token.

    Processors with the row's true prefix, stopping, lengths, streaming, scores: all of it happens here, one token
    at a time, in the order of plain decoding.
    """

    @property
    def active(self) -> Bool[Tensor, " batch"]:
        """Rows that still generate."""

    @property
    def roots(self) -> Int[Tensor, " batch"]:
        """Last committed token of each row."""

    @property
    def remaining(self) -> Int[Tensor, " batch"]:
        """Tokens a row may still commit before its length limit; 0 for rows that stopped."""

    @property
    def lockstep(self) -> bool:
        """Whether all rows must commit the same number of tokens (see `specdec.hf.ledger`)."""

    def law(self, output: TargetOutput, node: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> TargetLaw:
        """The law after the committed tokens of `rows`, from the raw logits at `node`."""

    def laws(self, output: TargetOutput, tree: DraftTree) -> Float[Tensor, "batch nodes vocab"]:
        """Target probabilities at every node, each under its own prefix (for verifiers that need them all)."""

    def commit(self, tokens: Int[Tensor, " batch"], rows: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """Commits one token to each of `rows`; returns the rows that go on."""

    def draft_context(self, target: Target) -> DraftContext:
        """What a drafter needs to know to start now."""


@runtime_checkable
class Controller(Protocol):
    """Chooses how much to draft, from measured times; may choose nothing."""

    def start(self, nodes: int, sampled: bool) -> None:
        """Begins a request with this tree budget; forgets every earlier request."""

    def budget(self) -> int:
        """Tree budget of the next round; 0 for none, in which case no drafter is called."""

    def prune(self, tree: DraftTree) -> DraftTree:
        """The part of a grown tree that is worth verifying.

        Must not depend on the draws of a sampled tree, with one exception: whether a node of a chain is kept may
        depend on the nodes before it. The identity is always right.
        """

    def observe(self, round: Round) -> None:
        """Learns from a finished round."""


@runtime_checkable
class KVCodec(Protocol):
    """Stores rows of keys or values in fewer bits.

    **Laws.** A row's code depends on the row and on `state` alone, so rows can be appended, copied and dropped in any
    order; every tensor of a code has the leading dimensions of the rows; `decode` gives finite numbers for finite rows.
    """

    def bits_per_element(self, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Bits of a stored number, with everything stored per row, for rows of `dim` numbers of `dtype`.

        Raises `ShapeError` for a `dim` that the codec cannot store.
        """

    def fit(
        self, rows: Float[Tensor, "batch heads slots dim"], real: Bool[Tensor, "batch slots"] | None = None
    ) -> tuple[Tensor, ...]:
        """What is learned once from the first rows of a text (where `real`), `[batch, heads, 1, ...]` each."""

    def encode(self, rows: Float[Tensor, "*lead dim"], state: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The rows as a tuple of tensors `[*lead, ...]` with the leading dimensions of the rows.

        Called with no rows (`[batch, heads, 0, dim]`) before the first ones, to learn what buffers to make.
        """

    def decode(
        self, parts: tuple[Tensor, ...], state: tuple[Tensor, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*lead dim"]:
        """The rows that a code stands for, in `dtype`."""
