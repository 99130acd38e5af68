"""On a GPU: the same trees as on the CPU, without a host read, and capturable as a graph."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdec.protocols import DraftContext, TreeBuilder
from specdec.trees import BestFirst, Chain, Fixed, Sampled, merge, topology
from specdec.types import Candidates, DraftTree, Frontier
from tests.trees.lattice import same_tree

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

BUILDERS = [
    Chain(8),
    BestFirst(15, depth=8),
    BestFirst(15, temperature=1.5, depth=4, width=3),
    Fixed([(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]),
]
ROOT, LIMITS = torch.tensor([3, 4, 5]), torch.tensor([99, 2, 0])


class Marginals:
    """Independent laws by depth, as a block drafter without a selector gives them."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, device: str, vocab: int = 40) -> None:
        logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0))
        best = logits.log_softmax(-1).topk(vocab)
        self._scores, self._tokens = best.values.to(device), best.indices.to(device)

    def start(self, context: DraftContext) -> None: ...

    def commit(self, tokens: Tensor, counts: Tensor, features: Tensor | None = None) -> None: ...

    def finish(self) -> None: ...

    def children(self, frontier: Frontier, count: int) -> Candidates:
        shape = (*frontier.tokens.shape, count)
        tokens, scores = self._tokens[frontier.depth, :count], self._scores[frontier.depth, :count]
        return Candidates(tokens.expand(shape), scores.expand(shape))


def grow(builder: TreeBuilder, device: str) -> Callable[[], DraftTree]:
    drafter, root, limits = Marginals(device), ROOT.to(device), LIMITS.to(device)
    return lambda: builder.grow(drafter, root, limits, builder.nodes, vocab_size=40)


@pytest.fixture
def no_host_reads() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_same(tree: DraftTree, expected: DraftTree) -> None:
    """The same nodes; a device may add up a path's score in another order."""
    width = min(tree.width, expected.width)
    scores = tree.scores.cpu()
    torch.testing.assert_close(scores[:, :width], expected.scores[:, :width])
    scores[:, :width] = expected.scores[:, :width]
    assert same_tree(DraftTree(tree.tokens.cpu(), tree.parents.cpu(), tree.num_nodes.cpu(), scores), expected)


@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
def test_same_tree_without_a_host_read(builder: TreeBuilder, request: pytest.FixtureRequest) -> None:
    grown = grow(builder, "cuda")
    grown()  # index tensors of a shape are made once
    request.getfixturevalue("no_host_reads")
    tree = grown()
    torch.cuda.set_sync_debug_mode("default")
    topology.check(tree)
    assert_same(tree, grow(builder, "cpu")())


@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
def test_a_graph_replays_it(builder: TreeBuilder) -> None:
    grown = grow(builder, "cuda")
    grown()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = grown()
    graph.replay()
    assert_same(tree, grow(builder, "cpu")())


def test_sampled_and_merged_trees_without_a_host_read(request: pytest.FixtureRequest) -> None:
    sampled, best, chain = (grow(b, "cuda") for b in (Sampled((3, 2, 1)), BestFirst(15, depth=4), Chain(6)))
    sampled()
    merge([best(), chain()])
    request.getfixturevalue("no_host_reads")
    drawn = sampled()
    merged = merge([best(), chain()])
    torch.cuda.set_sync_debug_mode("default")
    topology.check(drawn)
    topology.check(merged)
    assert drawn.num_nodes.tolist() == [16, 10, 1]
    assert_same(merged, merge([grow(BestFirst(15, depth=4), "cpu")(), grow(Chain(6), "cpu")()]))


@pytest.mark.parametrize("nodes", [1, 2, 16, 65, 128])
def test_the_algebra_agrees_with_the_cpu(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    parents = torch.stack([torch.randint(0, max(1, node), (4,), generator=generator) for node in range(nodes)], 1)
    parents[:, 0] = -1
    assert torch.equal(topology.ancestor_matrix(parents.cuda()).cpu(), topology.ancestor_matrix(parents))
    matrix = topology.ancestor_matrix(parents)
    assert torch.equal(topology.unpack(topology.pack(matrix.cuda()), nodes).cpu(), matrix)
    # Reduced precision for matrix products must not reach the solve.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(topology.ancestor_matrix(parents.cuda()).cpu(), matrix)
    torch.set_float32_matmul_precision(before)
