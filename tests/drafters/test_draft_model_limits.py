"""The model drafter at the end of its positions, in other types, and beside a second one (field log, E14, F7, F10)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdec import SpeculativeGenerator, trees
from specdec.drafters import ModelDrafter
from specdec.errors import UnsupportedError
from specdec.testing import tiny_model
from specdec.types import Round
from tests import helpers
from tests.drafters.draft_models import FOUR, ONE, SHAPES, assert_never_wrong, like, reference, run


def shorter(family: str, positions: int) -> PreTrainedModel:
    """The tiny model of a family, built for fewer positions, with the same weights otherwise."""
    target = helpers.model(family)
    names = ["n_positions", "max_position_embeddings"] if family == "gpt2" else ["max_position_embeddings"]
    model = tiny_model(family, **dict.fromkeys(names, positions))
    weights = {
        name: weight[: model.state_dict()[name].shape[0]] if name.endswith("wpe.weight") else weight
        for name, weight in target.state_dict().items()
    }
    model.load_state_dict(weights)
    return model


@contextmanager
def positions_seen(model: PreTrainedModel) -> Iterator[list[int]]:
    """Position ids of every forward; the largest of each."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


LONG = [list(range(3, 43)), [5, 6, 7]]
OVERFLOW = [
    ("gpt2", "stop"),
    ("gpt2", "window"),
    ("llama", "stop"),
    ("llama", "window"),
    ("llama", "extend"),
]


@pytest.mark.parametrize(("family", "overflow"), OVERFLOW)
@pytest.mark.parametrize("rows", [LONG[:1], LONG, [LONG[1], LONG[1][::-1]]], ids=["long", "both", "short"])
@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_e14_a_drafter_with_32_positions(family, overflow, rows, shape, caplog):
    """Reads beyond a table of positions, at the start (a prompt of 40) or later (34 tokens after a prompt of 3)."""
    target, draft = helpers.model(family), shorter(family, 32)
    drafter = ModelDrafter(draft, overflow=overflow)
    with positions_seen(draft) as seen, caplog.at_level(logging.WARNING):
        output, rounds = run(target, drafter, SHAPES[shape], rows, max_new_tokens=40)
        if shape == "chain":  # a second call warns no more
            run(target, drafter, SHAPES[shape], rows, max_new_tokens=20)
    assert output.tolist() == reference(target, rows, 40)
    warnings = [record.message for record in caplog.records if "positions" in record.message]
    beyond = [round for round in rounds if bool((lengths_before(rows, rounds, round) > 34).all())]
    accepted = sum(int(round.num_accepted.sum()) for round in beyond)
    drafted = sum(int((round.tree.num_nodes - 1).sum()) for round in beyond)
    if overflow == "extend":
        assert max(seen) > 32
        assert not warnings
        assert accepted > 0, "the same weights: nothing is ever rejected"
        return
    assert max(seen, default=0) < 32
    assert len(warnings) == 1
    action = {"stop": "stops drafting", "window": "a window of recent tokens"}[overflow]
    assert action in warnings[0]
    assert (drafted > 0) == (overflow == "window")
    if rows is LONG[:1] and overflow == "stop":
        assert not seen


def lengths_before(rows: Sequence[Sequence[int]], rounds: list[Round], round: Round) -> Tensor:
    """Committed tokens per row when a round was drafted."""
    lengths = torch.tensor([len(row) for row in rows])
    return lengths + sum(earlier.num_committed for earlier in rounds[: round.index])


def test_e14_rows_with_positions_left_go_on_when_others_have_none():
    target, draft = helpers.model("gpt2"), shorter("gpt2", 32)
    _, rounds = run(target, ModelDrafter(draft), trees.Chain(3), LONG, max_new_tokens=20)
    assert all(int(round.tree.num_nodes[0]) == 1 for round in rounds)
    assert_never_wrong(rounds)
    assert sum(int(round.num_accepted[1]) for round in rounds) > 10


def test_e14_a_drafter_that_has_stopped_runs_nothing():
    target, draft = helpers.model("gpt2"), shorter("gpt2", 32)
    with helpers.forwards(draft) as calls:
        run(target, ModelDrafter(draft), trees.Chain(3), LONG[1:], max_new_tokens=28)
        before = len(calls)
        run(target, ModelDrafter(draft), trees.Chain(3), LONG[1:], max_new_tokens=60)
    assert 0 < len(calls) - before <= before + 3, "30 more tokens, no more passes than up to the last position"


@pytest.mark.parametrize("family", ["gpt2", "biogpt", "opt", "gptj"])
def test_e14_a_table_of_positions_cannot_be_extended(family):
    made = {
        "gpt2": lambda: helpers.model("gpt2"),
        "opt": lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=97,
                hidden_size=16,
                ffn_dim=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                word_embed_proj_dim=16,
                max_position_embeddings=32,
            )
        ),
        "biogpt": lambda: transformers.BioGptForCausalLM(
            transformers.BioGptConfig(
                vocab_size=97,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=32,
            )
        ),
        "gptj": lambda: transformers.GPTJForCausalLM(
            transformers.GPTJConfig(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=32, rotary_dim=4)
        ),
    }[family]()
    with pytest.raises(UnsupportedError, match=r"extend.*a table of (32|512) rows"):
        ModelDrafter(made, overflow="extend")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_e14_the_target_never_runs_a_position_beyond_its_limit(family, shape):
    """Limit 64, prompt 50, 14 new tokens, deep trees: no position from 64 on."""
    target = shorter(family, 64)
    deep = {"chain": trees.Chain(8), "best first": trees.BestFirst(nodes=20, branch=2, depth=8)}.get(
        shape, SHAPES[shape]
    )
    rows = [list(range(3, 53)), [7, 8, 9]]
    for prompts in (rows, rows[:1]):
        with positions_seen(target) as seen:
            output, rounds = run(target, ModelDrafter(helpers.model(family)), deep, prompts, max_new_tokens=14)
        assert output.tolist() == reference(target, prompts, 14)
        assert max(seen) < 64
        assert_never_wrong(rounds)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def near_tie(target: PreTrainedModel, ids: Tensor, prompt: int) -> None:
    """Every produced token has the largest logit of one pass over the text, or one within rounding of it."""
    with torch.no_grad():
        logits = target(ids).logits[:, prompt - 1 : -1].float()
    gap = logits.max(-1).values - logits.gather(-1, ids[:, prompt:, None]).squeeze(-1)
    # Two passes differ by some units in the last place, whatever decodes.
    assert float(gap.max()) <= 16 * torch.finfo(target.dtype).eps * float(logits.abs().max())


@pytest.mark.parametrize("target_type", DTYPES)
@pytest.mark.parametrize("draft_type", DTYPES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_f7_dtypes_of_target_and_draft_are_independent(target_type, draft_type, sampled):
    """A clash between two configurations' types."""
    target = helpers.model("llama", dtype=DTYPES[target_type])
    draft = like("llama", dtype=DTYPES[draft_type])
    tree = trees.Sampled((2, 1, 1)) if sampled else SHAPES["best first"]
    chance = torch.Generator().manual_seed(0)
    output, rounds = run(target, ModelDrafter(draft), tree, "one", do_sample=sampled, generator=chance)
    assert any(int(round.tree.width) > 1 for round in rounds)
    assert sum(int(round.num_accepted.sum()) for round in rounds) > 0
    if not sampled:
        near_tie(target, output, len(ONE[0]))
        if target_type == "fp32":
            assert output.tolist() == reference(target, "one")


def test_f10_two_drafters_of_one_model_share_nothing_and_change_no_configuration():
    """Two speculators share one parameter object; the first changes it for the second."""
    target, draft = helpers.model(), like("llama")
    before = [model.config.to_dict() for model in (target, draft)]
    settings = [model.generation_config.to_dict() for model in (target, draft)]
    attributes = [set(vars(model)) for model in (target, draft)]
    first, second = ModelDrafter(draft, temperature=0.5), ModelDrafter(draft, overflow="window")
    alone, _ = run(target, ModelDrafter(draft), SHAPES["fixed"], "ragged")
    # Two requests at once, interleaved round by round.
    generators = [SpeculativeGenerator(target, drafter, SHAPES["fixed"]) for drafter in (first, second)]
    request = {**helpers.batch(FOUR), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    committed: list[list[Round]] = [[], []]
    streams = [generator.rounds(**request) for generator in generators]
    for pair in zip(*streams, strict=False):
        for rounds, round in zip(committed, pair, strict=True):
            rounds.append(round)
    for rounds, stream in zip(committed, streams, strict=True):
        rounds.extend(stream)
    for rounds in committed:
        texts = [[] for _ in FOUR]
        for round in rounds:
            for row, count in enumerate(round.num_committed.tolist()):
                texts[row] += round.committed[row, :count].tolist()
        assert texts == alone[:, 17:].tolist()
    assert [model.config.to_dict() for model in (target, draft)] == before
    assert [model.generation_config.to_dict() for model in (target, draft)] == settings
    assert [set(vars(model)) for model in (target, draft)] == attributes
