"""Byte-level BPE tokenizers made in memory, for tests with two vocabularies."""

import functools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SYLLABLES = {
    "english": ["the", "cat", "s", "at", "on", "mat", "then", "ed"],
    "numbers": ["one", "two", "th", "ree", "ten", "four", "six", "ty"],
}
"""The two languages share letters, the space and some syllables."""


def text(language: str, words: int = 400) -> str:
    """Words of one to three syllables."""
    rng = random.Random(language)
    return " ".join("".join(rng.choices(SYLLABLES[language], k=rng.randint(1, 3))) for _ in range(words))


@functools.cache
def byte_level(entries: int, language: str) -> PreTrainedTokenizerBase:
    """256 bytes, an end token, and merges learned from a language."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([text(language)], trainer)
    assert tokenizer.get_vocab_size() == entries
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
