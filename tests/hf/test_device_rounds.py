"""Device rounds give the tokens of plain `model.generate`, on a CPU step by step: families, windows, codecs, prompts.

An oracle makes every run contain full, partial and zero acceptance and rounds without drafts; with drafts looked up in
the text, seeds are such that they contain them too. The mutants at the end show that a wrong round is noticed.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, drafters, kv, ops, trees
from specdec.errors import ShapeError, UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf import device_rounds, fixed_cache
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.round_context import RoundContext
from specdec.testing import FAMILIES, table_model
from tests import helpers
from tests.hf.device_runs import REFUSED, SERVED, deepest, generator, oracle, serve

NEW, SHORT = 24, 12
SLIDING = ["mistral", "phi3", "gemma3", "gemma4", "gpt_oss"]
LOOKUP_SEEDS = {"gpt2": 3}
"""Seeds whose text repeats itself now and then, where that of `helpers` does not."""


def run(family: str, prompts: str, **options: Any) -> helpers.Run:
    return serve(
        helpers.model(family),
        oracle(helpers.text(prompts, NEW, family)),
        **{**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, **options},
    )


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_greedy_tokens_equal_plain_generate(family: str, prompts: str) -> None:
    helpers.assert_equal(run(family, prompts), helpers.text(prompts, NEW, family))


@pytest.mark.parametrize(
    ("family", "prompts"),
    [("llama", "one"), ("mistral", "one"), ("gpt2", "ragged"), ("gemma3", "ragged")],
)
def test_greedy_tokens_with_drafts_looked_up_in_the_text(family: str, prompts: str) -> None:
    seed = {"seed": LOOKUP_SEEDS[family]} if family in LOOKUP_SEEDS else {}
    target = helpers.model(family, **seed)
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 56}
    reference = helpers.plain(target, **request)
    helpers.assert_equal(serve(generator(target, tree=trees.BestFirst(nodes=7)), **request), reference)
    assert any(len(set(itertools.pairwise(row))) > 8 for row in reference[:, -56:].tolist()), "the text is a loop"


def test_every_family_is_served_or_refused_with_its_reason() -> None:
    assert sorted([*SERVED, *REFUSED]) == sorted(FAMILIES)
    for family, reason in REFUSED.items():
        target = helpers.model(family)
        request = {**helpers.batch(helpers.ONE), "max_new_tokens": 4, "do_sample": False}
        with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=reason):
            generator(target).generate(**request)
        assert calls == []


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far windows were moved, each time that they were."""
    moved: list[int] = []
    fits = FixedCache.fits

    def watched(self: FixedCache, shortest: int, longest: int) -> bool:
        before = [stack.base for stack in self.stacks]
        answer = fits(self, shortest, longest)
        moved.extend(stack.base - base for stack, base in zip(self.stacks, before, strict=True) if stack.base > base)
        return answer

    monkeypatch.setattr(FixedCache, "fits", watched)
    return moved


@pytest.mark.parametrize(("family", "draft"), [("gemma3", "lookup"), ("mistral", "oracle")])
def test_a_window_moves_on_in_a_long_text(family: str, draft: str, shifts: list[int]) -> None:
    """The buffer of a window has room for 280 slots and those of the tree."""
    prompt = torch.randint(2, 97, (1, 230), generator=torch.Generator().manual_seed(1))
    request = {"input_ids": prompt, "max_new_tokens": 85}
    reference = helpers.plain(helpers.model(family), **request)
    run = serve(helpers.model(family), oracle(reference) if draft == "oracle" else None, **request)
    helpers.assert_equal(run, reference)
    assert shifts, "no window was moved"


@pytest.mark.parametrize(("family", "prompts"), [*((family, "one") for family in SLIDING), ("gemma3", "ragged")])
def test_a_window_moves_on_again_and_again(
    family: str, prompts: str, shifts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_cache, "GROWTH", 0)
    helpers.assert_equal(run(family, prompts), helpers.text(prompts, NEW, family))
    assert (len(shifts) >= 1) == (prompts == "one"), "only a single row is held to its window"


def test_rows_that_advance_in_turns_do_not_use_up_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is counted by row: the longest commitments of all rounds belong to no row."""
    monkeypatch.setattr(cache_module, "GROWTH", 4)
    prompts = helpers.batch(helpers.FOUR[:2])
    reference = helpers.plain(helpers.model(), **prompts, max_new_tokens=60)
    draft = oracle(reference, [[9, 0], [0, 9]])
    helpers.assert_equal(serve(helpers.model(), draft, **prompts, max_new_tokens=60), reference, all_kinds=False)


CODES = {
    "INT8_INT4": kv.KVCacheConfig(keys=kv.Hadamard(kv.Int8()), values=kv.Int4(group=4)),
    "INT4": kv.KVCacheConfig(keys=kv.Centered(kv.Hadamard(kv.Int4(group=8))), values=kv.Int4(group=8)),
    "NVFP4": kv.KVCacheConfig(keys=kv.Hadamard(kv.NVFP4()), values=kv.NVFP4()),
}
"""For heads that are smaller than the groups of the presets."""


@pytest.mark.parametrize(
    ("preset", "family", "prompts"),
    [
        ("INT8", "llama", "ragged"),
        ("FP8_INT8", "llama", "one"),
        ("INT8_INT4", "llama", "ragged"),
        ("INT4", "gemma3", "ragged"),
        ("INT4", "gpt_oss", "one"),
        ("NVFP4", "llama", "ragged"),
        ("INT8", "gemma3", "one"),
    ],
)
def test_codecs_give_the_tokens_of_rounds_on_the_host(family: str, prompts: str, preset: str) -> None:
    codecs = CODES[preset] if preset in CODES else getattr(kv, preset)
    target = helpers.model(family, head_dim=16)
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW}
    host = helpers.speculate(
        target,
        drafters.PromptLookupDrafter(),
        trees.BestFirst(nodes=7),
        codecs=codecs,
        attention="reference",
        **request,
    )
    assert host.output.tolist() != helpers.plain(target, **request).tolist() or preset not in ("INT4", "NVFP4"), (
        "a code without loss"
    )
    device = serve(generator(target, cache=codecs), oracle(host.output), **request)
    helpers.assert_equal(device, host.output)


def _chunks(request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "prefill_chunk_size": 4}


def _embeds(request: dict[str, Any]) -> dict[str, Any]:
    return {"inputs_embeds": helpers.model("gemma3").get_input_embeddings()(request["input_ids"]).detach()}


def _positions(request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "position_ids": torch.arange(request["input_ids"].shape[1])[None] + 5}


def _continued(request: dict[str, Any]) -> dict[str, Any]:
    before = helpers.plain(helpers.model("gemma3"), **request, max_new_tokens=12, return_dict_in_generate=True)
    return {"input_ids": before.sequences, "cache": before.past_key_values}


@pytest.mark.parametrize("made", [_chunks, _embeds, _positions, _continued])
def test_prompts_of_every_form(made: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    target, request = helpers.model("gemma3"), made({"input_ids": torch.tensor(helpers.ONE)})
    reference = helpers.plain(target, **copy.deepcopy(request), max_new_tokens=40)
    helpers.assert_equal(serve(target, oracle(reference), **copy.deepcopy(request), max_new_tokens=40), reference)


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_drafts_end_at_the_model_s_last_position(prompts: str) -> None:
    """Texts may outgrow the positions; drafts do not."""
    target = helpers.model(max_position_embeddings=helpers.START[prompts] + 12)
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW}
    reference = helpers.plain(target, **request)
    run = serve(target, oracle(reference), **request)
    helpers.assert_equal(run, reference)
    position = torch.tensor([len(prompt) - 1 for prompt in helpers.PROMPTS[prompts]])
    for round in run.rounds:
        allowed = (target.config.max_position_embeddings - 1 - position).clamp_min(0)
        assert (deepest(round) <= allowed).all()
        position = position + round.num_committed
    assert (allowed == 0).any()


@pytest.mark.parametrize(("prompts", "draft"), [("one", "other"), ("ragged", "same")])
def test_a_draft_model_drafts_on_the_device(prompts: str, draft: str) -> None:
    target = helpers.model("gemma3")
    drafter = drafters.ModelDrafter(target if draft == "same" else helpers.model("llama"))
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": SHORT}
    run = serve(generator(target, drafter=drafter, tree=trees.Chain(4)), **request)
    helpers.assert_equal(run, helpers.text(prompts, SHORT, "gemma3"), all_kinds=False)
    assert (run.generator.stats.acceptance_rate > 0.9) == (draft == "same")


@pytest.mark.parametrize("ids", [64, 128])
def test_a_draft_model_may_have_ids_beyond_the_tokenizer(ids: int) -> None:
    """Models of one tokenizer are padded differently: what the other does not know is neither proposed nor run."""
    target, drafter = helpers.model(), drafters.ModelDrafter(helpers.model(vocab_size=ids))
    served = generator(target, drafter=drafter, tree=trees.Chain(4))
    run = serve(served, **helpers.batch(helpers.FOUR), max_new_tokens=SHORT)
    helpers.assert_equal(run, helpers.text("ragged", SHORT), all_kinds=False)
    proposed = torch.cat([round.tree.tokens[:, 1:][round.tree.valid[:, 1:]] for round in run.rounds])
    assert proposed.max() < min(ids, 97)
    assert helpers.text("ragged", SHORT).max() >= 64, "no token that the smaller model does not know"


def test_ties_fall_as_in_plain_generate() -> None:
    """Plain generate compares logits in float32, and the first of equal ones wins."""
    law = torch.full((12, 12), 0.01, dtype=torch.float64)
    for token in range(12):
        law[token, (5 * token + 2) % 11], law[token, 11] = 0.4, 0.4 * (1 + 1e-12)
    target = table_model(law.float())
    with torch.no_grad():
        target.lm_head.weight.copy_(law.log().T / 12**0.5)
    prompt = torch.tensor([[0, 2, 1]])
    assert target(prompt).logits.argmax(-1).tolist() == [[11, 11, 11]]
    reference = helpers.plain(target, input_ids=prompt, max_new_tokens=NEW)
    assert 11 not in reference
    helpers.assert_equal(serve(target, oracle(reference), input_ids=prompt, max_new_tokens=NEW), reference)


def _in_place(patch: pytest.MonkeyPatch) -> None:
    keep = FixedCache.keep

    def in_place(self: FixedCache, nodes: Tensor, counts: Tensor) -> None:
        keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)

    patch.setattr(FixedCache, "keep", in_place)


def _context(change: Callable[..., dict[str, Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        run = RoundContext.run

        def other(self: Any, forward: Any, tokens: Tensor, *rest: Any) -> Any:
            *tensors, features = rest
            given = dict(zip(("positions", "visible", "depths", "cached"), tensors, strict=True))
            return run(self, forward, tokens, **{**given, **change(**given)}, features=features)

        patch.setattr(RoundContext, "run", other)

    return mutate


def _by_row(positions: Tensor, depths: Tensor, **_: Tensor) -> dict[str, Tensor]:
    return {"positions": positions - depths + torch.arange(depths.shape[1])}


def _siblings(visible: Tensor, **_: Tensor) -> dict[str, Tensor]:
    causal = (2 << torch.arange(visible.shape[1])) - 1
    return {"visible": causal[:, None].expand_as(visible)}


def _late(cached: Tensor, **_: Tensor) -> dict[str, Tensor]:
    return {"cached": cached - 1}


def _shallow(depths: Tensor, **_: Tensor) -> dict[str, Tensor]:
    return {"depths": torch.zeros_like(depths)}


def _padding_visible(patch: pytest.MonkeyPatch) -> None:
    begin = FixedCache.begin

    def unpadded(self: FixedCache, *call: Any) -> None:
        self.starts = None
        begin(self, *call)

    patch.setattr(FixedCache, "begin", unpadded)


def _no_windows(patch: pytest.MonkeyPatch) -> None:
    store = FixedCache.store
    patch.setattr(FixedCache, "store", lambda self, *call: (*store(self, *call)[:3], None))


def _everything_agrees(patch: pytest.MonkeyPatch) -> None:
    accept = ops.accept_tree

    def drunk(tokens: Tensor, parents: Tensor, num_nodes: Tensor, visible: Tensor, depths: Tensor, *rest: Any) -> Any:
        chosen = rest[0].clone()
        for node in range(tokens.shape[1] - 1, 0, -1):
            above = parents[:, node].clamp_min(0)[:, None]
            chosen.scatter_(
                1, above, torch.where(parents[:, node] < 0, chosen.gather(1, above)[:, 0], tokens[:, node])[:, None]
            )
        return accept(tokens, parents, num_nodes, visible, depths, chosen, *rest[1:])

    patch.setattr(ops, "accept_tree", drunk)


def _one_window_for_all_heights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fixed_cache, "GROWTH", 0)
    fits = FixedCache.fits
    patch.setattr(FixedCache, "fits", lambda self, _, longest: fits(self, longest, longest))


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "the accepted path is not moved": (_in_place, "llama", "ragged"),
    "positions by row, not by depth": (_context(_by_row), "llama", "ragged"),
    "siblings see each other": (_context(_siblings), "llama", "ragged"),
    "a slot too early": (_context(_late), "llama", "ragged"),
    "windows without depths": (_context(_shallow), "gemma3", "ragged"),
    "padding is visible": (_padding_visible, "llama", "ragged"),
    "windows are ignored": (_no_windows, "gemma3", "ragged"),
    "drafts are believed": (_everything_agrees, "llama", "one"),
    "a window moves as if rounds on their way had ended": (_one_window_for_all_heights, "gemma3", "one"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_round_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, family, prompts = MUTANTS[name]
    expected = helpers.text(prompts, NEW, family).tolist()
    mutate(monkeypatch)
    try:
        output = run(family, prompts).output.tolist()
    except ShapeError:  # the check of lengths by `ops.tree_attention`
        return
    assert output != expected


def test_the_public_generator_goes_the_same_way() -> None:
    """`generate`, `rounds` and `attach`, without what these tests reach into."""
    target, request = helpers.model(), {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW, "do_sample": False}
    served = SpeculativeGenerator(target, execution="device")
    expected = helpers.text("ragged", NEW).tolist()
    assert served.generate(**request).tolist() == expected
    assert served._programs._program is not None
    assert sum(int(round.num_committed.sum()) for round in served.rounds(**request)) == 4 * NEW
    with served.attach():
        assert target.generate(**request).tolist() == expected
    assert isinstance(served._programs, device_rounds.Programs)
