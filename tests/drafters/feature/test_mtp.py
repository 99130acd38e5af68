"""MTP and Medusa heads compute what an independent, row-by-row reference computes from the same files."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec import drafters, trees
from specdec.drafters import FeatureDrafter
from specdec.drafters.feature import drafter
from specdec.errors import UnsupportedError
from tests import helpers
from tests.drafters.feature import medusa_checkpoints as medusa
from tests.drafters.feature import mtp_checkpoints as mtp
from tests.drafters.feature import mtp_reference
from tests.drafters.feature.common import Law, Text, check_children, start
from tests.drafters.steered import Steered

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3-Next, fused experts": ("qwen3_next", {"fused": True, "norm_topk_prob": False}),
    "Qwen3-Next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1], "partial_rotary_factor": 0.25}),
    "Qwen3.5": ("qwen3_5", {}),
    "Qwen3.5, experts": ("qwen3_5_moe", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3, dense": ("deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": None}),
    "DeepSeek-V3, two modules": ("deepseek_v3", {"num_nextn_predict_layers": 2, "mtp_hidden_states_first": True}),
    "DeepSeek-V3, three modules": ("deepseek_v3", {"num_nextn_predict_layers": 3, "rope_interleave": False}),
}


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Transformers rounds some steps to float32 whatever the dtype; here they stay in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def target_of(content: dict[str, Any]) -> PreTrainedModel:
    """A random target whose float32 buffers are float64."""
    text = content.get("text_config", content)
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text)).double().eval()
    made.set_experts_implementation("eager")
    return made


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> tuple[mtp.Written, FeatureDrafter, PreTrainedModel]:
    dialect, options = CASES[request.param]
    keys = {name: value for name, value in options.items() if name != "fused"}
    target = target_of(mtp.config(dialect, **keys))
    written = mtp.write(Path(mkdtemp()), dialect, target=target.state_dict(), **options)
    found = drafters.from_pretrained(written.folder, target)
    assert isinstance(found, FeatureDrafter)
    return written, found, target


def law_of(written: mtp.Written, target: PreTrainedModel, text: Text) -> Law:
    embed, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    drafted = mtp_reference.draft(written.weights, written.reference, *text, **written.matrices(embed, head))
    return lambda path: (torch.arange(97), drafted.logits_after(path))


@pytest.mark.parametrize(("lengths", "seed"), [([1, 5], 0), ([4, 2], 1)])
def test_laws_along_random_paths(loaded: Any, lengths: list[int], seed: int) -> None:
    """The order of embedding and state, positions, the gate, experts, and which module reads what of which."""
    written, found, target = loaded
    texts = start(found, lengths, seed)
    check_children(found, [law_of(written, target, text) for text in texts], seed, levels=found.length)


@pytest.mark.parametrize(("seed", "chunk"), [(0, 2), (1, 512)])
def test_committed_rows_are_those_of_a_fresh_start(loaded: Any, seed: int, chunk: int) -> None:
    """E10, through all modules: what a module reads of the one before it crosses the border of two rounds."""
    written, found, target = loaded
    source = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "CHUNK", chunk)
        texts = start(found, [2, 4], seed)
        for counts in ([2, 1], [0, 3]):
            check_children(found, [law_of(written, target, text) for text in texts], seed, levels=1)
            tokens = torch.randint(0, 97, (2, 3), generator=source)
            features = torch.randn(2, 3, 48, generator=source, dtype=torch.float64)
            found.commit(tokens, torch.tensor(counts), features)
            texts = [
                (torch.cat([known, features[row, :count]]), [*text, *tokens[row, :count].tolist()])
                for row, ((known, text), count) in enumerate(zip(texts, counts, strict=True))
            ]
        check_children(found, [law_of(written, target, text) for text in texts], seed, levels=found.length)


def test_several_modules_draft_no_further(loaded: Any) -> None:
    sizes = {"feature_size": 48, "hidden_size": 48, "vocab_size": 97, "draft_vocab_size": 97}
    with pytest.raises(UnsupportedError, match=r"2 modules draft no 3 tokens"):
        drafters.MTPSpec(style="deepseek", modules=2, depth=3, feature_layers=(2,), **sizes)
    written, found, _ = loaded
    modules = written.reference["modules"]
    if modules == 1:
        assert FeatureDrafter(found.model, length=9).length == 9
    else:
        with pytest.raises(UnsupportedError, match=f"this mtp model drafts {modules} tokens at most"):
            FeatureDrafter(found.model, length=modules + 1)


@pytest.mark.parametrize("wrong", ["hidden_first", "recurrence", "rotary", "module"])
def test_the_reference_notices(wrong: str) -> None:
    """A head that is wrong in one respect disagrees."""
    dialect, options = CASES["Qwen3-Next, dense" if wrong == "rotary" else "DeepSeek-V3"]
    options = {**options, "num_nextn_predict_layers": 2} if wrong == "module" else options
    target = target_of(mtp.config(dialect, **options))
    written = mtp.write(Path(mkdtemp()), dialect, target=target.state_dict(), **options)
    found = drafters.from_pretrained(written.folder, target)
    changed: dict[str, Any] = {
        "hidden_first": {"hidden_first": True},
        "recurrence": {"recurrence": "shift"},
        "rotary": {"rotary": 16},
        "module": {"first_layer": 2, "modules": 1, "recurrence": "append"},
    }
    written.reference.update(changed[wrong])
    texts = start(found, [4], 1)
    with pytest.raises(AssertionError, match="not close"):
        check_children(found, [law_of(written, target, text) for text in texts], 1, levels=2)


def test_a_copy_of_the_target_must_be_one(tmp_path: Path) -> None:
    """DeepSeek's modules repeat the embedding and the output head; what differs would be silently lost."""
    target = target_of(mtp.config("deepseek_v3"))
    written = mtp.write(tmp_path, "deepseek_v3", target=target.state_dict())
    file = tmp_path / "model-00002-of-00002.safetensors"
    name = "model.layers.2.shared_head.head.weight"
    save_file({**written.weights, name: written.weights[name] + 1}, file)
    with pytest.raises(UnsupportedError, match=r"layers\.2\.shared_head\.head\.weight' is not the target's output"):
        drafters.from_pretrained(tmp_path, target)


@settings(max_examples=30, deadline=None)
@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_a_wrong_tensor_is_named(case: str, data: st.DataObject) -> None:
    dialect, options = CASES[case]
    target = target_for(case)
    folder = Path(mkdtemp())
    written = mtp.write(folder, dialect, target=target.state_dict(), **options)
    names = [name for name in written.weights if not name.endswith(("embed_tokens.weight", "head.weight"))]
    name = data.draw(st.sampled_from(sorted(names)))
    change = data.draw(st.sampled_from(["remove", "rename", "reshape"]))
    weights = dict(written.weights)
    tensor = weights.pop(name)
    if change == "reshape":
        weights[name] = torch.cat([tensor, tensor[:1]])
    if change == "rename":
        weights[f"{name}_"] = tensor
    save_file(weights, folder / "model-00002-of-00002.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(target.state_dict(), "model-00001-of-00002.safetensors") | dict.fromkeys(
        weights, "model-00002-of-00002.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if name in ("mtp.fc.weight", "model.layers.2.eh_proj.weight") and change != "reshape":
        return  # then it is no head, or one of fewer modules
    with pytest.raises(UnsupportedError, match=re.escape(name)):
        drafters.from_pretrained(folder, target)


@cache
def target_for(case: str) -> PreTrainedModel:
    """A target, made once for a case."""
    dialect, options = CASES[case]
    return target_of(mtp.config(dialect, **{name: value for name, value in options.items() if name != "fused"}))


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa(blocks: int, tmp_path: Path) -> None:
    """Each head predicts a later token from the last state alone; its config may miscount the heads."""
    target = helpers.model()
    written = medusa.write(tmp_path, heads=4, blocks=blocks)
    written.config["medusa_num_heads"] = 2
    (tmp_path / "config.json").write_text(json.dumps(written.config))
    found = drafters.from_pretrained(tmp_path, target)
    assert isinstance(found, FeatureDrafter)
    assert (found.length, found.feature_layers) == (4, (2,))
    texts = start(found, [3, 1], 5)
    logits = [medusa.draft(written.weights, written.reference, text[0][-1]) for text in texts]

    def law(row: int) -> Law:
        return lambda path: (torch.arange(97), logits[row][len(path)])

    check_children(found, [law(0), law(1)], 5, levels=4)
    features = torch.randn(2, 2, 48, dtype=torch.float64)
    found.commit(torch.tensor([[5, 6], [7, 0]]), torch.tensor([2, 0]), features)
    logits[0] = medusa.draft(written.weights, written.reference, features[0, 1])
    check_children(found, [law(0), law(1)], 5, levels=2)


def test_medusa_with_a_shortlist(tmp_path: Path) -> None:
    """Every head keeps the rows of the list, however many heads there are."""
    written = medusa.write(tmp_path, heads=35, blocks=2)
    shortlist = drafters.Shortlist(torch.arange(0, 97, 5), 97)
    found = drafters.from_pretrained(tmp_path, helpers.model(), shortlist=shortlist)
    texts = start(found, [3], 5)
    logits = medusa.draft(written.weights, written.reference, texts[0][0][-1])[:, shortlist.ids]
    check_children(found, [lambda path: (shortlist.ids, logits[len(path)])], 5, levels=3)


def test_medusa_in_rounds(tmp_path: Path) -> None:
    medusa.write(tmp_path, heads=3)
    found = drafters.from_pretrained(tmp_path, helpers.model())
    steered = Steered(found, helpers.text("ragged", 24), helpers.RAGGED)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 24}
    made = helpers.speculate(helpers.model(), steered, trees.BestFirst(nodes=14, branch=3, depth=3), **request)
    assert made.output.tolist() == helpers.text("ragged", 24).tolist()
    assert made.generator.stats.accepted > 0


def test_heads_that_need_their_target_say_so(tmp_path: Path) -> None:
    medusa.write(tmp_path / "medusa")
    target = target_of(mtp.config("qwen3_next"))
    mtp.write(tmp_path / "mtp", "qwen3_next", target=target.state_dict())
    for name in ("medusa", "mtp"):
        with pytest.raises(UnsupportedError, match=r"Pass target="):
            drafters.inspect(tmp_path / name)
    assert drafters.inspect(tmp_path / "mtp", target).spec.style == "qwen"
    assert "mtp in the format of Qwen3-Next" in str(drafters.inspect(tmp_path / "mtp", target))


@pytest.mark.parametrize("change", ["remove", "rename", "reshape"])
def test_a_wrong_tensor_of_medusa_is_named(change: str, tmp_path: Path) -> None:
    written = medusa.write(tmp_path, heads=2, blocks=2)
    for name, tensor in written.weights.items():
        weights = {each: value for each, value in written.weights.items() if each != name}
        if change != "remove":
            changed = torch.cat([tensor, tensor[:1]]) if change == "reshape" else tensor
            weights[name if change == "reshape" else f"{name}_"] = changed
        save_file(weights, tmp_path / "medusa_lm_head.safetensors")
        with pytest.raises(UnsupportedError, match=re.escape(name)):
            drafters.from_pretrained(tmp_path, helpers.model())
    config = {**written.config, "medusa_num_layers": "2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="'medusa_num_layers' must be a whole number"):
        drafters.from_pretrained(tmp_path, helpers.model())
