"""Trees as text."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.trees import render, topology
from specdec.types import DraftTree, Round, Verdict
from tests.trees.random_trees import caught, lineage, trees

TREE = DraftTree(
    tokens=torch.tensor([[7, 5, 6, 8, 9], [3, 4, 3, 3, 3]]),
    parents=torch.tensor([[-1, 0, 1, 1, 0], [-1, 0, -1, -1, -1]]),
    num_nodes=torch.tensor([5, 2]),
    scores=torch.tensor([[0.0, -0.5, -1.25, -1.5, -12.0], [0.0, -0.25] + [-torch.inf] * 3]),
)
VERDICT = Verdict(path=torch.tensor([[1, 3], [-1, -1]]), num_accepted=torch.tensor([2, 0]), bonus=torch.tensor([11, 4]))


def test_a_verified_batch() -> None:
    text = """\
row 0
  node   score  token
*    0    0.00  7
*    1   -0.50  ├─ 5
     2   -1.25  │  ├─ 6
*    3   -1.50  │  └─ 8
     4  -12.00  └─ 9
accepted 2 of 4, bonus 11

row 1
  node   score  token
*    0    0.00  3
     1   -0.25  └─ 4
accepted 0 of 1, bonus 4"""
    assert render(TREE, VERDICT) == text


def test_a_path_a_row_and_a_decoder() -> None:
    text = """\
row 0
  node   score  token
*    0    0.00  ' seven'
*    1   -0.50  ├─ ' five'
     2   -1.25  │  ├─ '\\n'
*    3   -1.50  │  └─ 'it'
     4  -12.00  └─ '?'
accepted 2 of 4"""
    words = {7: " seven", 5: " five", 6: "\n", 8: "it", 9: "?"}
    assert render(TREE, VERDICT.path, words.__getitem__, row=0) == text


def test_a_round_brings_its_outcome() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    done = Round(
        index=1,
        tree=TREE,
        path=VERDICT.path,
        num_accepted=VERDICT.num_accepted,
        committed=VERDICT.path,
        num_committed=nothing,
        budget=4,
    )
    assert render(done) == render(TREE, VERDICT.path)
    with pytest.raises(ValueError, match="its own outcome"):
        render(done, VERDICT)


def test_a_tree_without_a_verdict() -> None:
    assert render(TREE, row=1).splitlines()[2:] == ["     0    0.00  3", "     1   -0.25  └─ 4", "1 drafted"]


@pytest.mark.parametrize("row", [2, -1])
def test_rows_are_checked(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of a batch of 2"):
        render(TREE, row=row)


LINE = re.compile(r"([* ]) +(\d+) +(\S+)  ([│├└─ ]*)(\d+)")


def law_drawing(draw: object, tree: DraftTree, seed: int) -> None:
    """The tree and the accepted nodes can be read back from the text."""
    leaf = torch.tensor([seed % size for size in tree.num_nodes.tolist()])
    path = topology.path_to(tree, leaf)
    for row in range(tree.tokens.shape[0]):
        lines = draw(tree, path, row=row).splitlines()
        body = [line for line in lines if re.match(r"[* ] +\d", line)]
        assert len(body) == int(tree.num_nodes[row])
        above: list[int] = []
        for line in body:
            mark, node, score, lead, token = LINE.fullmatch(line).groups()
            above = [*above[: len(lead) // 3], int(node)]
            assert above == lineage(tree, row, int(node))
            assert int(token) == tree.tokens[row, int(node)]
            assert float(score) == pytest.approx(float(tree.scores[row, int(node)]), abs=0.006)
            assert (mark == "*") == (int(node) in lineage(tree, row, int(leaf[row])))
        assert lines[-1] == f"accepted {len(lineage(tree, row, int(leaf[row]))) - 1} of {len(body) - 1}"


@given(tree=trees(), seed=st.integers(0, 2**32))
def test_the_drawing_can_be_read_back(tree: DraftTree, seed: int) -> None:
    law_drawing(render, tree, seed)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda tree, path, row: render(tree, path - 1, row=row),
        lambda tree, path, row: render(tree, path, row=row).replace("│  ", ""),
        lambda tree, path, row: render(tree, path, row=0),  # noqa: ARG005 - the mistake
    ],
    ids=["path shifted", "indent lost", "first row"],
)
def test_another_drawing_is_caught(mutant: object) -> None:
    caught(law_drawing, mutant, tree=trees(), seed=st.integers(0, 2**32))
