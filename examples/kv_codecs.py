"""The same prompt with the key/value cache in 16, 8 and 4 bits: how much of the text stays, and what it costs in bits.

    python examples/kv_codecs.py --prompt "Write a short poem about a cat and a hat."

A codec changes the target a little, as quantized weights do. With each of them, speculative decoding gives exactly the
tokens of plain decoding with the same codec.
"""

import argparse

import torch

from specdec import SpeculativeGenerator, drafters, kv, trees
from specdec.testing import demo_model

PRESETS = {"none": None, "INT8": kv.INT8, "FP8_INT8": kv.FP8_INT8, "INT8_INT4": kv.INT8_INT4, "INT4": kv.INT4}


def main() -> None:
    """Generates with every preset, with and without drafts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Write a short poem about a cat and a hat.")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of SmolLM2")
    arguments = parser.parse_args()

    model, tokenizer = demo_model(tiny=arguments.tiny)
    if arguments.tiny:
        # Heads of the tiny model have 12 channels; groups of four divide them.
        small = kv.KVCacheConfig(keys=kv.Centered(kv.Hadamard(kv.Int4(group=4))), values=kv.Int4(group=4))
        presets = {"none": None, "INT8": kv.INT8, "small": small}
    else:
        presets = PRESETS
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    request = {**inputs, "max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    prompt, reference = inputs.input_ids.shape[1], model.generate(**request)

    print(f"{'codec':12}{'bits':>6}{'same as 16 bits':>17}{'passes':>8}")
    for name, config in presets.items():
        generator = SpeculativeGenerator(model, drafters.PromptLookupDrafter(), trees.BestFirst(nodes=8), cache=config)
        plain = generator.generate(**request, num_draft_tokens=0)
        ids = generator.generate(**request)
        if not torch.equal(ids, plain):
            raise SystemExit(f"{name}: drafts changed the text. In float32 a near-tie may do that; else report it.")
        width = min(ids.shape[1], reference.shape[1])
        same = (ids[0, prompt:width] == reference[0, prompt:width]).long().cumprod(0).sum()
        bits = (config or kv.KVCacheConfig()).bits_per_element(model.config.head_dim)
        print(f"{name:12}{bits:6.2f}{int(same):>11} tokens{generator.stats.target_passes:>8}")


if __name__ == "__main__":
    main()
