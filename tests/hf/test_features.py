"""Features: the hidden states that a drafter asks for, of every committed token, whenever it starts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, trees
from specdec.errors import UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import Candidates, Frontier
from tests import helpers

LAYERS = (0, 1, 2)


class Witness:
    """Drafts the first tokens of the vocabulary and keeps all features that it is told, by row."""

    feature_layers = LAYERS

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.features: list[list[Tensor]] = []

    def start(self, context: DraftContext) -> None:
        assert context.features is not None
        kept = context.mask.clone()
        lasts = context.mask.shape[1] - 1 - context.mask.flip(1).to(torch.int64).argmax(1)
        kept[torch.arange(len(lasts)), lasts] = False  # the root has no features yet
        self.features = [list(rows[keep]) for rows, keep in zip(context.features, kept, strict=True)]
        self.tokens = [row[keep].tolist() for row, keep in zip(context.tokens, context.mask, strict=True)]

    def children(self, frontier: Frontier, count: int) -> Candidates:
        guess = torch.arange(count).expand(*frontier.tokens.shape, -1)
        return Candidates(guess, torch.full(guess.shape, -1.0))

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
        assert features is not None
        for row, count in enumerate(counts.tolist()):
            self.features[row] += list(features[row, :count])
            self.tokens[row] += tokens[row, :count].tolist()

    def finish(self) -> None: ...


class Late:
    """A controller that drafts nothing for some rounds."""

    def __init__(self, rounds: int) -> None:
        self.waits = rounds

    def start(self, nodes: int, sampled: bool) -> None:
        self.nodes, self.left = nodes, self.waits

    def budget(self) -> int:
        self.left -= 1
        return self.nodes if self.left < 0 else 0

    def prune(self, tree: Any) -> Any:
        return tree

    def observe(self, round: Any) -> None: ...


@pytest.mark.parametrize("family", helpers.DISTINCT)
@pytest.mark.parametrize(("waits", "chunk"), [(0, None), (3, None), (0, 4)])
def test_features_are_the_hidden_states_of_the_committed_text(family: str, waits: int, chunk: int | None) -> None:
    """Whatever round a drafter starts in, whatever was rejected before, and in however many chunks the prompt ran."""
    target, witness = helpers.model(family), Witness()
    generator = SpeculativeGenerator(target, witness, trees.BestFirst(24, branch=24), controller=Late(waits))
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    generator.generate(**request, prefill_chunk_size=chunk)
    assert generator.stats.accepted > 0
    for tokens, features in zip(witness.tokens, witness.features, strict=True):
        assert len(features) == len(tokens) - 1
        states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in LAYERS], -1)
        torch.testing.assert_close(torch.stack(features), expected, rtol=1e-6, atol=1e-6)


def test_no_more_layers_are_kept_than_were_asked_for() -> None:
    target, asked = helpers.model(), []
    handle = target.register_forward_pre_hook(
        lambda _, __, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    witness = Witness()
    witness.feature_layers = (1,)
    SpeculativeGenerator(target, witness, trees.Chain(2)).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False
    )
    handle.remove()
    assert len(asked) > 2
    assert all(layers == [1] for layers in asked)


@pytest.mark.parametrize(
    ("layers", "request_", "message"),
    [
        ((1, 9), {}, "hidden states 0 to"),
        ((-1,), {}, "hidden states 0 to"),
    ],
)
def test_features_that_cannot_be_had_are_refused(
    layers: tuple[int, ...], request_: dict[str, Any], message: str
) -> None:
    witness = Witness()
    witness.feature_layers = layers
    generator = SpeculativeGenerator(helpers.model(), witness, trees.Chain(2))
    with pytest.raises(UnsupportedError, match=message):
        generator.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=5, do_sample=False, **request_)


def test_a_continued_cache_is_refused() -> None:
    target, prompt = helpers.model(), torch.tensor([[5, 6, 7, 8]])
    cache = target(prompt[:, :3]).cache
    with pytest.raises(UnsupportedError, match="of the 3 tokens in the given cache are not known"):
        SpeculativeGenerator(target, Witness(), trees.Chain(2)).generate(
            prompt, cache=cache, max_new_tokens=5, do_sample=False
        )
