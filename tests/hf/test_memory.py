"""The estimate of a cache's memory is what the cache then takes."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpeculativeGenerator, kv, trees
from specdec.errors import UnsupportedError
from specdec.hf import cache, estimate_memory, fixed_cache
from specdec.hf.cache import RowCache
from specdec.testing import OracleDrafter
from specdec.types import DraftTree, TargetLaw
from specdec.verify import StepRule
from tests import helpers
from tests.hf.device_runs import SERVED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": torch.zeros(1, 5)}, "prompt is a number"),
        ({"batch": -1}, "batch is a number"),
        ({"cache": kv.Int8()}, "takes a kv.KVCacheConfig, got Int8"),
        ({"model": "llama"}, "takes a transformers model, got str"),
        ({"execution": "auto"}, "'host' or 'device', got 'auto'"),
    ],
)
def test_what_cannot_be_estimated_is_refused(change: dict[str, Any], message: str) -> None:
    request = {"model": helpers.model(), "prompt": 5, "new_tokens": 4, **change}
    with pytest.raises(UnsupportedError, match=message):
        inspect.unwrap(estimate_memory)(request.pop("model"), **request)


class RejectAll(StepRule):
    """Keeps no draft, so that all rows advance together."""

    def step(
        self, tree: DraftTree, node: Tensor, law: TargetLaw, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return law.draw(generator), torch.full_like(node, -1)


STAR = trees.Fixed([(rank,) for rank in range(3)])


@pytest.mark.parametrize("family", helpers.DISTINCT)
@pytest.mark.parametrize("codecs", [None, kv.INT8, kv.KVCacheConfig(keys=kv.Int4(group=4), values=kv.Int4(group=4))])
def test_e20_an_estimate_is_within_a_tenth(
    family: str, codecs: kv.KVCacheConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GROWTH", 4)
    sizes, windows = [0], set[int | None]()
    keep = RowCache.keep

    def measured(self: RowCache, *arguments: Any) -> None:
        stored = sum(rows.bytes for layer in self.row_layers for rows in layer.stored.values())
        sizes.append(stored + sum(layer.bytes for layer in self.recurrent.layers))
        windows.update(layer.sliding_window for layer in self.row_layers)
        keep(self, *arguments)

    monkeypatch.setattr(RowCache, "keep", measured)
    target = helpers.model(family)
    never = OracleDrafter(torch.zeros(4, 100, dtype=torch.int64), [0])
    SpeculativeGenerator(target, never, STAR, RejectAll(), codecs).generate(
        **helpers.batch(helpers.FOUR), max_new_tokens=40, do_sample=False
    )
    request: dict[str, Any] = {"prompt": 17, "nodes": 3, "batch": 4, "cache": codecs}
    assert estimate_memory(target, new_tokens=40, **request) == pytest.approx(max(sizes), rel=0.1)
    recurrent = estimate_memory(target, **{**request, "prompt": 0}, new_tokens=0)  # what does not grow
    longer = (estimate_memory(target, new_tokens=400, **request) - recurrent) / (max(sizes) - recurrent)
    assert longer > 2 if None in windows else longer < 1.3


@pytest.mark.parametrize("family", [family for family in helpers.DISTINCT if family in SERVED])
@pytest.mark.parametrize(
    ("batch", "codecs"),
    [(1, None), (4, kv.INT8), (4, kv.KVCacheConfig(keys=kv.Int4(group=4), values=kv.Int4(group=4)))],
    ids=["one row", "int8", "int4"],
)
def test_e20_buffers_of_device_rounds_are_what_was_estimated(
    family: str, batch: int, codecs: kv.KVCacheConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "GROWTH", 4)
    monkeypatch.setattr(fixed_cache, "GROWTH", 4)
    target = helpers.model(family)
    generator = SpeculativeGenerator(target, tree=trees.Chain(3), cache=codecs, execution="device")
    generator.generate(torch.randint(2, 9, (batch, 17)), max_new_tokens=16, do_sample=False, pad_token_id=0)
    held = generator._programs._program.cache
    buffers = [part for stack in held.stacks for part in stack.parts]
    buffers += [buffer for buffer in held.changed if buffer.dim() > 1]
    estimate = estimate_memory(target, prompt=17, new_tokens=16, nodes=3, batch=batch, cache=codecs, execution="device")
    assert estimate == sum(part.nbytes for part in buffers)
