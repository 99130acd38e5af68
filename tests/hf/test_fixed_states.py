"""Recurrent layers in device rounds: buffers hold what a fresh pass over the committed text would leave.

Device rounds run ahead of what the host has read and fold at the beginning of the next round, so states are compared
as they would be after a fold, with the text that the program itself holds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, drafters, kv, ops, trees
from specdec.errors import UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf.fixed_states import FixedStates
from specdec.hf.round_program import RoundProgram
from tests import helpers
from tests.hf.device_runs import generator, oracle, serve
from tests.hf.hybrid import EXACT, HYBRID, PLAIN, States, difference, exact, plain_cache, recurrent

NEW = 20


def request(prompts: str, **options: Any) -> dict[str, Any]:
    return {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, **options}


def program(served: SpeculativeGenerator) -> RoundProgram:
    kept = served._programs._program
    assert kept is not None
    return kept


def held(states: FixedStates) -> States:
    """What the buffers of all layers would hold after a fold; they are left as they are."""
    found = []
    for place in range(states.state.shape[0]):
        history, state = states.history[place].clone(), states.state[place].clone()
        ops.conv_fold(history, states.path[0][place], states.counts)
        ops.gated_delta_fold(state, ops.DeltaRecord(*(part[place] for part in states.path[1:])), states.counts)
        found.append((history, state))
    return found


def state_error(target: Any, made: RoundProgram, prompts: str) -> float:
    """Largest difference, over the rows, from a fresh pass over the program's text without its last token."""
    assert made.cache.recurrent is not None
    found, worst, width = held(made.cache.recurrent), 0.0, helpers.START[prompts]
    for row, prompt in enumerate(helpers.PROMPTS[prompts]):
        length = int(made.state.lengths[row])
        text = made.state.tokens[row, width - len(prompt) : length - 1].tolist()
        worst = max(worst, difference(found, row, recurrent(plain_cache(target, text))))
    return worst


def errors(family: str, prompts: str, *, new: int = NEW, **parts: Any) -> list[float]:
    """Errors of the states after each round that was launched, and a check that the text is that of plain decoding."""
    target = helpers.model(family)
    reference, found = helpers.plain(target, **request(prompts, max_new_tokens=new)), []
    launch = RoundProgram.launch
    with pytest.MonkeyPatch.context() as patch:

        def launched(self: RoundProgram) -> None:
            launch(self)
            found.append(state_error(target, self, prompts))

        patch.setattr(RoundProgram, "launch", launched)
        made = serve(generator(target, **parts), oracle(reference), **request(prompts, max_new_tokens=new))
    assert made.output.tolist() == reference.tolist()
    assert made.kinds >= {"partial", "zero", "empty"}
    return found


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_after_every_round_states_equal_a_fresh_pass(family, prompts):
    """Rounds that accept all, some or none, and rounds without drafts; rows of a batch each for themselves."""
    helpers.model(family)
    with exact():
        found = errors(family, prompts, cache=kv.KVCacheConfig(states=torch.float64), new=14)
    assert len(found) > 5
    assert max(found) <= EXACT


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_states_in_float32_are_those_of_transformers(family):
    assert max(errors(family, "ragged")) <= PLAIN


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_states_in_float16(prompts):
    """Half the size, and rounded once a round: near the states of transformers, and not equal to them."""
    served = generator(helpers.model("qwen3_5"), cache=kv.KVCacheConfig(states=torch.float16))
    reference = helpers.plain(served.model, **request(prompts))
    made = serve(served, oracle(reference), **request(prompts))
    states = program(served).cache.recurrent
    assert states is not None
    assert states.state.dtype == torch.float16
    assert {part.dtype for part in states.path[1:]} == {torch.float64, torch.float32}, "keys as the model, else wide"
    scale = float(states.state.abs().max())
    error = state_error(served.model, program(served), prompts)
    assert 1e-6 * scale < error < 3e-3 * scale
    assert made.output.tolist() == reference.tolist()
    assert made.kinds >= {"partial", "zero", "empty"}


def given_up(prompts: str) -> SpeculativeGenerator:
    """A program whose last request was given up while rounds were on their way that nobody will read."""
    served = generator(helpers.model("qwen3_next"))
    rounds = served.rounds(**request(prompts, max_new_tokens=12), do_sample=False, pad_token_id=0)
    next(rounds), next(rounds)
    rounds.close()
    states = program(served).cache.recurrent
    assert states is not None
    assert bool((states.counts > 0).all())
    return served


def second(served: SpeculativeGenerator, prompts: list[list[int]]) -> None:
    """Another request through the same program; its text is that of plain decoding."""
    asked, first = {**helpers.batch(prompts), "max_new_tokens": 12}, program(served)
    output = served.generate(**asked, do_sample=False, pad_token_id=0)
    assert program(served) is first
    assert output.tolist() == helpers.plain(served.model, **asked).tolist()


def test_the_program_serves_other_requests_and_other_padding():
    """Nothing of the first is left, not even a path that was kept and not folded."""
    served = given_up("ragged")
    for prompts in ([helpers.FOUR[row] for row in (2, 0, 3, 1)], [[7, 8], [3], [4, 5], [9, 1]]):
        second(served, prompts)


def test_a_path_of_the_request_before_is_noticed(monkeypatch):
    """`load` must forget it: the counts go back to none."""

    def loaded(self: FixedStates, layers: Any) -> None:
        for place, layer in enumerate(layers):
            layer.fold()
            self.history[place], self.state[place] = layer.history, layer.state

    served = given_up("one")
    monkeypatch.setattr(FixedStates, "load", loaded)
    with pytest.raises(AssertionError):
        second(served, [[40, 41, 90, 42, 91]])


def test_texts_that_outgrow_the_buffers(monkeypatch):
    """Keys grow with the text, states do not."""
    monkeypatch.setattr(cache_module, "GROWTH", 8)
    served, sizes = generator(helpers.model("qwen3_5")), set()
    for new in (6, 60):
        asked = {**helpers.batch(helpers.ONE), "max_new_tokens": new}
        reference = helpers.plain(served.model, **asked)
        made = serve(served, oracle(reference), **asked)
        assert made.output.tolist() == reference.tolist()
        assert state_error(served.model, program(served), "one") <= PLAIN
        states = program(served).cache.recurrent
        assert states is not None
        sizes.add(sum(part.numel() for part in states.buffers))
    assert len(sizes) == 1
    assert program(served).cache.stacks[0].slots > 60


def test_drafts_looked_up_in_the_text():
    """No oracle: the drafts that device rounds make themselves."""
    target = helpers.model("qwen3_5")
    asked = {**helpers.batch([[5, 6, 7, 5, 6, 7, 5, 6]] * 2), "max_new_tokens": 24}
    made = serve(generator(target, tree=trees.BestFirst(nodes=7)), **asked)
    assert made.output.tolist() == helpers.plain(target, **asked).tolist()
    assert made.generator.stats.drafted > 0


def test_a_hybrid_draft_model_is_refused_by_its_reason():
    """On the device; the host serves it."""
    target, draft = helpers.model("qwen3_5"), drafters.ModelDrafter(helpers.model("qwen3_next"))
    asked = {**request("one"), "do_sample": False, "pad_token_id": 0}
    with (
        helpers.forwards(target) as calls,
        pytest.raises(UnsupportedError, match="recurrent layers drafts on"),
    ):
        generator(target, drafter=draft, tree=trees.Chain(3)).generate(**asked)
    assert calls == []


# ------------------------------------------------------------------------------------------------------------ mutants


def _path_is_not_folded(patch: pytest.MonkeyPatch) -> None:
    keep = FixedStates.keep
    patch.setattr(FixedStates, "keep", lambda self, nodes, counts: keep(self, nodes, torch.zeros_like(counts)))


def _siblings_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The first rows of the tree, whoever was accepted."""
    keep = FixedStates.keep
    patch.setattr(
        FixedStates,
        "keep",
        lambda self, nodes, counts: keep(self, torch.arange(nodes.shape[1]).expand_as(nodes).contiguous(), counts),
    )


def _counts_are_one_off(patch: pytest.MonkeyPatch) -> None:
    keep = FixedStates.keep
    patch.setattr(FixedStates, "keep", lambda self, nodes, counts: keep(self, nodes, (counts - 1).clamp_min(0)))


def _one_path_for_all_layers(patch: pytest.MonkeyPatch) -> None:
    keep = FixedStates.keep

    def kept(self: FixedStates, nodes: Tensor, counts: Tensor) -> None:
        keep(self, nodes, counts)
        for part in self.path:
            part.copy_(part[:1].clone().expand_as(part))

    patch.setattr(FixedStates, "keep", kept)


def _records_are_read_late(patch: pytest.MonkeyPatch) -> None:
    """The path is the record of the round before that."""
    keep = FixedStates.keep
    late: dict[FixedStates, list[Tensor]] = {}

    def kept(self: FixedStates, nodes: Tensor, counts: Tensor) -> None:
        now = [part.clone() for part in self.recorded]
        for part, old in zip(self.recorded, late.get(self, now), strict=True):
            part.copy_(old)
        late[self] = now
        keep(self, nodes, counts)

    patch.setattr(FixedStates, "keep", kept)


MUTANTS = [
    _path_is_not_folded,
    _siblings_are_kept,
    _counts_are_one_off,
    _one_path_for_all_layers,
    _records_are_read_late,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_wrong_states_are_noticed(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    """By the states and by the text."""
    target, reference = helpers.model("qwen3_next"), helpers.text("one", NEW, "qwen3_next")
    assert serve(generator(target), oracle(reference), **request("one")).output.tolist() == reference.tolist()
    mutate(monkeypatch)
    made = serve(generator(target), oracle(reference), **request("one", max_new_tokens=8))
    assert state_error(target, program(made.generator), "one") > 1e-2
    assert serve(generator(target), oracle(reference), **request("one")).output.tolist() != reference.tolist()
