"""Parts of the wrong kind are refused by the name of the argument; answers of the wrong kind by the drafter's.

The check is called directly where the type hook of the tests would come first.
"""

import numpy as np
import pytest
import torch
from transformers import MaxTimeCriteria, TopKLogitsWarper

from specdec import Candidates, ShapeError, SpeculativeGenerator, UnsupportedError, control, drafters, trees, verify
from specdec.hf import arguments
from specdec.hf.arguments import check_part
from specdec.ops._checks import require_whole
from specdec.protocols import Controller, Drafter, TreeBuilder, Verifier
from tests import helpers

PROTOCOLS = {"tree": TreeBuilder, "drafter": Drafter, "verifier": Verifier, "controller": Controller}
WRONG = {
    "tree": [5, trees.BestFirst, drafters.PromptLookupDrafter()],
    "drafter": ["lookup", drafters.PromptLookupDrafter, trees.Chain(3)],
    "verifier": ["typical", verify.TargetOnly],
    "controller": ["goodput", control.Goodput],
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in WRONG.items() for part in parts])
def test_a_part_of_the_wrong_kind_is_named(name, part):
    with pytest.raises(UnsupportedError, match=f"^{name}= got"):
        check_part(name, part, PROTOCOLS[name])


def test_a_bare_model_as_drafter_is_told_what_to_do():
    with pytest.raises(UnsupportedError, match="ModelDrafter"):
        check_part("drafter", helpers.model(), Drafter)


def test_num_draft_tokens_may_be_of_numpy():
    assert type(arguments.tree_budget(trees.Chain(5), np.int64(2))) is int


@pytest.mark.parametrize("given", [3, "x"])
def test_a_generator_is_one_of_torch(given):
    with pytest.raises(UnsupportedError, match=r"generator must be a torch\.Generator or None"):
        arguments.check_helpers({}, given, None)


HELPERS = {
    "a name of a processor": ({"logits_processor": "x"}, r"logits_processor must be a list .*got 'x'\.$"),
    "a number among processors": ({"logits_processor": [3]}, "logits_processor must be a list of callables"),
    "a lone processor": ({"logits_processor": TopKLogitsWarper(4)}, r"a single one goes as \[TopKLogitsWarper"),
    "a lone criterion": ({"stopping_criteria": MaxTimeCriteria(3.0)}, r"stopping_criteria.*\[MaxTimeCriteria"),
    "a list as streamer": ({"streamer": []}, r"streamer must have put\(ids\) and end\(\)"),
}


@pytest.mark.parametrize("name", HELPERS)
def test_what_helps_a_call_is_looked_at_before_it_runs(name):
    options, message = HELPERS[name]
    generator = SpeculativeGenerator(helpers.model(), tree=trees.Chain(5))
    with pytest.raises(UnsupportedError, match=message):
        generator.generate(torch.tensor(helpers.ONE), max_new_tokens=4, **options)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.int16, torch.uint8])
def test_ids_that_no_embedding_takes_are_refused(kind):
    generator = SpeculativeGenerator(helpers.model(), tree=trees.Chain(5))
    with pytest.raises(UnsupportedError, match=f"ids of a prompt must be int64 or int32, got {kind}"):
        generator.generate(torch.tensor(helpers.ONE).to(kind), max_new_tokens=4)


@pytest.mark.parametrize("nodes", [0, -1, 1.5, "x", True])
def test_a_budget_is_a_whole_number(nodes):
    with pytest.raises(UnsupportedError, match=rf"Chain\(nodes={nodes!r}\): expected a whole number above 0"):
        require_whole("Chain", nodes=nodes)


@pytest.mark.parametrize("count", [True, 99, -1])
def test_num_draft_tokens_is_a_number_within_the_budget(count):
    generator = SpeculativeGenerator(helpers.model(), tree=trees.Chain(5))
    with pytest.raises(UnsupportedError, match="num_draft_tokens"):
        generator.generate(torch.tensor(helpers.ONE), max_new_tokens=4, num_draft_tokens=count)


class Spoilt(drafters.PromptLookupDrafter):
    """Answers with whatever a test puts here."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def children(self, frontier, count):
        return self.answer


FLAT = Candidates(torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 2))
NEGATIVE = Candidates(
    torch.tensor([[[1, 2]]]),
    torch.tensor([[[0.6, 0.4]]]).log(),
    torch.full((1, 1, helpers.model().config.vocab_size), -0.1),
)


@pytest.mark.parametrize("answer", [None, (1, 2), FLAT], ids=["none", "tuple", "another frontier"])
def test_an_answer_that_does_not_fit_the_question_names_the_drafter(answer):
    generator = SpeculativeGenerator(helpers.model(), Spoilt(answer), trees.BestFirst(4))
    with pytest.raises(ShapeError, match="Spoilt"):
        generator.generate(torch.tensor(helpers.ONE), max_new_tokens=4)


def test_a_law_that_is_none_is_never_drawn_from():
    """Negative probabilities would bend the law of the output in silence."""
    generator = SpeculativeGenerator(helpers.model(), Spoilt(NEGATIVE), trees.Sampled((2,)), verify.TreeRejection())
    with pytest.raises(ShapeError, match="probabilities"):
        generator.generate(torch.tensor(helpers.ONE), max_new_tokens=4, do_sample=True)


@pytest.mark.parametrize("execution", ["device", "auto"])
def test_what_is_compiled_says_so(execution):
    generator = SpeculativeGenerator(helpers.model(), execution=execution)
    assert "compiled" not in repr(generator)
    assert generator.compile() is generator
    assert f"execution={execution}, compiled" in repr(generator)


def test_rounds_of_the_host_are_not_compiled():
    generator = SpeculativeGenerator(helpers.model())
    with pytest.raises(UnsupportedError, match=r"execution='host' runs none.*execution='device' or 'auto'"):
        generator.compile()
