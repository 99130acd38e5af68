"""What the tests of recurrent layers share: their rule walked token by token, and what a plain forward leaves behind.

Transformers computes decays, norms and the rule in float32 whatever the model's dtype. Inside `exact` all is computed
in float64, and the rule by its definition with no code of ours, so states and logits of a plain forward are exact.
"""

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.hf import gated_delta
from specdec.hf.recurrent import RecurrentStates
from specdec.kv import KVCacheConfig
from specdec.types import DraftTree
from tests.hf.texts import Texts, draft, model

HYBRID = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]
EXACT, PLAIN = 1e-10, 1e-5
"""Largest errors inside `exact`, and beside transformers as it is, with states in float32."""

FLOAT64 = KVCacheConfig(states=torch.float64)

States = list[tuple[Tensor, Tensor]]
"""Last inputs and state of each recurrent layer."""


def walk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule by its definition, in float64, called as transformers calls its own."""
    query, key, v, g, beta = (part.double() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query, key = (part.repeat_interleave(v.shape[2] // key.shape[2], 2) for part in (query, key))
    state = v.new_zeros(v.shape[0], v.shape[2], key.shape[3], v.shape[3])
    state = state if initial_state is None else initial_state.double()
    outputs = []
    for step in range(v.shape[1]):
        state = state * g[:, step].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, step])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, step], beta[:, step, :, None] * (v[:, step] - known))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, step]) * key.shape[3] ** -0.5)
    return torch.stack(outputs, 1).to(value.dtype), state if output_final_state else None


def modules() -> list[Any]:
    """The Python modules of the hybrid families."""
    return [sys.modules[type(model(family)).__module__] for family in HYBRID]


@contextmanager
def exact() -> Iterator[None]:
    """Transformers rounds nothing to float32 and walks the rule; models must have been made before."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules():
            for name in gated_delta.RULES[0]:
                patch.setattr(module, name, walk)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


@torch.no_grad()
def logits_after(target: PreTrainedModel, texts: Sequence[list[int]]) -> Tensor:
    """Logits after each of some texts, by one plain forward; what stands to the right of a text does not reach it."""
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    logits: Tensor = target(input_ids=ids, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


@torch.no_grad()
def plain_cache(target: PreTrainedModel, text: list[int], *, step: int | None = None) -> DynamicCache:
    """The cache of transformers behind a text, run at once or `step` tokens at a time."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    for ids in torch.tensor([text]).split(step or len(text), 1):
        target(input_ids=ids, cache=cache, use_cache=True)
    return cache


def recurrent(cache: DynamicCache) -> States:
    """What the recurrent layers of a cache of transformers hold."""
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [(layer.conv_states[0], layer.recurrent_states[0]) for layer in layers]


def folded(states: RecurrentStates) -> States:
    """What our recurrent layers would hold if they folded what was kept; they are left as they are."""
    layers = copy.deepcopy(states.layers)
    for layer in layers:
        layer.fold()
    return [(layer.history, layer.state) for layer in layers]


def difference(found: States, row: int, expected: States) -> float:
    """Largest difference of one row's inputs and states from those of a text alone."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        for part, wanted in zip(mine, theirs, strict=True):
            assert part.shape[1:] == wanted.shape[1:]
            error = (part[row].double() - wanted[0].double()).abs().max()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


class Hybrid(Texts):
    """A hybrid target beside the texts of its rows, judged by plain forwards and by the states they leave."""

    def error(self, tree: DraftTree) -> float:
        """Largest difference over all nodes that are in use."""
        self._tree = tree
        logits, worst = self.target.verify(tree).logits, 0.0
        for row, text in enumerate(self.texts):
            size = int(tree.num_nodes[row])
            expected = logits_after(self.model, [text + self.path(row, node) for node in range(size)])
            worst = max(worst, float((logits[row, :size] - expected).abs().max().nan_to_num(torch.inf)))
        return worst

    def state_error(self) -> float:
        """Largest difference of inputs and states from those of a fresh pass over each row's text."""
        found = folded(self.target.cache.recurrent)
        fresh = (recurrent(plain_cache(self.model, text)) for text in self.texts)
        return max(difference(found, row, expected) for row, expected in enumerate(fresh))


def follow(texts: Hybrid, seed: int, rounds: int, most: int, *, logits: bool = True) -> tuple[float, float]:
    """Largest errors of logits and of states over rounds that commit a whole path, a part, the root, or nothing."""
    rng, worst, states = random.Random(seed), 0.0, 0.0
    for _ in range(rounds):
        sizes = [rng.choice([1, rng.randint(1, most), most]) for _ in texts.texts]
        tree = draft(rng.randrange(2**32), sizes, rng.choice(["any", "deep", "chain", "star"]))
        if logits:
            worst = max(worst, texts.error(tree))
        else:
            texts._tree = tree
            texts.target.verify(tree)
        texts.commit([rng.choice([None, 0, size - 1, rng.randrange(size)]) for size in sizes])
        states = max(states, texts.state_error())
        if rng.random() < 0.3:
            texts.target.cache.recurrent.fold()
    return worst, states
