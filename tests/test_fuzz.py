"""Any tree, drafter, verifier, batch, stop and processor: the output of `generate` is that of plain generate.

Hypothesis draws whole calls. The profile sets how many (30 in CI, 300 in the nightly run).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.hf.cache import RowCache
from specdec.protocols import Drafter, TreeBuilder
from specdec.testing import OracleDrafter
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers, processors

FAMILIES = ["llama", "gpt2", "mistral", "gemma3", "gemma4_shared", "gpt_oss"]
TOKENS = st.integers(1, 96)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=4)


@st.composite
def choices(draw: Any) -> list[tuple[int, ...]]:
    """A random tree shape: every node after its parent and its better siblings."""
    found: list[tuple[int, ...]] = [(0,)]
    for _ in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from([(), *found]))
        rank = sum(1 for choice in found if choice[:-1] == parent)
        if rank < 3 and len(parent) < 5:
            found.append((*parent, rank))
    return found


TREES: st.SearchStrategy[TreeBuilder] = st.one_of(
    st.builds(trees.Chain, st.integers(1, 7)),
    st.builds(
        trees.BestFirst,
        st.integers(1, 16),
        st.sampled_from([0.5, 1.0, 2.0]),
        branch=st.sampled_from([None, 1, 2, 3]),
        depth=st.sampled_from([None, 1, 3, 5]),
        width=st.sampled_from([None, 1, 2]),
    ),
    st.builds(trees.Fixed, choices()),
    st.builds(lambda shape: trees.Sampled(choices=shape), choices()),
)
SCHEDULES = st.lists(st.sampled_from([None, 0, 1, 2, 3, 9]), min_size=1, max_size=7)
CHAIN_ONLY, ANY_TREE = [verify.Rejection, verify.BlockVerification], [verify.TargetOnly, verify.TreeRejection, verify.Traversal]


class StopAt(StoppingCriteria):
    """Stops a row when two committed tokens are close, or after a number of calls."""

    def __init__(self, distance: int, calls: int) -> None:
        self.distance, self.calls = distance, calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002
        self.calls -= 1
        near = (input_ids[:, -1] - input_ids[:, -2:][:, 0]).abs() < self.distance
        return (near if input_ids.shape[1] > 1 else torch.zeros_like(near)) | (self.calls <= 0)


Request = Callable[[], dict[str, Any]]
"""Makes the arguments of a call anew: processors and criteria may keep state."""


@st.composite
def requests(draw: Any, text: list[int], rows: int) -> tuple[Request, bool]:
    """Stops and processors for rows that would write `text`; and whether rows must advance together."""
    fixed: dict[str, Any] = {"max_new_tokens": draw(st.integers(1, 20))}
    if draw(st.booleans()):
        fixed["eos_token_id"] = draw(st.lists(st.sampled_from(text) | TOKENS, min_size=1, max_size=2))
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(text) - 2))
        fixed["stop_strings"] = [tiny_tokenizer().decode(text[start : start + draw(st.integers(1, 2))])]
    if draw(st.integers(0, 3)) == 0:
        fixed["prefill_chunk_size"] = draw(st.integers(1, 8))
    rowwise = draw(st.lists(st.sampled_from(sorted(processors.ROW_WISE)), max_size=2, unique=True))
    stateful = draw(st.sampled_from([None, None, None, *sorted(processors.STATEFUL)]))
    stopping = draw(st.none() | st.none() | st.tuples(st.integers(1, 4), st.integers(1, 20)))
    # A rule for the end of the text brings an EOS token, which is drawn above.
    ends = {"min_length", "min_new_tokens", "exponential_decay"}
    if "eos_token_id" not in fixed:
        rowwise = [name for name in rowwise if name not in ends]

    def make() -> dict[str, Any]:
        request: dict[str, Any] = {}
        for name in rowwise:
            request |= processors.ROW_WISE[name](text)
        if stateful:
            request |= processors.STATEFUL[stateful](text)
        if stopping:
            request["stopping_criteria"] = [StopAt(*stopping)]
        return request | fixed

    return make, bool(stateful or stopping) and rows > 1


@st.composite
def calls(draw: Any) -> tuple[PreTrainedModel, Drafter, TreeBuilder, Any, Request, bool]:
    """A whole call: model, parts and arguments."""
    target = helpers.model(draw(st.sampled_from(FAMILIES)))
    prompts, tree = draw(PROMPTS), draw(TREES)
    inputs = helpers.batch(prompts)
    free = helpers.plain(target, **inputs, max_new_tokens=20)
    make, together = draw(requests(free[0, -20:].tolist(), len(prompts)))
    stateful = any(name in make() for name in ("logits_processor", "guidance_scale", "prefix_allowed_tokens_fn")) or any(
        "SynthID" in type(value).__name__ for value in make().values()
    )
    rules: list[Any] = [None, *ANY_TREE, *(CHAIN_ONLY if tree.chain else [])]
    if stateful:
        rules = [rule for rule in rules if rule is None or rule.stepwise]
    rule = draw(st.sampled_from(rules))
    schedules = [draw(SCHEDULES)] * len(prompts) if together else [draw(SCHEDULES) for _ in prompts]
    reference = helpers.plain(target, **inputs, **make(), tokenizer=tiny_tokenizer())
    known = draw(st.sampled_from([free, reference]))
    drafter: Drafter = draw(
        st.sampled_from([0, 1, 2]).map(lambda rank: OracleDrafter(known, schedules, rank=rank))
        | st.builds(drafters.PromptLookupDrafter)
        | st.builds(drafters.SuffixDrafter)
        | st.sampled_from(["llama", "gpt2"]).map(lambda family: drafters.ModelDrafter(helpers.model(family, seed=0)))
    )
    budget = draw(st.none() | st.integers(0, tree.nodes))

    def arguments() -> dict[str, Any]:
        return {**inputs, **make(), "num_draft_tokens": budget}

    return target, drafter, tree, None if rule is None else rule(), arguments, len(prompts) == 1


def check(call: tuple[PreTrainedModel, Drafter, TreeBuilder, Any, Request, bool]) -> None:
    target, drafter, tree, rule, arguments, _ = call
    details = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    theirs, ours = helpers.Tape(), helpers.Tape()
    plain = {name: value for name, value in arguments().items() if name != "num_draft_tokens"}
    expected = helpers.plain(target, **plain, **details, streamer=theirs, tokenizer=tiny_tokenizer())
    generator = SpeculativeGenerator(target, drafter, tree, rule, tokenizer=tiny_tokenizer())
    output = generator.generate(**arguments(), **details, streamer=ours)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
    assert len(output.scores) == len(expected.scores)
    stats = generator.stats
    for row in range(stats.batch):
        counts = stats.row(row)
        assert counts.new_tokens == counts.rounds + counts.accepted - counts.cut_short
        for index in range(counts.new_tokens):
            torch.testing.assert_close(output.scores[index][row], expected.scores[index][row], rtol=0, atol=1e-5)


@given(calls())
def test_greedy_calls(call):
    check(call)


@given(calls(), st.integers(0, 2**32), st.sampled_from([{}, *processors.WARPERS.values()]))
def test_sampled_calls_of_one_row_draw_the_tokens_of_plain_generate(call, seed, warpers):
    target, drafter, tree, _, arguments, single = call
    if tree.sampled:
        return
    request, budget = arguments(), arguments()["num_draft_tokens"]
    del request["num_draft_tokens"]
    inputs = {name: request.pop(name)[:1] for name in ("input_ids", "attention_mask")} if single else {}
    if not single:
        return
    inputs |= {"do_sample": True, "pad_token_id": 0, "tokenizer": tiny_tokenizer(), **warpers}
    torch.manual_seed(seed)
    expected = helpers.plain(target, **inputs, **request)
    torch.manual_seed(seed)
    again = {name: value for name, value in arguments().items() if name not in ("input_ids", "attention_mask")}
    assert budget == again["num_draft_tokens"]
    output = SpeculativeGenerator(target, drafter, tree).generate(**inputs, **again)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("fault", ["cache", "stop"])
def test_the_fuzzer_finds_faults(monkeypatch, fault):
    """Mutants: the accepted path is not moved; the second token of a walk is not checked for stops."""
    if fault == "cache":
        keep = RowCache.keep
        monkeypatch.setattr(
            RowCache, "keep", lambda self, nodes, counts: keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)
        )
    else:
        from specdec.hf.ledger import TokenLedger

        stop = TokenLedger._stop
        monkeypatch.setattr(TokenLedger, "_stop", lambda self, rows: stop(self, rows) if max(self._lengths) % 2 else None)

    @settings(max_examples=60, database=None, phases=[Phase.generate], derandomize=True, suppress_health_check=list(HealthCheck))
    @given(calls())
    def hunt(call: Any) -> None:
        check(call)

    with pytest.raises((AssertionError, IndexError)):
        hunt()
