"""Does a drafter keep the laws of `specdec.protocols.Drafter`?

The checker plays the builder: it asks for the children of the roots, then of the best proposals, level by level, with
a padding node in every level. It plays the loop: it commits tokens, some drafted and some not, several at once and one
by one, and begins requests anew. Two runs that must agree are asked about the very same frontiers. To a drafter that
reads the target's features it hands those of the committed text, and NaN wherever the protocol says nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.errors import LawError, ShapeError, UnsupportedError
from specdec.protocols import DraftContext, Drafter
from specdec.types import Candidates, Frontier

_CLOSE = 1e-4  # absolute, in probabilities and log-probabilities
_WIDTH = 3  # nodes of a level that are asked about
_MANY = 64  # proposals asked for where whole sets are compared
_REPEATS = 4  # commits before that, so that the text has become another one

Level = tuple[Frontier, Candidates]
Proposals = dict[int, float]
States = Callable[[Int[Tensor, "1 seq"]], Float[Tensor, "1 seq features"]]


@torch.no_grad()
def check_drafter(
    drafter: Drafter, context: DraftContext, *, count: int = 4, depth: int = 3, target: Any = None
) -> None:
    """Raises `LawError` with the law and the place if `drafter` breaks one on this text.

    A drafter that passes can still guess badly; that costs speed, never correctness. What is checked: answers are
    well formed; they depend on the committed tokens and the path alone, and not on chance, on earlier requests, on
    what was drafted, on how many tokens were committed at once, or on other rows; nothing given is changed.

    Args:
        drafter: the drafter; its requests are not finished between the checks, so that one with a memory across
            requests does not learn from them. A draft model should be in float64: then rounding decides nothing.
        context: a request of one or more rows, such as `PlainLedger(prompt, max_new_tokens=1).draft_context(target)`.
            Several rows, and text that repeats itself, check more.
        count: proposals to ask for.
        depth: levels to ask for.
        target: for a drafter that reads features, the transformers model whose hidden states these are, or a function
            that gives them: from the ids of one text `[1, seq]` to the states of its tokens `[1, seq, features]`, the
            layers side by side. A state may depend on the tokens up to its own alone.

    Raises:
        LawError: for the first law that is broken.
        UnsupportedError: for a drafter that reads features, without `target`; for one that attends to the target's
            keys and values, which are not given here.
        ShapeError: for features of another shape.

    Example:
        >>> import torch
        >>> from specdec.drafters import PromptLookupDrafter
        >>> from specdec.protocols import DraftContext
        >>> from specdec.testing import check_drafter
        >>> text = torch.tensor([[5, 6, 7, 8, 6, 9, 5, 6]])
        >>> context = DraftContext(tokens=text, mask=torch.ones_like(text, dtype=torch.bool), vocab_size=10)
        >>> check_drafter(PromptLookupDrafter(), context)
    """
    name = type(drafter).__name__
    if not isinstance(drafter, Drafter):
        members = ("feature_layers", "start", "children", "commit", "finish")
        missing = [member for member in members if not hasattr(drafter, member)]
        raise LawError(f"{name} is no drafter: it lacks {', '.join(missing)}.")
    states = None
    if drafter.feature_layers:
        if target is None:
            raise UnsupportedError(
                f"{name} reads features of layers {drafter.feature_layers}: pass target=, the model, or a "
                "function from ids [1, seq] to features [1, seq, features]."
            )
        states = _states_of(target, drafter.feature_layers)
    check = _Check(drafter, name, context, states)
    check.start(context)
    seen = check.explore(check.roots, check.everyone, count, depth)
    check.start(context)
    check.same(seen, check.ask(seen, count), "the request was started again; answers may not depend on chance")
    check.other_request(count, depth)
    check.start(context)
    check.same(seen, check.ask(seen, count), "another request ran; start() must forget it")
    check.commits(seen, count, depth)
    check.rows_apart(seen, count)
    for _ in range(2):
        check.start(context)
        drafter.finish()


class _Check:
    """The laws, one method each."""

    def __init__(self, drafter: Drafter, name: str, context: DraftContext, states: States | None) -> None:
        self._drafter, self._name, self._context = drafter, name, context
        self._states, self._texts = states, list[list[int]]()
        last = context.mask.shape[1] - 1 - context.mask.flip(1).to(torch.uint8).argmax(-1)
        self.roots = context.tokens.gather(1, last[:, None]).squeeze(1)
        self.everyone = torch.ones_like(self.roots, dtype=torch.bool)
        self._chance = None if context.generator is None else context.generator.get_state()

    def start(self, context: DraftContext) -> None:
        """Begins a request."""
        self._rewind()
        self._texts = [ids[real].tolist() for ids, real in zip(context.tokens, context.mask, strict=True)]
        features = self._features(context.mask, [0] * len(self._texts))
        if features is not None:
            context = dataclasses.replace(context, features=features)
        with self._untouched("start", context.tokens, context.mask, features):
            self._drafter.start(context)

    def commit(self, tokens: Int[Tensor, "batch new"], counts: Int[Tensor, " batch"]) -> None:
        """Tells what was committed, with the states of the tokens before."""
        firsts = [len(text) - 1 for text in self._texts]
        for text, new, kept in zip(self._texts, tokens.tolist(), counts.tolist(), strict=True):
            text += new[:kept]
        features = self._features(torch.arange(tokens.shape[1], device=counts.device) < counts[:, None], firsts)
        with self._untouched("commit", tokens, counts, features):
            self._drafter.commit(tokens, counts, *(() if features is None else (features,)))

    def _features(
        self, real: Bool[Tensor, "batch columns"], firsts: list[int]
    ) -> Float[Tensor, "batch columns features"] | None:
        """States of each text from a token on, in the real columns; of its root, and elsewhere, there are none."""
        if self._states is None:
            return None
        found = None
        for row, (text, first) in enumerate(zip(self._texts, firsts, strict=True)):
            states: Any = self._states(torch.tensor([text], device=real.device))
            if not isinstance(states, Tensor) or states.ndim != 3 or states.shape[:2] != (1, len(text)):
                told = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
                raise ShapeError(
                    f"target= must give features [1, {len(text)}, features] of {len(text)} ids, got {told}."
                )
            if found is None:
                found = states.new_full((*real.shape, states.shape[2]), torch.nan)
            new = states[0, first:-1]
            found[row, real[row].nonzero().squeeze(1)[: len(new)]] = new
        return found

    def explore(
        self, roots: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"], count: int, depth: int
    ) -> list[Level]:
        """Asks about the roots, then about the best proposals of each level; every answer is checked."""
        self._rewind()
        frontier = Frontier.from_root(roots, valid)
        levels = [(frontier, self._children(frontier, count))]
        while len(levels) < depth:
            above, found = levels[-1]
            scores = found.log_probs.masked_fill(~above.valid[:, :, None], -torch.inf).flatten(1)
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            best, order = best[:, :_WIDTH], order[:, :_WIDTH]
            if not bool((best > -torch.inf).any()):
                break
            pad = torch.zeros_like(roots)[:, None]
            frontier = Frontier(
                tokens=torch.cat([found.tokens.flatten(1).gather(1, order), roots[:, None]], 1),
                parents=torch.cat([order // found.tokens.shape[2], pad], 1),
                valid=torch.cat([best > -torch.inf, pad.bool()], 1),
                depth=len(levels),
            )
            levels.append((frontier, self._children(frontier, count)))
        return levels

    def ask(self, levels: list[Level], count: int) -> list[Candidates]:
        """Asks about the same frontiers again."""
        self._rewind()
        return [self._children(frontier, count) for frontier, _ in levels]

    def other_request(self, count: int, depth: int) -> None:
        """A request about other text, which commits something and is left unfinished."""
        self.start(dataclasses.replace(self._context, tokens=(self._context.tokens + 1) % self._context.vocab_size))
        self.commit(self.roots[:, None], torch.ones_like(self.roots))
        self.explore(self.roots, self.everyone, count, depth)

    def commits(self, seen: list[Level], count: int, depth: int) -> None:
        """What is committed, and nothing else, changes what follows."""
        tokens, counts = self._tokens_to_commit(seen[0][1])
        going, last = counts > 0, (counts - 1).clamp_min(0)[:, None]
        roots = torch.where(going, tokens.gather(1, last).squeeze(1), self.roots)

        self.start(self._context)
        self.ask(seen, count)
        self.commit(tokens, counts)
        after = self.explore(roots, going, count, depth)
        self.start(self._context)
        for place in range(tokens.shape[1]):
            self.commit(tokens[:, place : place + 1], (counts > place).long())
        self.same(
            after, self.ask(after, count), "first the committed tokens were drafted, then not, and came one by one"
        )

        # What is learned along the way may move probabilities, so only the proposals are compared; a drafter that reads
        # features has learned nothing else.
        many = _MANY if self._states is None else count
        self.start(self._context)
        for _ in range(_REPEATS):
            self.commit(tokens, counts)
        continued = self._children(after[0][0], many)
        self.start(self._extended(tokens, counts))
        fresh = self._children(after[0][0], many)
        if self._states is not None:
            self.same(
                [(after[0][0], fresh)],
                [continued],
                "its text and features are the same, given at first, then committed",
            )
        for row in going.nonzero().flatten().tolist():
            ours, theirs = _proposals(continued, row, 0), _proposals(fresh, row, 0)
            if ours.keys() != theirs.keys():
                raise LawError(
                    f"{self._name}: row {row} committed {_REPEATS} times {tokens[row, : counts[row]].tolist()} and "
                    f"proposes {sorted(ours)}; a request that starts with the same text proposes {sorted(theirs)}. "
                    "commit() must extend the text by these tokens, and by nothing else."
                )

    def rows_apart(self, seen: list[Level], count: int) -> None:
        """A row of a batch is a request of its own."""
        for row in range(len(self.roots)):
            real = self._context.mask[row]
            own = dataclasses.replace(
                self._context, tokens=self._context.tokens[row, real][None], mask=real[real][None]
            )
            self.start(own)
            levels = [
                (
                    Frontier(level.tokens[[row]], level.parents[[row]], level.valid[[row]], level.depth),
                    Candidates(answer.tokens[[row]], answer.log_probs[[row]]),
                )
                for level, answer in seen
            ]
            alone = self.ask(levels, count)
            self.same(levels, alone, f"row {row} ran in its batch, then alone; rows may not depend on each other")

    def same(self, expected: list[Level], found: list[Candidates], what: str) -> None:
        """Raises unless two runs answered alike, up to rounding."""
        for (frontier, one), two in zip(expected, found, strict=True):
            for row, node in frontier.valid.nonzero().tolist():
                ours, theirs = _proposals(one, row, node), _proposals(two, row, node)
                if ours.keys() != theirs.keys() or any(abs(ours[key] - theirs[key]) > _CLOSE for key in ours):
                    raise LawError(
                        f"{self._name} at depth {frontier.depth}, row {row}, node {node}, answered {_shown(ours)}, "
                        f"then {_shown(theirs)}, though {what}."
                    )

    @contextmanager
    def _untouched(self, call: str, *given: Tensor | None) -> Iterator[None]:
        """Raises if a call changed the tensors it was given."""
        tensors = [tensor for tensor in given if tensor is not None]
        before = [tensor.clone() for tensor in tensors]
        yield
        if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in zip(tensors, before, strict=True)):
            raise LawError(f"{self._name}.{call} changed the tensors it was given; they are the caller's.")

    def _rewind(self) -> None:
        """Puts the generator back to where it was at first, so that two runs see the same chance."""
        if self._context.generator is not None and self._chance is not None:
            self._context.generator.set_state(self._chance)

    def _tokens_to_commit(self, found: Candidates) -> tuple[Int[Tensor, "batch new"], Int[Tensor, " batch"]]:
        """The first proposal, a token that was not proposed, the first again; rows in turn take 3, 1 or 0 of them."""
        tokens, counts = [], []
        for row in range(len(self.roots)):
            proposals = _proposals(found, row, 0)
            first = next(iter(proposals), 0)
            other = next((token for token in range(self._context.vocab_size) if token not in proposals), first)
            counts.append((3, 1, 0)[row % 3])
            tokens.append([first, other, first][: counts[-1]] + [-1] * (3 - counts[-1]))
        return torch.tensor(tokens, device=self.roots.device), torch.tensor(counts, device=self.roots.device)

    def _extended(self, tokens: Int[Tensor, "batch new"], counts: Int[Tensor, " batch"]) -> DraftContext:
        """The context of a request that starts with the tokens, committed as often as they are repeated."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        return dataclasses.replace(
            self._context,
            tokens=torch.cat([self._context.tokens, *[tokens.masked_fill(~real, 0)] * _REPEATS], 1),
            mask=torch.cat([self._context.mask, *[real] * _REPEATS], 1),
        )

    def _children(self, frontier: Frontier, count: int) -> Candidates:
        """The drafter's answer, which must be well formed."""
        with self._untouched("children", frontier.tokens, frontier.parents, frontier.valid):
            answer = self._drafter.children(frontier, count)
        place = f"{self._name}.children at depth {frontier.depth}"
        _check_form(answer, frontier, count, self._context.vocab_size, place)
        _check_values(answer, frontier.valid, place)
        return answer


def _states_of(target: Any, layers: tuple[int, ...]) -> States:
    """What gives the features of a text: a function as it is, a model by its hidden states."""
    if not hasattr(target, "config"):
        return target  # type: ignore[no-any-return]  # a function; its answers are checked

    def states(ids: Int[Tensor, "1 seq"]) -> Float[Tensor, "1 seq features"]:
        found = target(ids, output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in layers], -1)

    return states


def _check_form(answer: Candidates, frontier: Frontier, count: int, vocab: int, place: str) -> None:
    """Types, shapes and ids."""
    if not isinstance(answer, Candidates):
        raise LawError(f"{place} must return Candidates, got {type(answer).__name__}.")
    tokens, log_probs, probs = answer.tokens, answer.log_probs, answer.probs
    nodes = list(frontier.tokens.shape)
    if tokens.ndim != 3 or list(tokens.shape[:2]) != nodes or tokens.shape != log_probs.shape:
        raise LawError(
            f"{place} must give tokens and log_probs of shape [{nodes[0]}, {nodes[1]}, rank], one list for each "
            f"frontier node, got {list(tokens.shape)} and {list(log_probs.shape)}."
        )
    if tokens.shape[2] > count:
        raise LawError(f"{place} was asked for at most {count} proposals a node, got {tokens.shape[2]}; cut the list.")
    if tokens.dtype != torch.int64 or not log_probs.is_floating_point():
        raise LawError(f"{place} must give int64 tokens and floating log_probs, got {tokens.dtype}, {log_probs.dtype}.")
    if tokens.device != frontier.tokens.device or log_probs.device != frontier.tokens.device:
        raise LawError(f"{place} must answer on the frontier's device, {frontier.tokens.device}, got {tokens.device}.")
    if bool(((tokens < 0) | (tokens >= vocab)).any()):
        raise LawError(
            f"{place}: ids must lie in 0..{vocab - 1}, got {tokens.min()}..{tokens.max()}. Where there is no proposal, "
            "give any valid id and a log-probability of -inf."
        )
    if probs is not None and list(probs.shape) != [*nodes, vocab]:
        raise LawError(
            f"{place}: probs must be the law over the target's vocabulary, {[*nodes, vocab]}, got "
            f"{list(probs.shape)}; scatter it to the target's ids."
        )


def _check_values(answer: Candidates, valid: Bool[Tensor, "batch frontier"], place: str) -> None:
    """Probabilities of the valid nodes."""
    tokens, scores = answer.tokens[valid], answer.log_probs[valid].double()
    if bool((scores.isnan() | (scores > _CLOSE)).any()):
        raise LawError(f"{place}: log_probs must be at most 0 and never NaN, got {scores.tolist()}.")
    if bool((scores[:, 1:] > scores[:, :-1]).any()):
        raise LawError(f"{place}: log_probs must fall from the best proposal on, got {scores.tolist()}; sort them.")
    proposed = scores > -torch.inf
    twins = (tokens[:, :, None] == tokens[:, None, :]) & proposed[:, :, None] & proposed[:, None, :]
    if bool(twins.triu(1).any()):
        raise LawError(f"{place}: proposals of one node must be distinct, got {tokens.tolist()}; keep the better one.")
    if bool((scores.exp().sum(-1) > 1 + _CLOSE).any()):
        raise LawError(f"{place}: probabilities of one node add up to at most 1, got {scores.exp().sum(-1).tolist()}.")
    if answer.probs is None:
        return
    law = answer.probs[valid].double()
    total = law.sum(-1)
    if bool((law.isnan() | (law < 0)).any()) or not bool((((total - 1).abs() < _CLOSE) | (total == 0)).all()):
        raise LawError(f"{place}: each law in probs must sum to 1, or be all 0 for none, got sums {total.tolist()}.")
    gap = (law.gather(1, tokens) - scores.exp()).abs().masked_fill(~proposed, 0)
    if bool((gap > _CLOSE).any()):
        raise LawError(f"{place}: log_probs and probs differ by up to {gap.max():.3g}; both must tell the same law.")


def _proposals(answer: Candidates, row: int, node: int) -> Proposals:
    """Log-probability by token, best first."""
    pairs = zip(answer.tokens[row, node].tolist(), answer.log_probs[row, node].tolist(), strict=True)
    return {token: score for token, score in pairs if score > -torch.inf}


def _shown(proposals: Proposals) -> str:
    return ", ".join(f"{token}: {score:.3f}" for token, score in proposals.items()) or "nothing"
