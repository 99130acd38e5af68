"""Greedy equality on a real model: SmolLM2-135M-Instruct in float32, with near-ties reported and counted.

    pytest -m slow tests/test_real_model.py --spec-bench path/to/question.jsonl

In float32 a verify forward of 16 rows adds up in another order than a forward of one row. Two tokens whose logits are
closer than that may swap; the test accepts a difference only where the reference's logits are that close.
"""

import json
from pathlib import Path

import pytest

from specdec import SpeculativeGenerator, drafters, trees
from specdec.testing.smollm2 import load_smollm2

PROMPTS = 20
NEW_TOKENS = 48
NEAR_TIE = 2e-3  # float32 logits of this model are near 20; reordered sums move them by less than 1e-3


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest) -> list[str]:
    path = request.config.getoption("--spec-bench")
    if path is None:
        pytest.skip("needs --spec-bench PATH (Spec-Bench's question.jsonl is not part of this repository)")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    short = [row["turns"][0] for row in rows if len(row["turns"][0]) < 800]
    return short[:: len(short) // PROMPTS][:PROMPTS]


@pytest.mark.slow
def test_greedy_tokens_equal_plain_generate_up_to_near_ties(prompts: list[str]) -> None:
    model, tokenizer = load_smollm2()
    near_ties = accepted = 0
    for index, prompt in enumerate(prompts):
        combined = drafters.CombinedDrafter(drafters.PromptLookupDrafter(), drafters.SuffixDrafter())
        tree = trees.BestFirst(nodes=15) if index % 2 else trees.Chain(7)
        generator = SpeculativeGenerator(model, combined, tree)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        request = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        expected = model.generate(**request, return_dict_in_generate=True, output_logits=True)
        ids = generator.generate(**request)
        accepted += generator.stats.accepted
        width = min(ids.shape[1], expected.sequences.shape[1])
        different = (ids[0, :width] != expected.sequences[0, :width]).nonzero()
        if different.shape[0] == 0:
            assert ids.shape == expected.sequences.shape
            continue
        place = int(different[0]) - inputs["input_ids"].shape[1]
        logits = expected.logits[place][0]
        gap = float(logits.max() - logits[ids[0, int(different[0])]])
        assert gap < NEAR_TIE, f"prompt {index}: token {place} differs although its logit is {gap} below the best"
        near_ties += 1
    print(  # noqa: T201 - the report is half of what this test is for
        f"{near_ties} of {len(prompts)} prompts part from plain decoding at a near-tie; {accepted} drafts accepted"
    )
    assert accepted > PROMPTS
