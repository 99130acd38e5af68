import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from specdec import DraftTree, Frontier
from specdec.errors import ShapeError
from specdec.protocols import Drafter, Target
from specdec.testing import TableDrafter, TableTarget, table_model

TABLE = torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
PROMPT = torch.tensor([[0, 1], [2, 2]])


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(
        tokens=torch.tensor([tokens, tokens]),
        parents=torch.tensor([parents, parents]),
        num_nodes=torch.tensor([len(tokens)] * 2),
        scores=torch.zeros(2, len(tokens)),
    )


def target() -> TableTarget:
    table = TableTarget(TABLE, PROMPT)
    table.prefill()
    return table


def test_they_fit_their_seams():
    assert isinstance(TableTarget(TABLE, PROMPT), Target)
    assert isinstance(TableDrafter(TABLE), Drafter)


def test_the_law_at_every_node_is_the_row_of_its_token():
    table = TableTarget(TABLE, PROMPT)
    assert torch.allclose(table.prefill().logits.softmax(-1)[:, 0], TABLE[[1, 2]])
    probs = table.verify(tree([1, 0, 2, 2], [-1, 0, 0, 1])).logits.softmax(-1)
    assert torch.allclose(probs, TABLE[[1, 0, 2, 2]].expand(2, -1, -1))


def test_the_law_is_that_of_the_table_model():
    probs = torch.rand(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs /= probs.sum(-1, keepdim=True)
    text = torch.tensor([[3, 0, 5, 1]])
    expected = table_model(probs)(text).logits[:, -1:].softmax(-1)
    assert torch.allclose(TableTarget(probs, text).prefill().logits.softmax(-1), expected, atol=1e-9)


def test_the_cache_holds_the_committed_paths():
    table = target()
    assert table.lengths.tolist() == [2, 2]
    table.verify(tree([1, 0, 2, 1], [-1, 0, 0, 2]))
    assert table.lengths.tolist() == [2, 2]  # verifying commits nothing
    table.commit(torch.tensor([[0, 2, 3], [0, 0, 0]]), torch.tensor([3, 1]))
    table.verify(tree([0], [-1]))
    table.commit(torch.tensor([[0], [-1]]), torch.tensor([1, 0]))  # the second row has stopped
    assert table.cached == [[0, 1, 1, 2, 1, 0], [2, 2, 1]]
    assert table.lengths.tolist() == [6, 3]
    assert table.passes == 3


@pytest.mark.parametrize(
    ("nodes", "count"),
    [([1], 1), ([0, 3], 2), ([0, 1, 2], 3), ([0, 0], 2), ([0, 4], 2), ([0, -1], 2), ([1, 2], 2)],
    ids=["no root", "no child of the root", "siblings", "the root twice", "no such node", "padding", "rootless"],
)
def test_only_a_root_path_can_be_committed(nodes, count):
    table = target()
    table.verify(tree([1, 0, 2, 1], [-1, 0, 0, 2]))
    with pytest.raises((ShapeError, IndexError)):
        table.commit(torch.tensor([nodes, nodes]), torch.tensor([count, count]))


def test_a_tree_is_committed_once():
    table = target()
    with pytest.raises(ShapeError, match="call verify"):
        table.commit(torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    table.verify(tree([1], [-1]))
    table.commit(torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match="call verify"):
        table.commit(torch.tensor([[0], [0]]), torch.tensor([1, 1]))


@pytest.mark.parametrize("token", [-1, 3])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ShapeError, match=r"0\.\.2"):
        target().verify(tree([1, token], [-1, 0]))
    with pytest.raises(ShapeError, match=r"0\.\.2"):
        TableTarget(TABLE, torch.tensor([[token]]))


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 2, 0], [-1, -1]])
def test_a_node_without_a_parent_before_it_is_refused(parents):
    with pytest.raises(ShapeError, match="parent before it"):
        target().verify(tree([1] * len(parents), parents))


@pytest.mark.parametrize(
    "probs",
    [TABLE[:2], TABLE[0], TABLE * 2, TABLE - torch.tensor([0.2, -0.2, 0.0])],
    ids=["not square", "one law", "sum of 2", "negative"],
)
def test_a_table_that_is_no_table_of_laws_is_refused(probs):
    # Shapes are judged by the annotations while tests run, and by the class itself in use.
    for make in (lambda: TableTarget(probs, PROMPT), lambda: TableDrafter(probs)):
        with pytest.raises((ShapeError, TypeCheckError)):
            make()


def test_a_drafter_may_be_silent_and_a_target_may_not():
    silent = torch.zeros(3, 3)
    roots = Frontier.from_root(torch.tensor([1]), valid=torch.tensor([True]))
    assert (TableDrafter(silent).children(roots, 2).log_probs == -torch.inf).all()
    with pytest.raises(ShapeError, match="sum of 1"):
        TableTarget(silent, PROMPT)


@given(count=st.integers(1, 5), whole_law=st.booleans(), token=st.integers(0, 2))
def test_proposals_are_the_best_tokens_in_falling_order(count, whole_law, token):
    found = TableDrafter(TABLE, whole_law=whole_law).children(
        Frontier.from_root(torch.tensor([token]), valid=torch.tensor([True])), count
    )
    assert found.tokens.shape[2] == min(count, 3)
    best = TABLE[token].sort(descending=True).values[: found.tokens.shape[2]]
    assert torch.equal(found.log_probs[0, 0], best.log())
    assert torch.equal(TABLE[token, found.tokens[0, 0]], best)
    assert (found.probs is not None) == whole_law
    if found.probs is not None:
        assert torch.equal(found.probs[0, 0], TABLE[token])
