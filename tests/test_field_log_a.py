"""Field log, class (a), where text ends: stops and limits inside a block, and the positions the target is given.

Nothing that plain decoding does per token may be done per round. Each test is named after its row of the log. The
oracle knows the text without any stop, so that blocks run past every end.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig

from specdec import SpeculativeGenerator, drafters, trees
from specdec.protocols import DraftContext
from specdec.testing import OracleDrafter
from specdec.testing.tokenizer import tiny_tokenizer
from specdec.trees import topology
from specdec.types import Candidates, Frontier
from tests import helpers

TREES = {
    "chain": (trees.Chain(6), 0),
    "tree": (trees.Fixed([(0,), (1,), (1, 0), (1, 1), (1, 1, 1), (1, 1, 1, 1), (0, 0), (0, 1)]), 1),
}
START = helpers.START["one"]


def text(prompts: str, tokens: int = 16) -> Tensor:
    return helpers.text(prompts, tokens)


def perfect(prompts: str, rank: int = 0) -> OracleDrafter:
    return OracleDrafter(text(prompts, 24), [9], rank=rank)


def check(drafter: Any, tree: Any, *, prompts: str = "one", **request: Any) -> helpers.Run:
    """Equal to plain generate: ids, streamed tokens and the number of scores."""
    request = {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": 16, **request}
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = helpers.plain(helpers.model(), **request, **details)
    tape = helpers.Tape()
    run = helpers.speculate(helpers.model(), drafter, tree, **request, **details, streamer=tape)
    assert run.output.sequences.tolist() == expected.sequences.tolist()
    new = expected.sequences[:, request["input_ids"].shape[1] :]
    assert tape.tokens == new.T.tolist()
    assert tape.ends == 1
    assert len(run.output.scores) == len(run.output.logits) == new.shape[1]
    return run


def test_a1_positions_of_chains_and_trees_follow_from_the_committed_length():
    """A position counter that is carried along goes wrong after the first rejection."""
    target, reference = helpers.model(), text("one", 64)
    for tree, rank in TREES.values():
        drafter = OracleDrafter(reference, [5, 0, 3, 1, 4, 0], rank=rank)
        request = {**helpers.batch(helpers.ONE), "max_new_tokens": 64}
        with helpers.forwards(target) as calls:
            run = helpers.speculate(target, drafter, tree, **request)
        assert run.output.tolist() == reference.tolist()
        for call, round in zip(calls[1:], run.rounds[1:], strict=True):
            committed = START + sum(int(earlier.num_committed) for earlier in run.rounds[: round.index])
            expected = committed - 1 + topology.depths(round.tree.parents)
            assert call["position_ids"].tolist() == expected.tolist()


EOS = {"first": lambda ids: ids[0], "second": lambda ids: ids[1], "fourth": lambda ids: ids[3]}
EOS["list"] = lambda ids: [96, ids[3]]
EOS["tensor"] = lambda ids: torch.tensor([96, ids[3]])
EOS["several"] = lambda ids: [ids[12], ids[7], ids[5]]


@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("shape", TREES)
def test_a2_eos_inside_the_accepted_block_ends_the_text(eos, shape):
    """The stop test looked at the last token of a block only, or compared a list of ids as one."""
    tree, rank = TREES[shape]
    ids = EOS[eos](text("one")[0, START:].tolist())
    run = check(perfect("one", rank), tree, eos_token_id=ids)
    sequence = run.output.sequences[0]
    assert int(sequence[-1]) in torch.as_tensor(ids).flatten().tolist()
    assert run.output.cache.get_seq_length() == sequence.shape[0] - 1


@pytest.mark.parametrize("shape", TREES)
def test_a2_eos_ends_each_row_of_a_batch_at_its_own_token(shape):
    """One stop decision was made for the whole batch."""
    tree, rank = TREES[shape]
    new = text("ragged")[:, -16:]
    eos = [int(new[0, 2]), int(new[1, 9]), int(new[2, 0])]
    run = check(helpers.oracle(text("ragged", 24), rank=rank), tree, prompts="ragged", eos_token_id=eos)
    ends = [run.generator.stats.row(row).new_tokens for row in range(4)]
    assert len(set(ends)) > 2


def test_a2_the_drafter_learns_exactly_the_committed_tokens():
    """After a stop inside a block, a drafter's own context kept the rest of the block."""

    class Listener(OracleDrafter):
        heard: list[int]

        def start(self, context: DraftContext) -> None:
            super().start(context)
            self.heard = context.tokens[0].tolist()

        def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
            super().commit(tokens, counts, features)
            self.heard += tokens[0, : int(counts)].tolist()

    drafter = Listener(text("one", 24), [2, 9])
    run = check(drafter, trees.Chain(6), eos_token_id=int(text("one")[0, START + 9]))
    assert drafter.heard == run.output.sequences[0].tolist()


def test_a2_eos_in_the_prompt_or_beside_the_path_stops_nothing():
    """Only committed tokens may stop a row: drafted EOS tokens that are rejected, or those of the prompt, may not."""
    wrong = (text("one")[0, START + 2] + 1) % 97
    run = check(OracleDrafter(text("one", 24), [1, 0]), trees.Chain(6), eos_token_id=[int(wrong), helpers.ONE[0][1]])
    assert run.output.sequences.shape[1] == START + 16
    assert any(int(wrong) in round.tree.tokens[0, 1:].tolist() for round in run.rounds)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
@pytest.mark.parametrize("drafter", ["oracle", "lookup"])
def test_a4_never_more_tokens_than_asked(limit, prompts, drafter):
    """Prompt lookup committed whole blocks past the length limit."""
    looping = {"input_ids": torch.tensor([[5, 6, 7] * 4] * 2)} if prompts == "ragged" else {}
    source = perfect(prompts) if drafter == "oracle" else drafters.PromptLookupDrafter()
    request = looping if drafter == "lookup" and looping else {}
    if request:
        request["attention_mask"] = torch.ones_like(request["input_ids"])
    run = check(source, trees.Chain(6), prompts=prompts, max_new_tokens=limit, **request)
    assert len(run.output.scores) == limit


def test_a4_max_length_and_config_limits_count_the_same():
    """A limit that comes as `max_length` or in the generation config was not seen by the block."""
    for request in ({"max_length": 14}, {"generation_config": GenerationConfig(max_length=14, pad_token_id=0)}):
        run = helpers.speculate(
            helpers.model(), perfect("one"), trees.Chain(6), **helpers.batch(helpers.ONE), **request
        )
        assert run.output.tolist() == text("one", 5).tolist()


def test_a5_a_prompt_at_the_limit_raises_as_in_transformers():
    """The bonus token was primed before the limit test, so a full prompt still got one token."""
    request = {**helpers.batch(helpers.ONE), "max_length": START}
    with pytest.raises(ValueError, match="Input length of input_ids is 9") as plain:
        helpers.plain(helpers.model(), **request)
    drafter = perfect("one")
    with helpers.forwards(helpers.model()) as calls, pytest.raises(ValueError, match="Input length") as ours:
        helpers.speculate(helpers.model(), drafter, trees.Chain(6), **request)
    assert type(ours.value) is type(plain.value)
    assert str(ours.value) == str(plain.value)
    assert (len(calls), drafter.calls) == (0, 0)


def test_a5_one_token_needs_no_draft():
    """Drafts were made for a token that the prefill decides alone."""

    class Untouchable:
        feature_layers: tuple[int, ...] = ()

        def start(self, context: DraftContext) -> None:
            raise AssertionError("started")

        def children(self, frontier: Frontier, count: int) -> Candidates:
            raise AssertionError("asked")

        def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None:
            raise AssertionError("told")

        def finish(self) -> None:
            raise AssertionError("finished")

    check(Untouchable(), trees.Chain(6), max_new_tokens=1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a5_drafts_never_pass_the_last_position_of_the_model(family):
    """A block near the position limit read past the position table."""
    target = helpers.model(family, max_position_embeddings=20)
    request = {**helpers.batch(helpers.ONE), "max_length": 21}  # the last token is never run
    expected = helpers.plain(target, **request)
    with helpers.forwards(target) as calls:
        run = helpers.speculate(target, OracleDrafter(expected, [9]), trees.Chain(6), **request)
    assert run.output.tolist() == expected.tolist()
    assert max(int(call["position_ids"].max()) for call in calls[1:]) <= 19


STOPS = {
    "one token": lambda s: [s[1]],
    "in a list": lambda s: ["\t", s[2], s[3]],
    "two tokens": lambda s: [s[2:4]],
    "ends with the bonus": lambda s: [s[6:8]],  # 1 token in the prefill, then 6 drafted, then the bonus
    "five tokens": lambda s: [s[3:8]],
    "as one string": lambda s: s[3],
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("shape", TREES)
def test_a6_stop_strings_completed_inside_a_block(stop, shape):
    """Stop strings with a drafter raised, or were ignored when a block completed them."""
    tokenizer = tiny_tokenizer()
    tree, rank = TREES[shape]
    strings = STOPS[stop](tokenizer.decode(text("one")[0, START:]))
    run = check(perfect("one", rank), tree, stop_strings=strings, tokenizer=tokenizer)
    assert run.output.sequences.shape[1] < START + 16


@pytest.mark.parametrize("eos", [None, 96])
def test_a6_stop_strings_in_a_ragged_batch(eos):
    """Rows end alone when there is an EOS token and together when there is none, as in plain generate."""
    tokenizer = tiny_tokenizer()
    new = text("ragged")[:, -16:]
    strings = [tokenizer.decode(new[row, 3 * row : 3 * row + 2]) for row in range(4)]
    drafter = helpers.oracle(text("ragged", 24), in_step=eos is None)
    check(drafter, trees.Chain(6), prompts="ragged", stop_strings=strings, tokenizer=tokenizer, eos_token_id=eos)


def test_a6_the_tokenizer_may_belong_to_the_generator_and_the_strings_to_a_config():
    """Stop strings were looked for in the arguments only."""
    tokenizer, target = tiny_tokenizer(), helpers.model()
    strings = tokenizer.decode(text("one")[0, START + 3 : START + 5])
    config = GenerationConfig(stop_strings=strings, max_new_tokens=16, pad_token_id=0)
    generator = SpeculativeGenerator(target, perfect("one"), trees.Chain(6), tokenizer=tokenizer)
    assert (
        generator.generate(**helpers.batch(helpers.ONE), generation_config=config).tolist() == text("one", 5).tolist()
    )
    assert config.stop_strings == strings


def test_a6_without_a_tokenizer_the_error_is_that_of_transformers():
    """A missing tokenizer surfaced as something else, or later."""
    request = {**helpers.batch(helpers.ONE), "stop_strings": "x", "max_new_tokens": 4}
    with pytest.raises(ValueError, match="tokenizer") as plain:
        helpers.plain(helpers.model(), **request)
    with pytest.raises(ValueError, match="tokenizer") as ours:
        helpers.speculate(helpers.model(), perfect("one"), trees.Chain(6), **request)
    assert str(ours.value) == str(plain.value)


def test_b7_the_padding_of_a_batch_is_the_first_eos_where_none_is_given():
    """Finished rows need padding; a missing pad id was found only later."""
    eos = [int(text("ragged")[0, -16 + 2]), 96]
    target = helpers.model("llama", pad_token_id=None)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 16, "eos_token_id": eos, "pad_token_id": None}
    expected = helpers.plain(target, **request)
    run = helpers.speculate(target, perfect("ragged"), trees.Chain(6), **request)
    assert run.output.tolist() == expected.tolist()
    assert run.output[0, -13:].tolist() == [eos[0]] * 13


def test_a8_a_cut_text_leaves_no_tokens_or_scores_behind():
    """Only the text was trimmed at the stop string: ids and log-probabilities kept the rest (see `check`)."""
    tokenizer = tiny_tokenizer()
    strings = tokenizer.decode(text("one")[0, START + 2 : START + 4])
    run = check(perfect("one"), trees.Chain(6), stop_strings=strings, tokenizer=tokenizer)
    assert run.output.sequences.shape[1] == START + 4
    assert run.generator.stats.new_tokens == 4


def test_a8_a_batch_of_unknown_padding_is_refused_before_the_first_forward():
    """A missing padding id was found only when the first row had ended."""
    target = helpers.model("qwen2", pad_token_id=None)
    request = {**helpers.batch(helpers.FOUR), "stopping_criteria": [EosTokenCriteria(7)], "max_new_tokens": 4}
    generator = SpeculativeGenerator(target, drafters.PromptLookupDrafter(), trees.Chain(4))
    with helpers.forwards(target) as calls, pytest.raises(ValueError, match="pad_token_id"):
        generator.generate(**request, do_sample=False)
    assert calls == []
