import torch

from specdec.testing import demo, tiny_model


def test_the_tiny_pair_fits_together():
    model, tokenizer = demo.demo_model(tiny=True)
    assert len(tokenizer) == model.config.vocab_size
    assert torch.equal(model.lm_head.weight, tiny_model("llama").lm_head.weight)


def test_otherwise_it_is_smollm2(monkeypatch):
    monkeypatch.setattr(demo, "load_smollm2", lambda: ("model", "tokenizer"))
    assert demo.demo_model() == ("model", "tokenizer")
