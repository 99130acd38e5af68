"""Gemma 4 assistants compute what an independent reference and transformers' own module compute from the same files."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec import SpeculativeGenerator, drafters, kv, trees
from specdec.drafters import FeatureDrafter
from specdec.errors import UnsupportedError
from specdec.protocols import DraftContext
from specdec.types import CommittedRows, Frontier
from tests import helpers
from tests.drafters.feature import assistant_reference
from tests.drafters.feature.assistant_checkpoints import DIALECTS, Written, write
from tests.drafters.feature.common import Law, check_children
from tests.drafters.steered import Steered

NEW = 24
FAMILY = {"plain": "gemma4", "centroids": "gemma4", "key_as_value": "gemma4_shared"}
KEPT = {"sliding_attention": 8, "full_attention": None}


def target_of(dialect: str) -> PreTrainedModel:
    small = {"vocab_size": 96, "vocab_size_per_layer_input": 96} if dialect == "centroids" else {}
    return helpers.model(FAMILY[dialect], **small)


@cache
def loaded(dialect: str) -> tuple[Written, FeatureDrafter]:
    written = write(Path(mkdtemp()), dialect)
    found = drafters.from_pretrained(written.folder, target_of(dialect))
    assert isinstance(found, FeatureDrafter)
    return written, found


def law_of(written: Written, target: PreTrainedModel, shared: Any, hidden: Tensor, anchor: int) -> Law:
    """The reference's law; positions and windows as they are served here."""
    vocab = target.config.vocab_size
    embed = target.get_input_embeddings()(torch.arange(vocab)).detach()
    rules = {**written.reference, "position": "anchor", "window_from": "position"}
    drafted = assistant_reference.draft(written.weights, rules, shared, hidden, anchor, **written.matrices(embed))
    return lambda path: (torch.arange(vocab), drafted.logits_after(path))


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 15), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_laws_along_random_paths(dialect: str, lengths: list[int], seed: int) -> None:
    """Left-padded texts of any length, windows, both kinds of layers, centroids; nothing drafted is attended to."""
    written, found = loaded(dialect)
    target, source = target_of(dialect), torch.Generator().manual_seed(seed)
    vocab, width = target.config.vocab_size, max(lengths)
    count = torch.tensor(lengths)
    heads = {"sliding_attention": (2, 16), "full_attention": (1 if dialect == "key_as_value" else 2, 32)}
    rows = {}
    for kind, (kv_heads, dim) in heads.items():
        keys, values = (
            torch.randn(len(lengths), kv_heads, width, dim, generator=source, dtype=torch.float64) for _ in range(2)
        )
        slots = torch.arange(width)
        rows[kind] = CommittedRows(
            keys, values, slots - (width - count)[:, None], slots >= (width - count)[:, None], count
        )
    features = torch.randn(len(lengths), width, 48, generator=source, dtype=torch.float64)
    tokens = torch.randint(1, vocab, (len(lengths), width + 1), generator=source)
    mask = torch.arange(width + 1) >= (width - count)[:, None]
    found.start(DraftContext(tokens, mask, vocab, features=features, rows=rows.__getitem__))
    laws = []
    for row, length in enumerate(lengths):
        shared = {
            kind: (
                each.keys[row, :, width - length :].transpose(0, 1),
                each.values[row, :, width - length :].transpose(0, 1),
            )
            for kind, each in rows.items()
        }
        laws.append(law_of(written, target, shared, features[row, -1], int(tokens[row, -1])))
    check_children(found, laws, seed, levels=3, vocab=vocab)


@pytest.mark.parametrize("source", ["files", "model", "files of transformers"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_first_tokens_are_those_of_transformers(dialect: str, source: str, tmp_path: Path) -> None:
    """The same files in transformers' own module, that module, and what it saves, which has a dialect of its own."""
    target = target_of(dialect)
    written = write(tmp_path, dialect)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    if source == "files of transformers":
        theirs.save_pretrained(tmp_path / "saved")
        assert "per_layer_config" in (tmp_path / "saved" / "config.json").read_text()
    places: dict[str, Any] = {"files": tmp_path, "model": theirs, "files of transformers": tmp_path / "saved"}
    found = drafters.from_pretrained(places[source], target)
    assert drafters.inspect(places[source], target).unknown == ()
    asked: list[Any] = []

    class Watched:
        feature_layers = found.feature_layers
        start, commit, finish = found.start, found.commit, found.finish

        def children(self, frontier: Frontier, count: int) -> Any:
            answer = found.children(frontier, count)
            asked.append((int(frontier.tokens[0, 0]), frontier.depth, answer))
            return answer

    helpers.speculate(target, Watched(), trees.Chain(3), input_ids=prompt, max_new_tokens=5)
    with torch.no_grad():
        output = target(prompt, output_hidden_states=True, return_shared_kv_states=True)
        state = output.hidden_states[-1][:, -1:]
        for token, depth, answer in asked[:3]:
            given = torch.cat([target.get_input_embeddings()(torch.tensor([[token]])), state], -1)
            said = theirs(
                inputs_embeds=given, position_ids=torch.tensor([[5]]), shared_kv_states=output.shared_kv_states
            )
            state, law = said.last_hidden_state, said.logits[0, 0].softmax(-1)
            ours = answer.law(target.config.vocab_size)[0, 0]
            kept = ours > 0
            tolerance = {"rtol": 1e-5, "atol": 1e-7}  # transformers' norms and rotations are in float32
            torch.testing.assert_close(ours[kept], law[kept] / law[kept].sum(), **tolerance)
            assert (int(kept.sum()) < len(ours)) == (written.reference["chosen_centroids"] is not None)
            assert depth == asked.index((token, depth, answer))


def test_a_loaded_model_lends_its_weights(tmp_path: Path) -> None:
    """No copy of them is made, nothing of the model changes, and what is not all there is refused."""
    target = target_of("plain")
    written = write(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    before = {name: (value.data_ptr(), value.clone()) for name, value in theirs.state_dict().items()}
    found = drafters.from_pretrained(theirs, target)
    for name, ours in found.model.state_dict().items():
        assert ours.data_ptr() == before[name][0], name
    assert all(parameter.requires_grad for parameter in theirs.parameters())
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    assert theirs.training is False
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, before[name][1])
    assert str(drafters.inspect(theirs, target)).startswith(
        "Gemma4AssistantForCausalLM: gemma4_assistant in the format"
    )
    half = drafters.from_pretrained(theirs, target, dtype=torch.float32)
    assert half.model.pre_projection.weight.dtype == torch.float32
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": 12}
    steered = Steered(found, helpers.text("ragged", 12, "gemma4"), helpers.RAGGED)
    made = helpers.speculate(target, steered, trees.BestFirst(nodes=10, depth=3), **request)
    assert made.output.tolist() == helpers.text("ragged", 12, "gemma4").tolist()
    assert made.generator.stats.accepted > 0
    theirs.pre_projection.weight = torch.nn.Parameter(torch.cat([theirs.pre_projection.weight] * 2))
    with pytest.raises(UnsupportedError, match=r"pre_projection\.weight' has shape \[80, 96\]"):
        drafters.from_pretrained(theirs, target)
    with pytest.raises(UnsupportedError, match=r"Gemma4AssistantForCausalLM: tensor '.+' holds no numbers here"):
        drafters.from_pretrained(theirs.to("meta"), target)
    with pytest.raises(
        UnsupportedError, match=r"LlamaForCausalLM: model_type 'llama' and architectures .* are no drafter"
    ):
        drafters.from_pretrained(helpers.model(), helpers.model())
    with pytest.raises(UnsupportedError, match="a drafter that transformers has loaded, got int"):
        drafters.inspect(3)
    assert written.folder == tmp_path


def test_layers_differ_in_the_dimension_of_heads_alone(tmp_path: Path) -> None:
    config = write(tmp_path).config
    for layers, message in (
        ({"2": {"head_dim": 32, "intermediate_size": 9}}, r"per_layer_config\.2\.intermediate_size is not served"),
        ({"2": {"head_dim": "32"}}, r"per_layer_config\.2\.head_dim' must be a whole number"),
        ({"2": 32}, r"per_layer_config\.2' must be an object"),
        ([32], r"per_layer_config' must be an object"),
    ):
        config["text_config"]["per_layer_config"] = layers
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=message):
            drafters.inspect(tmp_path, target_of("plain"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_greedy_text_is_that_of_plain_generate(dialect: str) -> None:
    target, drafter = target_of(dialect), loaded(dialect)[1]
    reference = helpers.plain(target, **helpers.batch(helpers.FOUR), max_new_tokens=NEW)
    steered = Steered(drafter, reference, helpers.RAGGED)
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    made = helpers.speculate(target, steered, trees.BestFirst(nodes=14, branch=3, depth=4), **request)
    helpers.assert_equal(made, reference)


def test_keys_that_are_stored_in_eight_bits() -> None:
    """The assistant reads what the target's own attention would."""
    target, (_, drafter) = target_of("plain"), loaded("plain")
    generator = SpeculativeGenerator(target, drafter, trees.Chain(3), cache=kv.INT8)
    plain = SpeculativeGenerator(target, tree=trees.Chain(3), cache=kv.INT8)
    prompt = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6]]), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(generator.generate(**prompt), plain.generate(**prompt))
    assert generator.stats.drafted > 0


def test_e10_every_round_reads_the_committed_text() -> None:
    """After ragged rounds a drafter that starts anew on the same text says the same."""
    target, (written, found) = target_of("plain"), loaded("plain")
    request = {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    reference = helpers.text("ragged", NEW, "gemma4")
    checked = []

    class Compared(Steered):
        def children(self, frontier: Frontier, count: int) -> Any:
            if frontier.depth == 0 and self.round > 3:
                answer = self.drafter.children(frontier, count)
                for row, length in enumerate(self.lengths.tolist()):
                    first = reference.shape[1] - NEW - len(helpers.FOUR[row])
                    text = reference[row : row + 1, first : first + length]
                    if frontier.valid[row, 0]:
                        checked.append((row, text, answer.law(97)[row, 0]))
            return super().children(frontier, count)

    helpers.speculate(target, Compared(found, reference, helpers.RAGGED), trees.BestFirst(nodes=10, depth=3), **request)
    assert len(checked) > 8
    for _, text, law in checked[::3]:
        with torch.no_grad():
            output = target(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        shared = {
            kind: (keys[0].transpose(0, 1), values[0].transpose(0, 1))
            for kind, (keys, values) in output.shared_kv_states.items()
        }
        after = law_of(written, target, shared, output.hidden_states[-1][0, -1], int(text[0, -1]))
        torch.testing.assert_close(law, after([])[1].softmax(-1), rtol=1e-6, atol=1e-8)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dialect=st.sampled_from(DIALECTS), data=st.data())
def test_a_wrong_tensor_or_key_is_named(dialect: str, data: st.DataObject) -> None:
    folder = Path(mkdtemp())
    written, target = write(folder, dialect), target_of(dialect)
    name = data.draw(st.sampled_from(sorted(written.weights)))
    weights = dict(written.weights)
    tensor = weights.pop(name)
    change = data.draw(st.sampled_from(["remove", "rename", "reshape", "retype"]))
    if change == "rename":
        weights[f"{name}_"] = tensor
    if change == "reshape":
        weights[name] = torch.cat([tensor, tensor[:1]])
    if change == "retype":
        weights[name] = tensor.to(torch.int8 if tensor.is_floating_point() else torch.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
        drafters.from_pretrained(folder, target)


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"enable_moe_block": True}, "enable_moe_block True is not served"),
    ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input above 0"),
    ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
    ({"layer_types": ["full_attention"]}, "'layer_types' must name a type for each layer"),
    ({"rope_parameters": {"full_attention": {}}}, "'rope_parameters' must have a section for each"),
]


@pytest.mark.parametrize(("overrides", "message"), KEYS)
def test_what_is_not_served_is_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = write(tmp_path).config
    config["text_config"] |= overrides
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        drafters.inspect(tmp_path, target_of("plain"))


def test_what_it_needs_of_its_surroundings(tmp_path: Path) -> None:
    written, found = loaded("plain")
    with pytest.raises(UnsupportedError, match=r"Pass target="):
        drafters.inspect(written.folder)
    tokens, mask = torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="attends to the target's keys and values; this request offers none"):
        found.start(DraftContext(tokens, mask, 97, features=torch.zeros(1, 3, 48, dtype=torch.float64)))
    with pytest.raises(UnsupportedError, match="borrows an embedding of 97 x 48, the target's is 97 x 24"):
        drafters.from_pretrained(written.folder, helpers.model("gemma4", hidden_size=24))
    few, request = drafters.Shortlist(torch.arange(5), 97), {"input_ids": tokens, "max_new_tokens": 4}
    with pytest.raises(UnsupportedError, match="takes no shortlist"):
        drafters.from_pretrained(written.folder, target_of("plain"), shortlist=few)
    mixed = write(tmp_path, "centroids")
    wrong = {**mixed.weights, "masked_embedding.token_ordering": torch.zeros(96, dtype=torch.int64)}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="does not hold each token once"):
        drafters.from_pretrained(tmp_path, target_of("centroids"))
    with pytest.raises(UnsupportedError, match="no layer of type 'sliding_attention' with keys of its own"):
        helpers.speculate(helpers.model("llama", num_hidden_layers=4), found, trees.Chain(2), **request)


def test_the_reference_notices_another_window_or_position() -> None:
    written, target = loaded("plain")[0], target_of("plain")
    text = torch.randint(1, 97, (1, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = target(text, output_hidden_states=True, return_shared_kv_states=True)
    shared = {k: (a[0].transpose(0, 1), b[0].transpose(0, 1)) for k, (a, b) in output.shared_kv_states.items()}
    right, *wrong = (
        assistant_reference.draft(
            written.weights,
            {**written.reference, "window_from": "position", **rule},
            shared,
            output.hidden_states[-1][0, -1],
            5,
            embed=target.get_input_embeddings()(torch.arange(97)).detach(),
        ).logits
        for rule in ({"position": "anchor"}, {"position": "last"}, {"window": 9}, {"window_from": "rows"})
    )
    assert all(float((right - other).abs().max()) > 1e-3 for other in wrong)
