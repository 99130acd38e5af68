"""Device rounds on a GPU: the captured graph, the same program step by step, and the host give the same text.

pytest -m gpu tests/hf/test_device_gpu.py
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from specdec import SpeculativeGenerator, drafters, kv, trees
from specdec.hf import device_rounds
from specdec.testing import tiny_model
from tests.drafters.block.checkpoints import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler and of the debug mode
]

FAMILIES = ["llama", "gemma3", "qwen3", "gemma4", "qwen3_next", "qwen3_5"]
NEW = {"max_new_tokens": 60, "pad_token_id": 0}


def model_of(family: str) -> Any:
    model = tiny_model(family, dtype=torch.float32).cuda()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # eager ones ask the host
    return model


def prompts(batch: int) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    ids = torch.randint(2, 9, (batch, 12))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :5] = 0
        mask[-1, :1] = 0
        ids[mask == 0] = 0
    return {"inputs": ids.cuda(), "attention_mask": mask.cuda()}


def generator_of(model: Any, **options: Any) -> SpeculativeGenerator:
    return SpeculativeGenerator(model, **{"tree": trees.BestFirst(nodes=7), "execution": "device", **options})


@contextmanager
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(device_rounds, "device_rounds", functools.partial(device_rounds.device_rounds, capture=False))
        yield


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_or_not_the_text_is_that_of_plain_generate(
    family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = model_of(family), prompts(batch)
    plain = type(model).generate(model, **given, **NEW, do_sample=False)
    generator = generator_of(model)
    captured = [generator.generate(**given, **NEW, do_sample=False) for _ in range(2)]
    with uncaptured(monkeypatch):
        stepped = generator_of(model).generate(**given, **NEW, do_sample=False)
    host = generator_of(model, execution="host").generate(**given, **NEW, do_sample=False)
    for other in (*captured, stepped, host):
        assert torch.equal(other, plain)


@pytest.mark.parametrize(
    "cache",
    [
        kv.INT8,
        kv.FP8_INT8,
        kv.KVCacheConfig(keys=kv.Centered(kv.Hadamard(kv.Int4(group=4))), values=kv.Int4(group=4)),
        kv.KVCacheConfig(values=kv.Centered(kv.Int4(group=4))),
    ],
)
def test_codecs_inside_a_graph(cache: kv.KVCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of("llama"), prompts(3)
    captured = generator_of(model, cache=cache).generate(**given, **NEW, do_sample=False)
    with uncaptured(monkeypatch):
        stepped = generator_of(model, cache=cache).generate(**given, **NEW, do_sample=False)
    assert torch.equal(captured, stepped)


def test_a_draft_model_inside_a_graph() -> None:
    model, given = model_of("llama"), prompts(3)
    generator = generator_of(model, drafter=drafters.ModelDrafter(model_of("llama")), tree=trees.Chain(4))
    for _ in range(2):
        captured = generator.generate(**given, **NEW, do_sample=False)
        assert torch.equal(captured, type(model).generate(model, **given, **NEW, do_sample=False))
        assert generator.stats.tokens_per_round > 3


@pytest.mark.parametrize("own", [False, True])
def test_a_seed_gives_one_text(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and not, with torch's generator and with one's own."""
    model, given = model_of("llama"), prompts(3)

    def sampled(generator: SpeculativeGenerator) -> Tensor:
        torch.manual_seed(5)
        source = torch.Generator("cuda").manual_seed(5) if own else None
        return generator.generate(**given, **NEW, do_sample=True, top_k=20, temperature=2.0, generator=source)

    captured = sampled(generator_of(model))
    with uncaptured(monkeypatch):
        stepped = sampled(generator_of(model))
    assert torch.equal(captured, stepped)
    torch.manual_seed(6)
    other = generator_of(model).generate(**given, **NEW, do_sample=True, top_k=20, temperature=2.0)
    assert not torch.equal(captured, other)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4_moe"])
def test_compiled_rounds_give_the_same_text(family: str) -> None:
    model, given = model_of(family), prompts(1)
    if family.endswith("moe"):
        model.set_experts_implementation("batched_mm")
    compiled = generator_of(model).compile().generate(**given, **NEW, do_sample=False)
    assert torch.equal(compiled, type(model).generate(model, **given, **NEW, do_sample=False))


@pytest.mark.parametrize("capture", [True, False])
def test_a_round_reads_the_device_once(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching never waits, and one copy a round comes home."""
    model, given = model_of("gemma3"), prompts(1)
    generator = generator_of(model)
    monkeypatch.setattr(device_rounds, "device_rounds", functools.partial(device_rounds.device_rounds, capture=capture))
    rounds = generator.rounds(**given, max_new_tokens=300, do_sample=False)
    for _ in range(4):
        next(rounds)
    program: Any = generator._programs._program
    while program.pending:
        program.read()
    try:
        torch.cuda.set_sync_debug_mode("error")
        program.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    program.read()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            program.launch()
            program.read()
        torch.cuda.synchronize()
    home = [event for event in profiler.events() if event.device_type == DeviceType.CUDA and "DtoH" in event.name]
    assert len(home) == 5


@pytest.mark.parametrize("length", [200, 268])
def test_a_window_moves_on_in_a_graph(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of a window has 280 slots: it overflows on the way, or would while the program runs for warmth."""
    torch.manual_seed(length)
    model, given = model_of("gemma3"), {"inputs": torch.randint(2, 9, (1, length)).cuda()}
    request = {"max_new_tokens": 100, "pad_token_id": 0, "do_sample": False}
    generator = generator_of(model)
    captured = [generator.generate(**given, **request) for _ in range(2)]
    assert any(stack.base > 0 for stack in generator._programs._program.cache.stacks)  # type: ignore[union-attr]  # there is one
    with uncaptured(monkeypatch):
        stepped = generator_of(model).generate(**given, **request)
    plain = type(model).generate(model, **given, **request)
    for other in (*captured, stepped):
        assert torch.equal(other, plain)


@pytest.mark.filterwarnings("ignore")  # transformers would rather have them there
def test_prompts_on_the_cpu() -> None:
    """Padding, too, is moved to where the rounds run."""
    model, given = model_of("llama"), prompts(3)
    here = {name: value.cpu() for name, value in given.items()}
    plain = type(model).generate(model, **given, **NEW, do_sample=False)
    assert torch.equal(generator_of(model).generate(**here, **NEW, do_sample=False), plain.cpu())


@pytest.mark.parametrize(("options", "on_device"), [({}, True), ({"repetition_penalty": 1.3}, False)])
def test_auto_takes_the_device_where_it_can(options: dict[str, Any], on_device: bool) -> None:
    model, given = model_of("llama"), prompts(1)
    generator = generator_of(model, execution="auto")
    plain = type(model).generate(model, **given, **NEW, do_sample=False, **options)
    assert torch.equal(generator.generate(**given, **NEW, do_sample=False, **options), plain)
    assert (generator._programs._program is not None) == on_device


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dialect", "tree"), [("dflash2", "best"), ("dflash_flat", "best"), ("dspark_rnn", "chain")])
def test_block_drafters_inside_a_graph(
    dialect: str, tree: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their context grows inside the graph; the text is that of plain generate, the rounds those of the host."""
    model, given = model_of("llama"), prompts(batch)
    drafter = drafters.from_pretrained(write(tmp_path, dialect).folder, model)
    shape = trees.BestFirst(nodes=10) if tree == "best" else trees.Chain(4)
    plain = type(model).generate(model, **given, **NEW, do_sample=False)
    served = generator_of(model, drafter=drafter, tree=shape)
    for _ in range(2):
        assert torch.equal(served.generate(**given, **NEW, do_sample=False), plain)
    with uncaptured(monkeypatch):
        stepped = generator_of(model, drafter=drafter, tree=shape)
        assert torch.equal(stepped.generate(**given, **NEW, do_sample=False), plain)
    host = generator_of(model, drafter=drafter, tree=shape, execution="host")
    assert torch.equal(host.generate(**given, **NEW, do_sample=False), plain)
    assert served.stats.drafted == host.stats.drafted > 0
