import string

import pytest

from specdec.testing import VOCAB
from specdec.testing.tokenizer import tiny_tokenizer


def test_every_printable_character_has_a_token_of_its_own():
    tokenizer = tiny_tokenizer()
    text = "".join(chr(code) for code in range(32, 127))
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert sorted(ids) == list(range(2, VOCAB))
    assert len(tokenizer) == VOCAB


@pytest.mark.parametrize("character", ["\n", "\t", "é", "猫"])
def test_other_characters_become_spaces(character):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(f"a{character}b").input_ids) == "a b"


def test_batches_pad_and_chats_have_a_template():
    tokenizer = tiny_tokenizer()
    batch = tokenizer(["a", "abc"], padding=True, padding_side="left", return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user: hi "
    assert set(chat) <= set(string.printable)
