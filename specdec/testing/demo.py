"""What the example programs run on: the packaged SmolLM2, or a tiny random model in its place."""

from typing import Any

from specdec.testing.models import tiny_model
from specdec.testing.smollm2 import load_smollm2
from specdec.testing.tokenizer import tiny_tokenizer


def demo_model(*, tiny: bool = False) -> tuple[Any, Any]:
    """A model and its tokenizer.

    They are typed as `Any`, since type checkers cannot follow what the tokenizers of transformers return.

    Args:
        tiny: a random llama with a tokenizer of single characters instead of SmolLM2-135M-Instruct: it talks nonsense,
            at once and without the demo extra.

    Raises:
        ModuleNotFoundError: if SmolLM2 is asked for and the demo extra is not installed.

    Example:
        >>> from specdec.testing import demo_model
        >>> model, tokenizer = demo_model(tiny=True)
        >>> len(tokenizer) == model.config.vocab_size
        True
    """
    return (tiny_model("llama"), tiny_tokenizer()) if tiny else load_smollm2()
