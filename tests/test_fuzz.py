"""Any tree, drafter, verifier, batch, stop and processor: the output of `generate` is that of plain generate.

Hypothesis draws the description of a whole call, as plain values: annotations are checked with a random source that
must not run inside a strategy. The profile sets how many calls (30 in CI, 300 in the nightly run).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from specdec import SpeculativeGenerator, drafters, trees, verify
from specdec.hf.cache import RowCache
from specdec.hf.ledger import TokenLedger
from specdec.protocols import Drafter, TreeBuilder
from specdec.testing import OracleDrafter
from specdec.testing.tokenizer import tiny_tokenizer
from tests import helpers, processors

LONGEST = 20
FAMILIES = ["llama", "gpt2", "mistral", "gemma3", "gemma4_shared", "gpt_oss"]
TOKENIZER = tiny_tokenizer()
CHAIN_ONLY = [verify.Rejection(), verify.BlockVerification()]
ANY_TREE = [verify.TargetOnly(), verify.TreeRejection(), verify.Traversal()]
ROW_WISE = sorted(set(processors.ROW_WISE) - {"min_length", "min_new_tokens"})  # longer than some calls


class StopAt(StoppingCriteria):
    """Stops a row when its last two tokens are close, or after a number of calls."""

    def __init__(self, distance: int, calls: int) -> None:
        self.distance, self.calls = distance, calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls -= 1
        near = (input_ids[:, -1] - input_ids[:, -2:][:, 0]).abs() < self.distance
        return near & (input_ids.shape[1] > 1) | (self.calls <= 0)


@dataclass(frozen=True)
class Call:
    """A call of `generate`, as plain values; `stop` and `eos` are places in the text that nothing stops."""

    family: str
    prompts: list[list[int]]
    builder: str
    options: dict[str, Any]
    rule: int
    drafter: str
    rank: int
    knows_the_stops: bool
    schedules: list[list[int | None]]
    new_tokens: int
    least: int
    budget: float | None
    chunk: int | None
    eos: list[int]
    stop: tuple[int, int] | None
    criterion: tuple[int, int] | None
    row_wise: list[str]
    stateful: str | None

    @property
    def model(self) -> PreTrainedModel:
        return helpers.model(self.family)

    @property
    def tree(self) -> TreeBuilder:
        builder: type[TreeBuilder] = getattr(trees, self.builder)
        return builder(**self.options)

    @property
    def verifier(self) -> Any:
        """One that fits; None for the default."""
        rules = [None, *ANY_TREE, *(CHAIN_ONLY if self.tree.chain else [])]
        if self.stateful is not None:
            rules = [rule for rule in rules if rule is None or rule.stepwise]
        return rules[self.rule % len(rules)]

    @property
    def num_draft_tokens(self) -> int | None:
        return None if self.budget is None else round(self.budget * self.tree.nodes)

    @property
    def text(self) -> Tensor:
        """The ids without any stop or processor."""
        return helpers.plain(self.model, **helpers.batch(self.prompts), max_new_tokens=LONGEST)

    def request(self) -> dict[str, Any]:
        """The arguments, made anew: processors and criteria may keep state."""
        text = self.text[0, -LONGEST:].tolist()
        request: dict[str, Any] = {**helpers.batch(self.prompts), "prefill_chunk_size": self.chunk}
        for name in self.row_wise:
            request |= processors.ROW_WISE[name](text)
        if self.stateful is not None:
            request |= processors.STATEFUL[self.stateful](text)
        if self.criterion is not None:
            request["stopping_criteria"] = [StopAt(*self.criterion)]
        if self.eos:
            request |= {"eos_token_id": [text[place] for place in self.eos], "min_new_tokens": self.least}
        if self.stop is not None:
            request["stop_strings"] = [TOKENIZER.decode(text[self.stop[0] : sum(self.stop)])]
        return request | {"max_new_tokens": self.new_tokens, "pad_token_id": helpers.PAD, "tokenizer": TOKENIZER}

    def drafter_for(self, reference: Tensor) -> Drafter:
        if self.drafter == "oracle":
            unprocessed = not self.row_wise and self.stateful is None
            known = self.text if unprocessed and not self.knows_the_stops else reference
            return OracleDrafter(known, self.schedules, rank=self.rank)
        if self.drafter == "model":
            return drafters.ModelDrafter(helpers.model("qwen2"))
        return drafters.SuffixDrafter() if self.drafter == "suffix" else drafters.PromptLookupDrafter()


@st.composite
def shapes(draw: Any) -> list[tuple[int, ...]]:
    """A tree shape: every node after its parent and its better siblings."""
    bushy = [(0,), (1,), (1, 0), (1, 1), (2,), (2, 0), (1, 1, 0), (1, 1, 1), (0, 0), (0, 1)]
    found: list[tuple[int, ...]] = bushy[: draw(st.sampled_from([10, 8, 4, 1]))]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([(), *found]))
        rank = sum(choice[:-1] == parent for choice in found)
        if rank < 3 and len(parent) < 5:
            found.append((*parent, rank))
    return found


def _seldom(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 3).flatmap(lambda lot: value if lot == 3 else st.none())


def _some(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(options)


TREES: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.tuples(st.just("Chain"), _some(nodes=st.integers(1, 7))),
    st.tuples(
        st.just("BestFirst"),
        _some(
            nodes=st.sampled_from([14, 9, 16, 4, 1]),
            temperature=st.sampled_from([1.0, 2.0, 0.5]),
            branch=st.sampled_from([2, 3, None, 1]),
            depth=st.sampled_from([3, 2, 5, None, 1]),
            width=st.sampled_from([None, None, 2, 1]),
        ),
    ),
    st.tuples(st.just("Fixed"), _some(choices=shapes())),
    st.tuples(st.just("Sampled"), _some(choices=shapes())),
)


@st.composite
def calls(draw: Any, rows: int = 4) -> Call:
    prompts = draw(st.lists(st.lists(st.integers(1, 96), min_size=1, max_size=12), min_size=1, max_size=rows))
    (builder, options), new_tokens = draw(TREES), draw(st.sampled_from([LONGEST, LONGEST, LONGEST, 14, 9, 3, 2, 1]))
    stateful = draw(_seldom(st.sampled_from(list(processors.STATEFUL))))
    criterion = draw(_seldom(st.tuples(st.integers(1, 4), st.integers(1, LONGEST))))
    schedule = st.lists(st.sampled_from([9, 9, 3, 2, 1, 0, None]), min_size=1, max_size=7)
    alike = stateful is not None or criterion is not None  # rows advance together, so let them have luck together
    return Call(
        family=draw(st.sampled_from(FAMILIES)),
        prompts=prompts,
        builder=builder,
        options=options,
        rule=draw(st.integers(0, 5)),
        drafter=draw(st.sampled_from(["oracle", "oracle", "oracle", "oracle", "oracle", "lookup", "suffix", "model"])),
        rank=draw(st.sampled_from([1, 0, 2])),
        knows_the_stops=draw(st.booleans()),
        schedules=[draw(schedule)] * len(prompts) if alike else [draw(schedule) for _ in prompts],
        new_tokens=new_tokens,
        least=draw(st.integers(0, new_tokens)),
        budget=draw(st.sampled_from([None, None, None, 0.0, 0.3, 0.7])),
        chunk=draw(st.none() | st.integers(1, 8)),
        eos=draw(_seldom(st.lists(st.integers(0, LONGEST - 1), min_size=1, max_size=2))) or [],
        stop=draw(_seldom(st.tuples(st.integers(0, LONGEST - 2), st.integers(1, 2)))),
        criterion=criterion,
        row_wise=draw(st.lists(st.sampled_from(ROW_WISE), max_size=2, unique=True)),
        stateful=stateful,
    )


def outcome(run: Callable[..., Any], **request: Any) -> tuple[Any, str | None]:
    """What a call returns, or the error of a request that contradicts itself."""
    try:
        return run(**request), None
    except (ValueError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"


def check(call: Call, seed: int | None = None, **sampling: Any) -> None:
    """Equal ids, streamed tokens, scores and errors, and statistics that add up; drawn from one seed if given."""
    details = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, **sampling}
    theirs, ours = helpers.Tape(), helpers.Tape()
    torch.manual_seed(seed or 0)
    request = {**call.request(), **details}
    expected, error = outcome(functools.partial(helpers.plain, call.model), **request, streamer=theirs)
    generator = SpeculativeGenerator(
        call.model,
        call.drafter_for(call.text if expected is None else expected.sequences),
        call.tree,
        call.verifier if seed is None else None,
    )
    torch.manual_seed(seed or 0)
    request = {**call.request(), **details, "num_draft_tokens": call.num_draft_tokens}
    output, problem = outcome(generator.generate, **request, streamer=ours)
    assert problem == error
    if expected is None:
        return
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
    assert len(output.scores) == len(expected.scores)
    event(f"tokens per round: {round(generator.stats.tokens_per_round)}")
    for row in range(len(call.prompts)):
        counts = generator.stats.row(row)
        assert counts.new_tokens == counts.rounds + counts.accepted - counts.cut_short
        for index in range(counts.new_tokens):
            torch.testing.assert_close(output.scores[index][row], expected.scores[index][row], rtol=0, atol=1e-5)


@given(calls())
def test_greedy_calls(call):
    check(call)


@given(calls(rows=1), st.integers(0, 2**32), st.sampled_from([{}, *processors.WARPERS.values()]))
def test_sampled_calls_of_one_row_draw_the_tokens_of_plain_generate(call, seed, warpers):
    assume(call.builder != "Sampled")  # draws of its own
    check(call, seed, do_sample=True, **warpers)


def _in_place(patch: pytest.MonkeyPatch) -> None:
    keep = RowCache.keep

    def wrong(self: RowCache, nodes: Tensor, counts: Tensor) -> None:
        keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)

    patch.setattr(RowCache, "keep", wrong)


def _seldom_stops(patch: pytest.MonkeyPatch) -> None:
    stop = TokenLedger._stop

    def wrong(self: TokenLedger, columns: list[int]) -> None:
        if max(self._lengths) % 3:
            stop(self, columns)

    patch.setattr(TokenLedger, "_stop", wrong)


MUTANTS = {"the accepted path is not moved": _in_place, "every third token is not checked for stops": _seldom_stops}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_found(monkeypatch, name):
    MUTANTS[name](monkeypatch)

    @settings(
        max_examples=60,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def hunt(call: Call) -> None:
        check(call)

    with pytest.raises(AssertionError):
        hunt()
