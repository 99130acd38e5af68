"""Random trees for the laws of the index algebra, slow references for them, and the check that a mutant is caught."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdec.types import DraftTree

Path = tuple[int, ...]


def random_tree(seed: int, sizes: list[int], style: str, vocab: int = 0) -> DraftTree:
    """Rows of the given sizes; scores fall along paths, with ties; siblings carry distinct tokens in random order."""
    rng = random.Random(seed)
    width = max(sizes)
    rows: list[tuple[list[int], list[int], list[float]]] = []
    for size in sizes:
        tokens, parents, scores = [rng.randrange(1000)], [-1], [0.0]
        for node in range(1, size):
            reach = {"any": node, "deep": min(node, 3), "chain": 1}.get(style, node)
            parent = 0 if style == "star" else rng.randrange(node - reach, node)
            taken = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
            free = [token for token in range(200) if token not in taken]
            # A small pool makes equal tokens under different parents common.
            tokens.append(rng.choice(free[:4]))
            parents.append(parent)
            scores.append(scores[parent] - rng.choice([0.0, 0.5, 0.5, 1.0]))
        pad = width - size
        rows.append((tokens + tokens[:1] * pad, parents + [-1] * pad, scores + [float("-inf")] * pad))
    probs = None
    if vocab:
        probs = torch.rand(len(sizes), width, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    return DraftTree(
        tokens=torch.tensor([row[0] for row in rows]),
        parents=torch.tensor([row[1] for row in rows]),
        num_nodes=torch.tensor(sizes),
        scores=torch.tensor([row[2] for row in rows]),
        draft_probs=probs,
    )


def trees(vocab: int = 0) -> st.SearchStrategy[DraftTree]:
    """Batches of one to three rows, some of more than one mask word."""
    size = st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(1, 128))
    return st.builds(
        random_tree,
        seed=st.integers(0, 2**32),
        sizes=st.lists(size, min_size=1, max_size=3),
        style=st.sampled_from(["any", "deep", "chain", "star"]),
        vocab=st.just(vocab),
    )


def lineage(tree: DraftTree, row: int, node: int) -> list[int]:
    """Nodes from the root down to `node`, by walking."""
    parents = tree.parents[row].tolist()
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def paths(tree: DraftTree, row: int) -> dict[Path, float]:
    """Tokens below the root of every node in use, with its score."""
    tokens, scores = tree.tokens[row].tolist(), tree.scores[row].tolist()
    found = {}
    for node in range(int(tree.num_nodes[row])):
        path = tuple(tokens[step] for step in lineage(tree, row, node)[1:])
        assert path not in found, f"path {path} stands there twice"
        found[path] = scores[node]
    return found


def caught(law: Callable[..., None], *mutants: object, **inputs: st.SearchStrategy[object]) -> None:
    """Fails unless `law(*mutants, **inputs)` breaks for some example."""

    @settings(max_examples=200, phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False)
    @given(**inputs)
    def run(**drawn: object) -> None:
        law(*mutants, **drawn)

    with pytest.raises(AssertionError):
        run()
