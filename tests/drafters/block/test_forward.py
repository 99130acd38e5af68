"""Loaded drafters compute what an independent, slot-by-slot reference computes from the same files."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import drafters, trees
from specdec.drafters import _buffers
from specdec.drafters.block import BlockContext, BlockDrafter, heads
from specdec.errors import ShapeError, SpecdecError, UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import Frontier
from tests import helpers
from tests.drafters.block import reference
from tests.drafters.block.checkpoints import DIALECTS, Written, write

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module", params=DIALECTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, BlockDrafter]:
    """A checkpoint of each published format, and what was made of it."""
    written = write(tmp_path_factory.mktemp(request.param), request.param)
    drafter = drafters.from_pretrained(written.folder, helpers.model())
    return written, drafter


@torch.no_grad()
def expected(written: Written, features: torch.Tensor, anchor: int, rows: int) -> reference.Drafted:
    target = helpers.model()
    embed, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return reference.draft(
        written.weights, written.reference, features, anchor, rows=rows, **written.matrices(embed, head)
    )


def start(drafter: BlockDrafter, lengths: list[int], anchors: list[int], seed: int) -> list[torch.Tensor]:
    """Starts a request with texts of these lengths, padded on the left; returns their features."""
    source = torch.Generator().manual_seed(seed)
    width, size = max(lengths) + 1, drafter.model.fc.in_features
    features = torch.randn(len(lengths), width, size, generator=source, dtype=torch.float64)
    tokens = torch.randint(1, 97, (len(lengths), width), generator=source)
    tokens[:, -1] = torch.tensor(anchors)
    mask = torch.arange(width) >= width - 1 - torch.tensor(lengths)[:, None]
    features[~mask] = float("nan")  # padding may hold anything
    drafter.start(DraftContext(tokens, mask, 97, features=features))
    return [rows[width - 1 - length : -1] for rows, length in zip(features, lengths, strict=True)]


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 14), min_size=1, max_size=3), extra=st.integers(0, 4), seed=st.integers(0, 9))
def test_slots_and_logits(pair: Any, lengths: list[int], extra: int, seed: int) -> None:
    """Windows, causality, positions, the edge of the block, blocks longer than the trained one, texts of any length."""
    written, drafter = pair
    anchors = [(7 * seed + index) % 97 for index in range(len(lengths))]
    features = start(drafter, lengths, anchors, seed)
    rows = drafter.model.spec.block_size + extra
    held = drafter._context
    assert held is not None
    with torch.no_grad():
        hidden = drafter.model.slots(torch.tensor(anchors), held, rows)
        logits = drafter.model.logits(hidden)
    for index, anchor in enumerate(anchors):
        wanted = expected(written, features[index], anchor, rows)
        torch.testing.assert_close(hidden[index], wanted.hidden, **CLOSE)
        torch.testing.assert_close(logits[index], wanted.logits, **CLOSE)


@settings(max_examples=10)
@given(seed=st.integers(0, 50), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_children_follow_their_path(pair: Any, seed: int, temperature: float) -> None:
    """The law at each node of a random frontier, level by level, is that of the reference along the node's path."""
    written, drafter = pair
    lengths, anchors, spec = [5, 3], [11, 12], drafter.model.spec
    drafter = BlockDrafter(drafter.model, temperature=temperature)
    features = start(drafter, lengths, anchors, seed)
    rows = spec.rows(drafter.length)
    wanted = [expected(written, rows_, anchor, rows) for rows_, anchor in zip(features, anchors, strict=True)]
    source = torch.Generator().manual_seed(seed)
    paths = [[[anchor]] for anchor in anchors]
    frontier = Frontier.from_root(torch.tensor(anchors), torch.ones(2, dtype=torch.bool))
    for slot in range(drafter.length):
        found = drafter.children(frontier, 6)
        for row in range(2):
            for node, path in enumerate(paths[row]):
                ids, scores = law(wanted[row], written, slot, path, drafter)
                dense = torch.zeros(97, dtype=torch.float64).scatter(0, ids, (scores / temperature).softmax(-1))
                torch.testing.assert_close(found.law(97)[row, node], dense, **CLOSE)
                best = (scores / temperature).log_softmax(-1).sort(descending=True, stable=True)
                torch.testing.assert_close(found.log_probs[row, node], best.values[:6], **CLOSE)
                assert set(found.tokens[row, node].tolist()) == set(ids[best.indices[:6]].tolist())
                if spec.confidence:
                    sure = drafter.confidence(frontier)[row, node]
                    assert float(sure) == pytest.approx(wanted[row].confidence(slot, path[-1]), abs=1e-10)
        parents = torch.randint(0, frontier.tokens.shape[1], (2, 3), generator=source)
        tokens = torch.randint(0, 97, (2, 3), generator=source)
        paths = [
            [[*paths[row][parent], token] for parent, token in zip(parents[row], tokens[row].tolist(), strict=True)]
            for row in range(2)
        ]
        frontier = Frontier(tokens, parents, torch.ones(2, 3, dtype=torch.bool), slot + 1)
    none = drafter.children(frontier, 6)
    assert bool((none.log_probs == -torch.inf).all()), "there is no slot behind the last one"


def law(
    wanted: reference.Drafted, written: Written, slot: int, path: list[int], drafter: BlockDrafter
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids and scores of a slot after a path."""
    if written.reference.get("selector_top_k"):
        return wanted.selector_scores(slot, path[-1])
    scores = wanted.markov_logits(slot, path)
    ids = torch.arange(len(scores))
    shortlist = drafter.model.shortlist
    return ids if shortlist is None else shortlist.ids, scores


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_tensor_counts(dialect: str, tmp_path: Path) -> None:
    """A tensor that is loaded and not used would go unnoticed by comparisons with a reference that forgets it, too."""
    written = write(tmp_path, dialect)
    drafter = drafters.from_pretrained(written.folder, helpers.model())
    start(drafter, [4], [9], 0)
    frontier = Frontier.from_root(torch.tensor([9]), torch.ones(1, dtype=torch.bool))

    def outcome() -> torch.Tensor:
        start(drafter, [4], [9], 0)
        laws = [drafter.children(frontier, 5).law(97).flatten()]
        later = Frontier(torch.tensor([[3]]), torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool), 1)
        laws += [drafter.children(dataclasses.replace(later, depth=1), 5).law(97).flatten()]
        if drafter.model.spec.confidence:
            laws.append(drafter.confidence(later).flatten())
        return torch.cat(laws)

    before = outcome()
    for name, parameter in drafter.model.named_parameters():
        kept = parameter.data.clone()
        parameter.data += 0.3 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(1), dtype=kept.dtype)
        assert not torch.allclose(outcome(), before, rtol=1e-6, atol=1e-9), name
        parameter.data = kept
    assert torch.equal(outcome(), before)


@pytest.mark.parametrize("dialect", ["dflash_nested", "dflash2", "speculators_dspark"])
def test_a_window_is_all_that_is_kept(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that grow unevenly, in small steps: the outputs are those of the whole text, the buffers stay small."""
    monkeypatch.setattr(_buffers, "STEP", 3)
    written = write(tmp_path, dialect)
    model = drafters.from_pretrained(written.folder, helpers.model()).model
    features = torch.randn(2, 60, model.fc.in_features, dtype=torch.float64)
    kept, anchors, lengths = BlockContext(model.spec.windows, 2, "cpu"), torch.tensor([11, 12]), [0, 0]
    for step in ([4, 2], [0, 3], [5, 1], [1, 1], [3, 6], [0, 4], [6, 2], [2, 5], [5, 5], [4, 6]):
        new = torch.stack(
            [
                torch.nn.functional.pad(rows[length : length + count], (0, 0, 0, 6 - count), value=torch.nan)
                for rows, length, count in zip(features, lengths, step, strict=True)
            ]
        )
        lengths = [length + count for length, count in zip(lengths, step, strict=True)]
        with torch.no_grad():
            model.extend(kept, new, torch.tensor(step))
            hidden = model.slots(anchors, kept, 6)
        for row, length in enumerate(lengths):
            wanted = expected(written, features[row, :length], int(anchors[row]), 6)
            torch.testing.assert_close(hidden[row], wanted.hidden, **CLOSE)
    for layer in kept.layers:
        bounded = layer.window is not None
        assert (layer.base > 0) == bounded
        assert layer.slots < (max(lengths) - 10 if bounded else 60)


@pytest.mark.parametrize("dialect", ["dflash2", "dspark_rnn", "dflash_flat"])
@pytest.mark.parametrize("nodes", [7, 16, 40])
def test_the_best_paths_are_drafted(dialect: str, nodes: int, tmp_path: Path) -> None:
    """Growth level by level gives the tree that an enumeration of all paths, scored by the reference, gives."""
    written = write(tmp_path, dialect)
    drafter = drafters.from_pretrained(written.folder, helpers.model(), length=3, temperature=0.15)
    features = start(drafter, [6], [11], 4)
    wanted = expected(written, features[0], 11, drafter.model.spec.rows(3))
    best: list[tuple[float, tuple[int, ...]]] = []

    def enumerate_(path: tuple[int, ...], score: float) -> None:
        if len(path) > 3:
            return
        ids, scores = law(wanted, written, len(path) - 1, list(path), drafter)
        log_probs = (scores / 0.15).log_softmax(-1)
        # No child beyond the budget can be among the best: its better siblings would be before it.
        for rank in log_probs.argsort(descending=True, stable=True)[:nodes].tolist():
            child = (*path, int(ids[rank]))
            best.append((score + float(log_probs[rank]), child[1:]))
            if score + float(log_probs[rank]) >= cut:
                enumerate_(child, best[-1][0])

    tree = trees.BestFirst(nodes).grow(drafter, torch.tensor([11]), torch.tensor([3]), nodes, vocab_size=97)
    cut = float(tree.scores[tree.scores > -torch.inf].min()) - 1e-9
    enumerate_((11,), 0.0)
    chosen = {path for _, path in sorted(best, key=lambda item: -item[0])[:nodes]}
    drafted = set()
    for node in range(1, int(tree.num_nodes[0])):
        path, place = (), node
        while place > 0:
            path, place = (int(tree.tokens[0, place]), *path), int(tree.parents[0, place])
        drafted.add(path)
    assert drafted == chosen
    assert len({len(path) for path in drafted}) > 1, "the tree should have several levels"


def test_by_hand_mistakes_are_told(tmp_path: Path) -> None:
    """Whoever uses the parts gets no wrong numbers from features, counts or windows that do not fit."""
    model = drafters.from_pretrained(write(tmp_path, "dflash_nested").folder, helpers.model()).model
    width, two = model.fc.in_features, torch.tensor([5, 5])
    features = torch.zeros(2, 5, width, dtype=torch.float64)
    for wrong, counts in ((features[..., 1:], two), (features[:1], two[:1]), (features, torch.tensor([7, 5]))):
        with pytest.raises(ShapeError, match="expected"):
            model.extend(model.context(2), wrong, counts)
    with pytest.raises(ShapeError, match=r"windows \(8, 8\).*see BlockModel.context"):
        model.extend(BlockContext((8, 8), batch=2, device="cpu"), features, two)
    with pytest.raises(SpecdecError, match="never extended"):
        model.slots(torch.tensor([3]), model.context(), 4)
    kept = model.context(2)
    model.extend(kept, features, two)
    for anchors, rows in ((torch.tensor([3]), 4), (torch.tensor([3, 4]), 1)):
        with pytest.raises(ShapeError, match="expected as many anchors, and 2 rows or more"):
            model.slots(anchors, kept, rows)
    for batch in (0, -1, 1.5, True, "x"):
        with pytest.raises(UnsupportedError, match=r"context\(batch=.*\): expected a whole number above 0"):
            inspect.unwrap(drafters.BlockModel.context)(model, batch)  # the type hook of the tests would come first
    slots, extend = (inspect.unwrap(getattr(drafters.BlockModel, name)) for name in ("slots", "extend"))
    for call in (lambda: slots(model, two, None, 4), lambda: extend(model, model.spec, features, two)):
        with pytest.raises(ShapeError, match=r"expected a BlockContext \(BlockModel.context makes one\), got"):
            call()
    with pytest.raises(ShapeError, match="slots: anchors must be a tensor, got int"):
        slots(model, 3, kept, 4)
    with pytest.raises(ShapeError, match=r"slots: anchors must be token ids, int64 or int32, got torch\.bool"):
        slots(model, two > 0, kept, 4)
    with pytest.raises(ShapeError, match=r"extend: counts must hold integers, got torch\.float32"):
        extend(model, model.context(2), features, two.float())
    bare = drafters.BlockModel(model.spec)
    with pytest.raises(UnsupportedError, match=r"no embedding of its own; take the target's: model.borrow\(target\)"):
        bare.slots(torch.tensor([3]), bare.context(), 4)
    with pytest.raises(UnsupportedError, match="no confidence head"):
        model.confidence(torch.zeros(1, 48), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("size", [100, 8192, 9000, 20_001])
def test_the_best_of_a_large_vocabulary(size: int) -> None:
    """Found part by part, they are those that are found at once."""
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size))
    values, places = heads.best(logits, 16)
    assert torch.equal(values, logits.topk(16).values)
    assert torch.equal(logits.gather(-1, places), values)
