"""What codecs of the key/value cache do to a target: KL divergence, top-1 agreement and perplexity, by decoding.

    python examples/benchmarks/kv_codecs.py --prose prose.txt
    python examples/benchmarks/kv_codecs.py --prose prose.txt --gguf gemma-3-270m.gguf --topic kv-codecs-gemma3-270m

SmolLM2-135M-Instruct, or another model in a GGUF file, in float32 reads prose (a text file) and code (the standard
library of Python) as it would decode them: a prompt, then rounds that verify the true next tokens beside wrong ones,
keep the true ones and drop the rest. Each codec's next-token laws are compared with those of a plain cache.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specdec import DraftTree, kv
from specdec.hf import ModelTarget
from specdec.testing.smollm2 import load_smollm2

PROMPT, DECODED, KEPT = 256, 512, 8
CODECS: dict[str, kv.KVCacheConfig] = {
    "INT8": kv.INT8,
    "FP8_INT8": kv.FP8_INT8,
    "INT8_INT4": kv.INT8_INT4,
    "INT4": kv.INT4,
    "int8_unrotated": kv.KVCacheConfig(keys=kv.Int8(), values=kv.Int8()),
    "fp8_token": kv.KVCacheConfig(keys=kv.FP8(), values=kv.FP8()),
    "fp8_head": kv.KVCacheConfig(keys=kv.FP8(scale="head"), values=kv.FP8(scale="head")),
    "int4_rotated": kv.KVCacheConfig(keys=kv.Hadamard(kv.Int4()), values=kv.Int4()),
    "int4_unrotated": kv.KVCacheConfig(keys=kv.Int4(), values=kv.Int4()),
    "nvfp4": kv.KVCacheConfig(keys=kv.NVFP4(), values=kv.NVFP4()),
}


def main() -> None:
    """Measures every codec over the same windows of text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prose", type=Path, required=True, help="a text file of plain prose")
    parser.add_argument("--windows", type=int, default=4, help="windows of each kind of text")
    parser.add_argument("--codec", choices=CODECS, action="append")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="a model to measure instead of SmolLM2")
    parser.add_argument("--topic", default="kv-codecs", help="name of the report")
    parser.add_argument("--revision", help="git revision, where there is no repository")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_gguf(arguments.gguf) if arguments.gguf else load_smollm2()
    windows = [
        window for text in texts(arguments.prose) for window in cut(tokenizer(text).input_ids, arguments.windows)
    ]
    sums: dict[str, Tensor] = {}
    for window in windows:
        plain = decode(model, window, None)
        for name in arguments.codec or CODECS:
            measured = compare(plain, decode(model, window, CODECS[name]), window)
            sums[name] = sums.get(name, 0) + measured / len(windows)
        print(json.dumps({name: [round(float(x), 6) for x in row] for name, row in sums.items()}), flush=True)
    write(arguments.topic, sums, model.config.head_dim, len(windows), arguments.revision)


def load_gguf(path: Path) -> tuple[Any, Any]:
    """A model and its tokenizer from a GGUF file, dense."""
    dense = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **dense)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def write(topic: str, sums: dict[str, Tensor], dim: int, windows: int, revision: str | None = None) -> None:
    """Writes the report from the means of what `compare` gives."""
    made = {}
    for name, (kl, top1, nll, early, late) in ((name, row.tolist()) for name, row in sums.items()):
        made[f"kl.{name}"] = report.figure(kl, "nats", "a plain cache, mean over tokens")
        made[f"top1.{name}"] = report.figure(top1, "share", "the plain cache's most likely token")
        made[f"perplexity.{name}"] = report.figure(torch.tensor(nll).exp().item(), "ratio", "a plain cache")
        made[f"kl_late_over_early.{name}"] = report.figure(late / early, "ratio", "the first quarter of the tokens")
        bits = CODECS[name].bits_per_element(dim)
        made[f"bits.{name}"] = report.figure(bits, "bits", "16 of a plain cache in BF16")
    versions = {**report.installed(), "text": f"{windows} windows of {PROMPT} + {DECODED} tokens, prose and code"}
    report.write(topic, made, device=report.cpu_name(), versions=versions, revision=revision)


def texts(prose: Path) -> Iterator[str]:
    """Prose, and modules of the standard library one after the other."""
    yield prose.read_text(encoding="utf-8")
    library = Path(sysconfig.get_path("stdlib"))
    yield "\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))[::7])


def cut(ids: list[int], count: int) -> list[Tensor]:
    """Windows spread evenly over a text."""
    length = PROMPT + DECODED + 1
    step = (len(ids) - length) // max(count - 1, 1)
    return [torch.tensor([ids[start : start + length]]) for start in range(0, step * count, step)]


@torch.no_grad()
def decode(model: Any, window: Tensor, codecs: kv.KVCacheConfig | None) -> Tensor:
    """Log-probabilities `[tokens, vocab]` after each token behind the prompt, through verify passes with rollback."""
    target = ModelTarget(model, window[:, :PROMPT], cache=codecs)
    target.prefill()
    # A chain of the true tokens, and below the root as many wrong ones, which are dropped.
    parents = torch.tensor([[*range(-1, KEPT - 1), *[0] * KEPT]])
    nodes, count = torch.arange(KEPT)[None], torch.tensor([KEPT])
    laws = []
    for start in range(PROMPT, PROMPT + DECODED, KEPT):
        true = window[:, start : start + KEPT]
        tokens = torch.cat([true, (true + 1 + torch.arange(KEPT)) % target.vocab_size], 1)
        tree = DraftTree(tokens, parents, torch.tensor([2 * KEPT]), torch.zeros(tokens.shape))
        laws.append(target.verify(tree).logits[0, :KEPT].log_softmax(-1))
        target.commit(nodes, count)
    return torch.cat(laws)


def compare(plain: Tensor, coded: Tensor, window: Tensor) -> Tensor:
    """KL, top-1 agreement, rise of the negative log-likelihood; KL over the first and the last quarter."""
    kl = (plain.exp() * (plain - coded)).sum(-1)
    top1 = (plain.argmax(-1) == coded.argmax(-1)).float().mean()
    following = window[0, PROMPT + 1 : PROMPT + 1 + DECODED, None]
    nll = (plain - coded).gather(1, following).mean()
    quarter = DECODED // 4
    return torch.stack([kl.mean(), top1, nll, kl[:quarter].mean(), kl[-quarter:].mean()])


if __name__ == "__main__":
    main()
