"""A tokenizer for the tiny models: one token for each printable ASCII character, made in memory."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["tiny_tokenizer"]

_CHARACTERS = [chr(code) for code in range(32, 127)]
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A character tokenizer with the vocabulary size of the tiny models (97), two special tokens and a chat template.

    Other characters than printable ASCII become spaces.

    Example:
        >>> from specdec.testing.tokenizer import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer("two words").input_ids)
        'two words'
        >>> len(tokenizer)
        97
    """
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = _TEMPLATE
    return fast
