"""The verifier of a request that names none: lossless, stepwise, and fit for the builder."""

import pytest

from specdec.trees import BestFirst, Chain, Sampled, sampled_chain
from specdec.verify import Rejection, TargetOnly, TreeRejection, default_verifier


@pytest.mark.parametrize(
    ("builder", "do_sample", "expected"),
    [
        (Chain(nodes=3), True, TargetOnly),
        (BestFirst(nodes=4), True, TargetOnly),
        (sampled_chain(3), True, Rejection),
        (Sampled((2, 1)), True, TreeRejection),
        (sampled_chain(3), False, TargetOnly),
        (Sampled((2, 1)), False, TargetOnly),
    ],
)
def test_default_verifier(builder, do_sample, expected):
    rule = default_verifier(builder, do_sample=do_sample)
    assert type(rule) is expected
    rule.check(builder)
    assert rule.lossless
    assert rule.stepwise
