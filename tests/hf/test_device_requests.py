"""Device rounds behind `SpeculativeGenerator`: where a text ends, streaming, kept programs, and what is refused."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from specdec import SpeculativeGenerator, control, drafters, kv, trees, verify
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hf import cache as cache_module
from specdec.hf.round_program import AHEAD, RoundProgram
from specdec.testing import tiny_model
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers
from tests.hf.device_runs import deepest, generator, oracle, serve
from tests.processors import Shift

NEW, SHORT = 24, 12
START = helpers.START["one"]


def text(prompts: str = "one") -> Tensor:
    return helpers.text(prompts, NEW)


def perfect(prompts: str = "one") -> Any:
    """All drafts are right, so that blocks are full."""
    return oracle(text(prompts), [[9]] * len(helpers.PROMPTS[prompts]))


def request(prompts: str = "one", **options: Any) -> dict[str, Any]:
    return {**helpers.batch(helpers.PROMPTS[prompts]), "max_new_tokens": NEW, **options}


# ------------------------------------------------------------------------------------------------ where a text ends


@pytest.mark.parametrize("limit", [{"max_new_tokens": 6.5}, {"max_new_tokens": 6.0}, {"max_length": START + 6.5}])
def test_a_part_of_a_token_is_a_whole_one(limit: dict[str, Any]) -> None:
    """As in plain generate; the device ended such a text one token before the host did, which waited for it."""
    options = {**helpers.batch(helpers.PROMPTS["one"]), **limit}
    reference = helpers.plain(helpers.model(), **options)
    helpers.assert_equal(serve(helpers.model(), **options), reference, all_kinds=False)


@pytest.mark.parametrize("limit", [float("inf"), float("nan")])
@pytest.mark.parametrize("execution", ["host", "device"])
def test_a_text_ends_somewhere(limit: float, execution: Any) -> None:
    served = SpeculativeGenerator(helpers.model(), execution=execution)
    with pytest.raises(UnsupportedError, match="length limit of a text must be a finite number of tokens, got"):
        served.generate(**helpers.batch(helpers.PROMPTS["one"]), max_new_tokens=limit, do_sample=False)


def test_a_row_that_the_device_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for it would take forever."""
    launch = RoundProgram.launch

    def early(program: RoundProgram) -> None:
        program.state.remaining.clamp_max_(3)
        launch(program)

    monkeypatch.setattr(RoundProgram, "launch", early)
    with pytest.raises(SpecdecError, match="the device ended a row that goes on"):
        serve(helpers.model(), **request())


def test_a_stop_token_at_every_place_of_a_block() -> None:
    """Drafted, as the bonus token, and out of the prefill; nothing of the block comes after it."""
    drafted = set()
    for place in range(11):
        stop = int(text()[0, START + place])
        reference = helpers.plain(helpers.model(), **request(eos_token_id=stop))
        run = serve(helpers.model(), perfect(), **request(eos_token_id=stop))
        helpers.assert_equal(run, reference, all_kinds=False)
        assert run.output[0, -1] == stop
        last = run.rounds[-1]
        drafted.add(bool(last.path[0, int(last.num_committed[0]) - 1] >= 0))
    assert drafted == {True, False}


def test_stop_tokens_end_rows_of_a_batch_one_by_one() -> None:
    """One row never stops; the others end in different rounds and are padded."""
    new = text("ragged")[:, -NEW:].tolist()
    stops = [new[0][2], new[1][9], new[2][16]]
    asked = request("ragged", eos_token_id=stops)
    reference = helpers.plain(helpers.model(), **asked)
    ends = {row[-NEW:].index(helpers.PAD) if helpers.PAD in row[-NEW:] else NEW for row in reference.tolist()}
    assert len(ends) > 2
    helpers.assert_equal(serve(helpers.model(), oracle(text("ragged")), **asked), reference)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_the_length_limit_inside_a_block(prompts: str, tokens: int) -> None:
    """Trees would be deeper than what may be committed."""
    run = serve(helpers.model(), perfect(prompts), **request(prompts, max_new_tokens=tokens))
    helpers.assert_equal(run, text(prompts)[:, : helpers.START[prompts] + tokens], all_kinds=False)
    assert len(run.rounds) == 1 + -(-(tokens - 1) // 5)
    left = torch.full((run.output.shape[0],), tokens)
    for round in run.rounds:
        assert (deepest(round) < left).all(), "a draft that cannot be committed"
        left = left - round.num_committed


class At(StoppingCriteria):
    """Stops at a length, and remembers the texts that it was asked about."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.asked.append(input_ids.tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 7, 10])
def test_a_criterion_of_the_caller_in_the_middle_of_a_block(tokens: int) -> None:
    """It is asked about every token, once and with the true text; what was committed beyond it does not appear."""
    mine, theirs = At(START + tokens), At(START + tokens)
    reference = helpers.plain(helpers.model(), **request(stopping_criteria=[theirs]))
    run = serve(helpers.model(), perfect(), **request(stopping_criteria=[mine]))
    helpers.assert_equal(run, reference, all_kinds=False)
    assert mine.asked == theirs.asked
    committed = [token for round in run.rounds for token in round.committed[0].tolist() if token >= 0]
    assert committed == text()[0, START : START + tokens].tolist()


def test_stop_strings_end_rows_of_a_batch_in_the_middle_of_a_block() -> None:
    """The device goes on with a row until it hears of it; the other rows go on anyway."""
    tokenizer, new = tiny_tokenizer(), text("ragged")[:, -NEW:]
    strings = [tokenizer.decode(new[row, 4 * row + 2 : 4 * row + 4]) for row in range(3)]
    asked = request("ragged", stop_strings=strings, tokenizer=tokenizer, eos_token_id=96)
    reference = helpers.plain(helpers.model(), **asked)
    assert len({row[-NEW:].index(helpers.PAD) if helpers.PAD in row[-NEW:] else NEW for row in reference.tolist()}) > 2
    for draft in (perfect("ragged"), oracle(text("ragged"))):
        run = serve(helpers.model(), draft, **asked)
        assert run.output.tolist() == reference.tolist()
        lengths = torch.tensor(draft.calls[0])
        assert (lengths[-1] == lengths[-2]).any(), "no row was stopped on the device"


def test_a_time_limit_is_asked_on_the_host() -> None:
    run = serve(helpers.model(), perfect(), **request(max_time=0.0))
    assert run.output.shape[1] == START + 1
    assert serve(helpers.model(), perfect(), **request(max_time=1e6)).output.tolist() == text().tolist()


@pytest.mark.parametrize("prompts", helpers.PROMPTS)
def test_tokens_are_streamed_in_order_as_they_are_committed(prompts: str) -> None:
    tape = helpers.Tape()
    run = serve(helpers.model(), oracle(text(prompts)), **request(prompts, streamer=tape))
    assert tape.puts[0].tolist() == request(prompts)["input_ids"].tolist()
    assert torch.tensor(tape.tokens).T.tolist() == run.output[:, helpers.START[prompts] :].tolist()
    assert tape.ends == 1
    served = generator(helpers.model(), tree=trees.Chain(3))
    tape = helpers.Tape()
    for round in served.rounds(**request(prompts, do_sample=False, streamer=tape)):
        assert round.index == 0 or len(tape.tokens) > round.index


# ---------------------------------------------------------------------------------------------------- kept programs


def program(served: SpeculativeGenerator) -> RoundProgram:
    kept = served._programs._program
    assert kept is not None
    return kept


def compare(served: SpeculativeGenerator, **asked: Any) -> RoundProgram:
    """Serves a greedy request, compares it with plain decoding, and returns the program that it took."""
    asked = {"max_new_tokens": SHORT, "do_sample": False, "pad_token_id": helpers.PAD, **asked}
    assert served.generate(**asked).tolist() == helpers.plain(served.model, **asked).tolist()
    return program(served)


def test_a_program_serves_the_requests_that_follow() -> None:
    served = generator(helpers.model("gemma3"))
    first = compare(served, **helpers.batch(helpers.ONE))
    for prompt, tokens in (([[5, 6, 7] * 30], 20), ([[9]], 30), (helpers.ONE, SHORT)):
        assert compare(served, input_ids=torch.tensor(prompt), max_new_tokens=tokens) is first


def test_a_program_serves_other_padding() -> None:
    served = generator(helpers.model())
    first = compare(served, **helpers.batch(helpers.FOUR))
    assert compare(served, **helpers.batch([helpers.FOUR[row] for row in (2, 0, 3, 1)])) is first
    assert compare(served, **helpers.batch([[7, 8], [3], [4, 5], [9, 1]])) is first


CHANGES: dict[str, dict[str, Any]] = {
    "another stop": {"eos_token_id": int(text()[0, START + 4])},
    "another processor": {"suppress_tokens": text()[0, START + 2 : START + 5].tolist()},
    "a larger text": {"max_new_tokens": 40},
    "another batch": {"input_ids": torch.tensor(helpers.ONE * 2)},
    "padding": {"attention_mask": torch.tensor([[0, 0, *[1] * 7]])},
    "fewer drafts": {"num_draft_tokens": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_request_of_another_kind_gets_a_program_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "GROWTH", 8)  # little room beyond what a request needs
    served, asked = generator(helpers.model()), {"input_ids": torch.tensor(helpers.ONE)}
    first = compare(served, **asked)
    change = {**asked, **CHANGES[name]}
    drafts = {"num_draft_tokens": change.pop("num_draft_tokens")} if "num_draft_tokens" in change else {}
    expected = helpers.plain(served.model, **{"max_new_tokens": SHORT, **change})
    output = served.generate(**{"max_new_tokens": SHORT, "do_sample": False, "pad_token_id": 0, **change, **drafts})
    assert output.tolist() == expected.tolist()
    other = program(served)
    assert other is not first
    assert compare(served, **asked) is not other


def test_processors_are_compared_by_what_they_were_made_with() -> None:
    served = generator(helpers.model())
    asked = request(do_sample=True, pad_token_id=0)

    def draw(**options: Any) -> tuple[list[int], RoundProgram]:
        torch.manual_seed(3)
        return served.generate(**asked, **options).tolist(), program(served)

    some, first = draw(top_k=5)
    again, kept = draw(top_k=5)
    assert (some, first) == (again, kept)
    one, other = draw(top_k=1)
    assert (one, other is first) == (text().tolist(), False)
    assert draw(top_k=5)[0] == some
    assert draw(top_k=5, temperature=9.0)[0] != some


def test_weights_that_were_replaced_or_changed_are_the_ones_that_count() -> None:
    target = tiny_model("llama", seed=7)
    served, asked = generator(target), {"input_ids": torch.tensor(helpers.ONE)}
    first = compare(served, **asked)
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.roll(1, 0))
    assert compare(served, **asked) is first, "the same memory"
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.roll(1, 0))
    assert compare(served, **asked) is not first


def test_codecs_learn_from_every_prompt() -> None:
    codecs = kv.KVCacheConfig(keys=kv.Centered(kv.Int8()), values=kv.FP8(scale="head"))
    served = generator(helpers.model(), cache=codecs)
    fresh: list[Tensor] = []
    for prompt in (helpers.ONE, [[40, 41, 90, 42, 91]]):
        asked = request(input_ids=torch.tensor(prompt), attention_mask=None, do_sample=False, pad_token_id=0)
        fresh.append(generator(helpers.model(), cache=codecs).generate(**asked))
        assert served.generate(**asked).tolist() == fresh[-1].tolist()


def test_a_request_that_was_given_up_leaves_nothing_behind() -> None:
    """Rounds were on their way that nobody will read."""
    served = generator(helpers.model())
    rounds = served.rounds(**request(do_sample=False))
    next(rounds), next(rounds)
    first = program(served)
    assert 0 < first.pending < AHEAD
    rounds.close()
    assert compare(served, input_ids=torch.tensor([[8, 7, 8, 7, 8]])) is first


# ------------------------------------------------------------------------------------------------ what is not served


def _draft() -> PreTrainedModel:
    return helpers.model("llama")


def _elsewhere() -> PreTrainedModel:
    target = copy.deepcopy(helpers.model())
    target.lm_head = target.lm_head.to("meta")
    return target


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "rejection": ({"verifier": verify.Rejection(), "tree": trees.Chain(3)}, "Rejection decides on the host"),
    "goodput": ({"controller": control.Goodput()}, "Goodput chooses another budget each round"),
    "a fixed tree": ({"tree": trees.Fixed([(0,), (1,)])}, "Fixed.* cannot be grown on the device"),
    "a sampled tree": ({"tree": trees.Sampled((2, 1))}, "Sampled.* cannot be grown on the device|decides on the host"),
    "a tree of a draft model": (
        {"drafter": drafters.ModelDrafter(_draft())},
        "a draft model drafts chains on the device, not .*BestFirst",
    ),
    "a draft model with shared layers": (
        {"drafter": drafters.ModelDrafter(helpers.model("gemma4_shared")), "tree": trees.Chain(3)},
        "a draft model with layers that share",
    ),
    "a drafter of one's own": ({"drafter": helpers.OracleDrafter(text(), [3])}, "OracleDrafter cannot draft"),
    "one of several drafters": (
        {"drafter": drafters.CombinedDrafter(drafters.SuffixDrafter(), helpers.OracleDrafter(text(), [3]))},
        "OracleDrafter cannot draft on the device",
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "everything as a dict": ({"return_dict_in_generate": True}, "return_dict_in_generate=True asks for more"),
    "repetition_penalty": ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor must see the prefix"),
    "a processor of one's own": ({"logits_processor": [Shift()]}, "Shift must see the prefix of each token"),
    "no drafts": ({"num_draft_tokens": 0}, "nothing is to be drafted"),
    "a mask with gaps": ({"attention_mask": torch.tensor([[1, 0, *[1] * 7]])}, "has gaps"),
    "a time limit in a batch without stop tokens": (
        {**helpers.batch(helpers.FOUR), "max_time": 1e9, "eos_token_id": None},
        r"with these also by time limits",
    ),
    "criteria of one's own in a batch": (
        {**helpers.batch(helpers.FOUR), "stopping_criteria": [At(30)]},
        "criteria and processors of your own see the batch token by token",
    ),
}


def refused(target: PreTrainedModel, message: str, parts: dict[str, Any], asked: dict[str, Any]) -> None:
    """`device` says why before the model runs; `auto` serves the request on the host."""
    with helpers.forwards(target) as calls, pytest.raises(UnsupportedError, match=message) as error:
        generator(target, **parts).generate(**asked)
    assert calls == []
    assert re.fullmatch(r"execution='device' cannot serve this request: .*[^.]\.", str(error.value), re.DOTALL)
    served = generator(target, **{**parts, "execution": "auto"})
    output = served.generate(**copy.deepcopy(asked))
    output = output if isinstance(output, Tensor) else output.sequences
    drafts = {key: value for key, value in asked.items() if key != "num_draft_tokens"}
    expected = helpers.plain(target, **{**copy.deepcopy(drafts), "return_dict_in_generate": False})
    assert output.tolist() == expected.tolist()
    assert served._programs._program is None


@pytest.mark.parametrize("name", PARTS)
def test_parts_without_a_device_form_are_refused_by_name(name: str) -> None:
    parts, message = PARTS[name]
    refused(helpers.model(), message, parts, request(do_sample=False, pad_token_id=0, max_new_tokens=8))


@pytest.mark.parametrize("name", OPTIONS)
def test_requests_that_need_the_host_are_refused_by_name(name: str) -> None:
    options, message = OPTIONS[name]
    refused(helpers.model(), message, {}, request(do_sample=False, pad_token_id=0, **{"max_new_tokens": 8, **options}))


def test_token_types_are_refused_not_dropped() -> None:
    """gpt2 adds an embedding of them."""
    asked = request(token_type_ids=torch.tensor([[1, 1, 1, 2, 2, 2, 1, 1, 1]]), do_sample=False, pad_token_id=0)
    refused(helpers.model("gpt2"), "token_type_ids are not handed on", {}, asked)


def test_layers_that_share_keys_are_refused() -> None:
    target = helpers.model("gemma4_shared")
    refused(target, "layers that share keys and values", {}, request(do_sample=False, pad_token_id=0, max_new_tokens=8))


def test_weights_on_several_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="weights are on several devices"):
        generator(_elsewhere()).generate(**request())
    drafter = drafters.ModelDrafter(_elsewhere())
    with pytest.raises(UnsupportedError, match="weights are on several devices"):
        generator(helpers.model(), drafter=drafter, tree=trees.Chain(2)).generate(**request())


@pytest.mark.parametrize(("execution", "on_device"), [("auto", False), ("device", True), ("host", False)])
def test_where_rounds_run(execution: Any, on_device: bool) -> None:
    """On a CPU, `auto` is the host: a program of fixed shapes gains nothing there."""
    served = generator(helpers.model(), execution=execution)
    assert served.generate(**request(do_sample=False)).tolist() == text().tolist()
    assert (served._programs._program is not None) == on_device


def test_an_unknown_place_is_refused() -> None:
    make: Callable[..., Any] = getattr(SpeculativeGenerator.__init__, "__wrapped__", SpeculativeGenerator.__init__)
    with pytest.raises(UnsupportedError, match="execution must be one of host, device, auto, got 'gpu'"):
        make(object.__new__(SpeculativeGenerator), helpers.model(), execution="gpu")


def test_a_forward_that_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA says of a host read inside a capture does not tell the caller what to do."""

    def captured(_: RoundProgram) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    served = generator(helpers.model())
    served.generate(**request(do_sample=False))
    program: Any = served._programs._program
    while program.pending:
        program.read()
    monkeypatch.setattr(RoundProgram, "_captured", captured)
    program._capture = True
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM could not be captured .* execution='host'"):
        program.launch()


def test_the_reference_is_taken_when_it_is_asked_for() -> None:
    served = generator(helpers.model(), attention="reference")
    assert served.generate(**request(do_sample=False)).tolist() == text().tolist()
    program: Any = served._programs._program
    assert program._context.impl == "reference"
