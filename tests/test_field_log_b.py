"""Field log, class (b): a batch is a set of independent requests.

Per-row committed length is the only truth: positions, masks, cache slots, budgets and stop state follow from it. Each
test is named after its row of the log.
"""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria

from specdec import SpeculativeGenerator, trees, verify
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import SpecdecError, UnsupportedError
from specdec.protocols import TreeBuilder
from specdec.testing import OracleDrafter
from specdec.trees import topology
from specdec.types import Candidates, Frontier
from tests import helpers
from tests.hf.texts import poisoned

ROWS = [[5, 6, 7], [5, 9, 8, 7, 6, 5, 4, 3, 2], list(range(20, 37)), [11]]
WIDTH = 17
SCHEDULES: list[list[int | None]] = [[5, 0, 3, 1], [0, 5, 2, None], [2, 2, 4, 0], [1, 4, None, 5]]
FAMILIES = ["llama", "gpt2", "mistral", "gemma3"]
TREES: dict[str, TreeBuilder] = {
    "chain": trees.Chain(5),
    "tree": trees.Fixed([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]),
}


@functools.cache
def alone(family: str, row: int, tokens: int = 24) -> list[int]:
    """What plain generate gives for one prompt without padding; new tokens only."""
    ids = helpers.plain(helpers.model(family), input_ids=torch.tensor([ROWS[row]]), max_new_tokens=tokens)
    return ids[0, len(ROWS[row]) :].tolist()


def known(family: str, rows: list[int], tokens: int = 24) -> Tensor:
    """The rows' own texts, as the oracle wants them: behind their padded prompts."""
    width = max(len(ROWS[row]) for row in rows)
    return torch.tensor([[0] * (width - len(ROWS[row])) + ROWS[row] + alone(family, row, tokens) for row in rows])


def speculate(family: str, rows: list[int], tree: str, *, tokens: int = 24, **request: Any) -> helpers.Run:
    drafter = OracleDrafter(known(family, rows, 40), [SCHEDULES[row] for row in rows])
    batch = helpers.batch([ROWS[row] for row in rows])
    return helpers.speculate(helpers.model(family), drafter, TREES[tree], **batch, max_new_tokens=tokens, **request)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
def test_b1_each_row_equals_its_own_run_and_passes_are_those_of_the_slowest(family, tree):
    """Batches refused, or rows that wait for each other."""
    run = speculate(family, [0, 1, 2, 3], tree)
    assert [row[WIDTH:] for row in run.output.tolist()] == [alone(family, row) for row in range(4)]
    assert run.kinds == helpers.ALL_KINDS
    passes = [len(speculate(family, [row], tree).rounds) for row in range(4)]
    assert len(run.rounds) == max(passes) < sum(passes)


@pytest.mark.parametrize("family", FAMILIES)
def test_b1_a_batch_of_one_text_is_one_text_many_times(family):
    ids = torch.tensor([ROWS[1]] * 3)
    drafter = OracleDrafter(known(family, [1] * 3), [SCHEDULES[0], SCHEDULES[1], SCHEDULES[3]])
    output = helpers.speculate(helpers.model(family), drafter, TREES["tree"], input_ids=ids, max_new_tokens=24).output
    assert [row[9:] for row in output.tolist()] == [alone(family, 1)] * 3


def test_b2_positions_of_a_padded_row_are_its_own():
    """One position vector shared by the batch; gpt2 looks positions up in a table."""
    model, prompts = helpers.model("gpt2"), [ROWS[1], ROWS[0]]  # six columns of padding
    details = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True}
    batch = helpers.batch(prompts)
    mask = batch["attention_mask"].bool()
    drafter = OracleDrafter(known("gpt2", [1, 0]), SCHEDULES[:2])
    with helpers.forwards(model) as calls:
        run = helpers.speculate(model, drafter, TREES["tree"], **batch, **details)
    positions = [call["position_ids"] for call in calls]
    assert torch.equal(positions[0][mask], (mask.cumsum(-1) - 1)[mask])
    committed = mask.sum(-1) + run.rounds[0].num_committed
    for round, given in zip(run.rounds[1:], positions[1:], strict=True):
        assert torch.equal(given, committed[:, None] - 1 + topology.depths(round.tree.parents))
        committed = committed + round.num_committed
    for row, prompt in enumerate(prompts):
        own = helpers.plain(model, input_ids=torch.tensor([prompt]), **details)
        for mine, theirs in zip(run.output.logits, own.logits, strict=True):
            assert torch.allclose(mine[row], theirs[0], atol=1e-6, rtol=0)  # generate keeps logits in float32


def test_b2_the_drafter_has_positions_of_its_own_too():
    """The same fault inside the drafter shows in its drafts alone."""
    model, draft = helpers.model("gpt2"), helpers.model("gpt2", seed=1)

    def drafts(rows: list[int]) -> list[list[Any]]:
        batch = helpers.batch([ROWS[row] for row in rows])
        with helpers.forwards(draft) as calls:
            run = helpers.speculate(model, ModelDrafter(draft), trees.Chain(3), **batch, max_new_tokens=16)
        mask = batch["attention_mask"].bool()
        # It also runs the first new token, which fills the last column.
        assert torch.equal(calls[0]["position_ids"][mask], (mask.cumsum(-1) - 1)[mask])
        return [round.tree.tokens[:, :4].tolist() for round in run.rounds]

    together, short = drafts([1, 0]), drafts([0])
    for pair, own in zip(together, short, strict=False):
        width = min(len(pair[1]), len(own[0]))
        assert pair[1][:width] == own[0][:width]
    assert len(short) > 4


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_b3_garbage_in_rejected_slots_leaves_every_draft_as_it_is(family):
    """Rejected slots that are not masked cost acceptance, not correctness: only the drafts show it."""
    model, draft = helpers.model(family), helpers.model(family, seed=1)

    def drafts() -> list[Any]:
        drafter, batch = ModelDrafter(draft), helpers.batch(ROWS)
        run = helpers.speculate(model, drafter, TREES["tree"], **batch, max_new_tokens=16)
        return [(round.tree.tokens.tolist(), round.tree.scores.tolist()) for round in run.rounds]

    clean = drafts()
    with poisoned(1e4):
        assert drafts() == clean


@functools.cache
def ends(family: str) -> list[int]:
    """Tokens that end rows 1 and 3 early."""
    return [alone(family, 1)[4], alone(family, 3)[2]]


def cut(tokens: list[int], stops: list[int]) -> list[int]:
    """A text up to its first end token."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stops), tokens)


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_b4_every_order_of_the_rows_gives_each_prompt_its_text(order):
    """Slot index and batch row mixed up, also after rows have stopped."""
    stops = ends("llama")
    run = speculate("llama", list(order), "tree", eos_token_id=stops)
    for place, row in enumerate(order):
        expected = cut(alone("llama", row), stops)
        new = run.output[place, WIDTH:].tolist()
        assert new == expected + [0] * (len(new) - len(expected))


class Counted(OracleDrafter):
    """Drafts 0, 2, 5 and 1 tokens for the four rows."""

    def children(self, frontier: Frontier, count: int) -> Candidates:
        answer = super().children(frontier, count)
        short = torch.tensor([frontier.depth >= most for most in (0, 2, 5, 1)])
        return Candidates(answer.tokens, answer.log_probs.masked_fill(short[:, None, None], -torch.inf))


@pytest.mark.parametrize("second", ["oracle", "model", "lookup"])
def test_b5_no_placeholder_enters_an_embedding(second):
    """No draft, encoded as a token id."""
    model, draft = helpers.model(), helpers.model("gpt2", seed=1)
    drafter: Any = {
        "oracle": Counted(known("llama", [0, 1, 2, 3]), SCHEDULES),
        "model": ModelDrafter(draft),
        "lookup": PromptLookupDrafter(),
    }[second]
    seen: list[int] = []
    tables = [
        module for owner in (model, draft) for module in owner.modules() if isinstance(module, torch.nn.Embedding)
    ]
    hooks = [
        table.register_forward_pre_hook(
            lambda module, args: seen.extend([int(args[0].min()), int(args[0].max() - module.num_embeddings)])
        )
        for table in tables
    ]
    try:
        run = helpers.speculate(model, drafter, trees.Chain(5), **helpers.batch(ROWS), max_new_tokens=24)
    finally:
        for hook in hooks:
            hook.remove()
    assert [row[WIDTH:] for row in run.output.tolist()] == [alone("llama", row) for row in range(4)]
    assert min(seen[::2]) >= 0
    assert max(seen[1::2]) < 0
    for round in run.rounds:
        assert bool(((round.tree.tokens >= 0) & (round.tree.tokens < 97)).all()), "padding repeats the root"
    if second == "oracle":
        assert [1, 3, 6, 2] in [round.tree.num_nodes.tolist() for round in run.rounds]


def test_b7_a_missing_padding_id_is_found_before_the_first_forward():
    """Validation that comes too late: rows that stop early need a padding id."""
    model = copy.deepcopy(helpers.model())
    model.generation_config.pad_token_id = None
    stops = {"stopping_criteria": [EosTokenCriteria(torch.tensor([5]))], "max_new_tokens": 4}
    with helpers.forwards(model) as calls, pytest.raises(UnsupportedError, match="set pad_token_id"):
        SpeculativeGenerator(model).generate(**helpers.batch(ROWS[:2]), **stops)
    assert not calls
    SpeculativeGenerator(model).generate(**helpers.batch(ROWS[:1]), **stops)


class Watched(OracleDrafter):
    """Remembers about which rows it was asked, per round."""

    def start(self, context: Any) -> None:
        super().start(context)
        self.asked: list[Tensor] = []

    def children(self, frontier: Frontier, count: int) -> Candidates:
        rows = frontier.valid.any(-1)
        if frontier.depth == 0:
            self.asked.append(rows)
        self.asked[-1] = self.asked[-1] | rows
        return super().children(frontier, count)


@pytest.mark.parametrize("stop", [0, 1, 5])
@pytest.mark.parametrize("tree", TREES)
def test_b7_a_row_that_stopped_gets_padding_and_no_drafts(stop, tree):
    """One row ends at its first, second or sixth token while another runs on to 40."""
    reference = known("llama", [0, 1, 2, 3], 40)
    end = alone("llama", 1)[stop]
    drafter = Watched(reference, [[5, 0, 3], [5], [2, 5], [1, 4]])
    run = helpers.speculate(
        helpers.model(), drafter, TREES[tree], **helpers.batch(ROWS), max_new_tokens=40, eos_token_id=end
    )
    for row in range(4):
        expected = cut(alone("llama", row, 40), [end])
        new = run.output[row, WIDTH:].tolist()
        assert new == expected + [0] * (len(new) - len(expected))
    stopped = torch.zeros(4, dtype=torch.bool)
    for before, round in itertools.pairwise(run.rounds):
        committed = before.num_committed
        stopped |= (committed > 0) & (before.committed.gather(1, (committed - 1).clamp_min(0)[:, None])[:, 0] == end)
        assert round.tree.num_nodes[stopped].eq(1).all(), "a stopped row was drafted for"
        assert round.num_committed[stopped].eq(0).all()
        assert round.tree.width == int(round.tree.num_nodes[~stopped].max()), "width that no running row uses"
        if len(drafter.asked) > before.index:
            assert not bool((drafter.asked[before.index] & stopped).any()), "the drafter was asked about a stopped row"
    assert bool(stopped[1])


RULES = [verify.TargetOnly, verify.Rejection, verify.BlockVerification, verify.TreeRejection, verify.Traversal]


@pytest.mark.parametrize("rule", [None, verify.Typical, *RULES])
@pytest.mark.parametrize("do_sample", [False, True])
def test_b8_every_combination_gives_all_its_tokens_or_says_why_not(rule, do_sample):
    """Batched speculation that ends silently with no result."""
    served, request = 0, {**helpers.batch(ROWS[:2]), "max_new_tokens": 6, "do_sample": do_sample, "pad_token_id": 0}
    sampled = [trees.Sampled((1, 1)), trees.Sampled((2, 1))]
    for tree in (*TREES.values(), trees.BestFirst(4), *sampled):
        try:
            generator = SpeculativeGenerator(helpers.model(), PromptLookupDrafter(), tree, rule and rule())
            output = generator.generate(**request)
        except SpecdecError:
            continue
        assert output.shape == (2, 9 + 6)
        served += 1
    assert served > 0


LAYOUTS = {
    "left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
    "hole": [[1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1]],
    "none": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "gemma4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_anywhere_gives_what_plain_generate_gives(family, layout):
    """The kind of b2: a mask is a mask, wherever its zeros are; also where plain generate's own answer is odd."""
    model = helpers.model(family)
    request = {
        "input_ids": torch.tensor([[21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 35, 36]]),
        "attention_mask": torch.tensor(LAYOUTS[layout]),
        "max_new_tokens": 20,
    }
    reference = helpers.plain(model, **request)
    drafter = OracleDrafter(reference, [[5, 0, 2, None], [1, 4, 0, 3]])
    run = helpers.speculate(model, drafter, TREES["tree"], **request)
    helpers.assert_equal(run, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_in_a_batch_with_padding_equals_itself_without(family):
    """The smallest batch that has padding."""
    model = helpers.model(family)
    ids = torch.tensor([[0] * 6 + ROWS[0]])
    mask = torch.tensor([[0] * 6 + [1] * 3])
    drafter = OracleDrafter(torch.cat([ids, torch.tensor([alone(family, 0)])], 1), [3, 0, 2, None])
    run = helpers.speculate(model, drafter, TREES["tree"], input_ids=ids, attention_mask=mask, max_new_tokens=24)
    assert run.output[0, 9:].tolist() == alone(family, 0)
