"""Drafters of Muse Glimmer compute what transformers' own module and candidate generator compute."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, MuseGlimmerAssistantModel
from transformers.generation import DFlashTokenCandidateGenerator

from specdec import SpeculativeGenerator, drafters, trees
from specdec.drafters.block import BlockDrafter, BlockModel
from specdec.drafters.checkpoints.keys import SILENT
from specdec.errors import UnsupportedError
from specdec.types import Frontier
from tests import helpers
from tests.drafters.block import glimmer_checkpoints as glimmer
from tests.drafters.block.checkpoints import HIDDEN, MASK
from tests.drafters.steered import Steered

NEW = 24
BLOCK = 6
ROUNDS = 4


def exact(model: MuseGlimmerAssistantModel) -> MuseGlimmerAssistantModel:
    """The same module with norms and rotations in float64, which transformers computes in float32."""
    theta, dim = model.config.rope_parameters["rope_theta"], model.config.head_dim

    def turned(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] / theta ** (torch.arange(0, dim, 2).double() / dim)
        return torch.cat([angles, angles], -1).cos().to(rows), torch.cat([angles, angles], -1).sin().to(rows)

    def normed(module: Any) -> Any:
        return lambda rows: nn.functional.rms_norm(rows, rows.shape[-1:], module.weight, module.variance_epsilon)

    model.rotary_emb.forward = turned
    for module in model.modules():
        if type(module).__name__ == "MuseGlimmerAssistantRMSNorm":
            module.forward = normed(module)
    return model


@dataclasses.dataclass
class Round:
    """A text that is committed: its tokens, and the states of those that are new, in every layer."""

    tokens: Tensor
    states: list[Tensor]


def story(length: int, seed: int) -> list[Round]:
    """A text that begins with so many tokens and an anchor, and grows by 1 to BLOCK tokens a round."""
    source = torch.Generator().manual_seed(seed)
    steps = [length, *torch.randint(1, BLOCK + 1, (ROUNDS - 1,), generator=source).tolist()]
    tokens = torch.randint(1, 96, (1, sum(steps) + 1), generator=source)
    told, known = [], 0
    for step in steps:
        states = [torch.randn(1, step, HIDDEN, generator=source, dtype=torch.float64) for _ in range(3)]
        known += step
        told.append(Round(tokens[:, : known + 1], states))
    return told


def of_transformers(model: MuseGlimmerAssistantModel, target: Any, rounds: list[Round]) -> list[tuple[Tensor, Tensor]]:
    """Outputs and logits of the slots of each round, by its generator of candidates and its cache."""
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state[:, 1:]))
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    source = DFlashTokenCandidateGenerator(model, embedding, head, GenerationConfig(max_length=500, do_sample=False))
    found = []
    with torch.no_grad():
        for number, each in enumerate(rounds):
            width, new = each.tokens.shape[1], each.states[0].shape[1]
            inputs = {"position_ids": torch.arange(width)[None], "attention_mask": torch.ones(1, width)}
            beyond = [nn.functional.pad(states, (0, 0, 0, 2 * (number > 0)), value=torch.nan) for states in each.states]
            _, logits = source.get_candidates(
                each.tokens,
                inputs,
                SimpleNamespace(hidden_states=beyond),
                is_first_iteration=False,
                n_last_matches=new - 1,
            )
            assert logits is not None
            found.append((seen[-1], logits))
    handle.remove()
    return found


def of_ours(model: BlockModel, stories: list[list[Round]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The same of one batch with rows of unequal lengths."""
    context, rounds = model.context(len(stories)), []
    layers = model.spec.feature_layers
    with torch.no_grad():
        for each in zip(*stories, strict=True):
            counts = torch.tensor([told.states[0].shape[1] for told in each])
            given = [torch.cat([told.states[layer] for layer in layers], -1)[0] for told in each]
            model.extend(context, nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=9.0), counts)
            hidden = model.slots(torch.cat([told.tokens[:, -1] for told in each]), context, BLOCK)
            rounds.append((hidden, model.logits(hidden)))
    return [
        [(hidden[row : row + 1], logits[row : row + 1]) for hidden, logits in rounds] for row in range(len(stories))
    ]


def shaped(logits: Tensor, target: Any) -> Tensor:
    """Logits of the plain head as the target shapes its own; transformers' generator of candidates leaves that out."""
    config = target.config.get_text_config()
    scaled, cap = logits * getattr(config, "output_multiplier", 1.0), getattr(config, "final_logit_softcapping", None)
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


@pytest.mark.parametrize("own", [True, False], ids=["on its own target", "on a llama"])
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 19), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_slots_of_every_round(own: bool, lengths: list[int], seed: int) -> None:
    """Windows that the text outgrows, both kinds of layers, committed features, unequal rows, the raw embedding."""
    target = glimmer.target() if own else helpers.model()
    model = glimmer.model(seed)
    found = drafters.from_pretrained(model, target)
    assert isinstance(found, BlockDrafter)
    stories = [story(length, seed + row) for row, length in enumerate(lengths)]
    ours = of_ours(found.model, stories)
    for change, close in ((lambda same: same, {"rtol": 1e-4, "atol": 1e-4}), (exact, {"rtol": 1e-10, "atol": 1e-10})):
        changed = change(model)
        for row, told in enumerate(stories):
            for (hidden, logits), (wanted, raw) in zip(ours[row], of_transformers(changed, target, told), strict=True):
                torch.testing.assert_close(hidden, wanted, **close)
                torch.testing.assert_close(logits, shaped(raw, target), **close)
                assert torch.equal(logits.argmax(-1), raw.argmax(-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": (glimmer.WINDOW, None, glimmer.WINDOW)},
        {"windows": (glimmer.WINDOW + 2, None, glimmer.WINDOW + 2)},
        {"causal": (True, False, True)},
        {"window_from": "anchor"},
        {"feature_layers": (0, 1)},
        {"mask_token_id": MASK - 1},
        {"rms_norm_eps": 1e-2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_reading_is_noticed(wrong: dict[str, Any]) -> None:
    """Each of these loads without a complaint, and computes something else."""
    target, model = glimmer.target(), exact(glimmer.model())
    found = drafters.from_pretrained(model, target)
    told = story(19, 0)
    wanted = of_transformers(model, target, told)
    changed = BlockModel(dataclasses.replace(found.model.spec, **wrong)).double()
    changed.load_state_dict(found.model.state_dict())
    right = of_ours(found.model, [told])[0]
    off = of_ours(changed.borrow(target), [told])[0]
    for (hidden, _), (other, _), (expected, _) in zip(right, off, wanted, strict=True):
        assert float((hidden - expected).abs().max()) < 1e-10
        assert float((other - expected).abs().max()) > 1e-3


def test_files_and_objects_say_the_same(tmp_path: Path) -> None:
    target = glimmer.target()
    written = glimmer.write(tmp_path)
    theirs = MuseGlimmerAssistantModel.from_pretrained(tmp_path, dtype=torch.float64)
    of_file, of_object = drafters.inspect(tmp_path, target), drafters.inspect(theirs, target)
    assert of_file.spec == of_object.spec
    assert (of_file.dialect, of_file.borrowed) == ("transformers", ("embedding", "output head"))
    assert of_file.unknown == of_object.unknown == ()
    spec = of_file.spec
    assert (spec.family, spec.layout, spec.window_from, spec.causal) == ("dflash", "fill_in", "query", (False,) * 3)
    assert spec.windows == (glimmer.WINDOW + 1, None, glimmer.WINDOW + 1)
    assert spec.feature_layers == written.feature_layers == (1, 2)
    assert (spec.output_multiplier, spec.softcap, spec.rms_norm_eps) == (0.4, 3.0, 1e-5)
    shown = str(of_file)
    assert all(note.field in shown and note.source in shown for note in of_file.notes)
    loaded, lent = (drafters.from_pretrained(source, target).model.state_dict() for source in (tmp_path, theirs))
    ours = {value.data_ptr() for value in lent.values()}
    assert ours == {value.data_ptr() for value in theirs.state_dict().values()}
    assert all(torch.equal(loaded[name], lent[name]) for name in loaded)
    assert len(loaded) == len(written.weights)


def test_drafts_are_those_of_transformers() -> None:
    """Each round of transformers' own speculation on the same target: features, anchor, embedding and positions."""
    target, model = glimmer.target(), glimmer.model()
    prompt, theirs = torch.tensor([helpers.FOUR[1]]), list[list[int]]()
    head = target.get_output_embeddings()

    def watch(*given: Any) -> None:
        theirs.append(head(given[-1].last_hidden_state[0, 1:]).argmax(-1).tolist())

    handle = model.register_forward_hook(watch)
    options = {"assistant_model": model, "speculation_type": "dflash", "max_new_tokens": NEW}
    text = helpers.plain(target, input_ids=prompt, **options)
    handle.remove()
    found, ours = drafters.from_pretrained(model, target), list[list[int]]()

    class Watched:
        feature_layers = found.feature_layers
        start, commit, finish = found.start, found.commit, found.finish

        def children(self, frontier: Frontier, count: int) -> Any:
            answer = found.children(frontier, count)
            if frontier.depth == 0:
                ours.append([])
            ours[-1].append(int(answer.tokens[0, 0, 0]))
            return answer

    made = helpers.speculate(target, Watched(), trees.Chain(BLOCK - 1), input_ids=prompt, max_new_tokens=NEW)
    assert torch.equal(made.output, text)
    assert len(ours) > NEW / 2
    for mine, other in zip(ours, theirs, strict=False):
        assert mine == other[: len(mine)]


@pytest.mark.parametrize("tree", [trees.Chain(4), trees.BestFirst(nodes=14, branch=3, depth=4)], ids=repr)
def test_greedy_text_is_that_of_plain_generate(tree: Any) -> None:
    """Full, partial, zero and empty rounds, in a ragged batch."""
    target, request = glimmer.target(), {**helpers.batch(helpers.FOUR), "max_new_tokens": NEW}
    reference = helpers.plain(target, **request)
    steered = Steered(drafters.from_pretrained(glimmer.model(), target), reference, helpers.RAGGED)
    helpers.assert_equal(helpers.speculate(target, steered, tree, **request), reference)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    written = glimmer.write(tmp_path / "a")
    with pytest.raises(UnsupportedError, match=r"does not tell how many tokens its target has\. Pass target="):
        drafters.inspect(written.folder)
    for overrides, message in (
        ({"target_layer_ids": [1, 6]}, "reads hidden state 7, the target has states 0 to 4"),
        ({"mask_token_id": 97}, "mask_token_id 97 is no row of an embedding of 97"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": 32}, "borrows an embedding of 97 x 32, the target's is 97 x 48"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            drafters.from_pretrained(glimmer.model(**overrides), glimmer.target())


def test_whatever_is_missing_or_misnamed_is_named(tmp_path: Path) -> None:
    """Each tensor, under the publisher's name, and each key: none falls back to the numbers of the published model."""
    target, written = glimmer.target(), glimmer.write(tmp_path)
    for name, tensor in written.weights.items():
        rest = {other: value for other, value in written.weights.items() if other != name}
        for weights, message in (
            (rest, f"tensors that are missing: {name}."),
            ({**rest, f"{name}_": tensor}, f"tensors that are missing: {name}; tensors that are not known: {name}_."),
            ({**rest, name: torch.cat([tensor, tensor])}, f"tensor '{name}' has shape"),
        ):
            save_file(weights, tmp_path / "model.safetensors")
            with pytest.raises(UnsupportedError, match=re.escape(message)):
                drafters.from_pretrained(tmp_path, target)
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        named = {name.replace(theirs, ours): tensor for name, tensor in written.weights.items()}
        for weights in (named, {**named, **written.weights}):
            save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
            with pytest.raises(UnsupportedError, match=rf"tensors that are not known: {ours}\.weight\."):
                drafters.from_pretrained(tmp_path, target)
    save_file(written.weights, tmp_path / "model.safetensors")
    for key in set(written.config) - SILENT:
        config = {other: value for other, value in written.config.items() if other != key}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=f"has no '{'rope_theta' if key == 'rope_parameters' else key}'"):
            drafters.inspect(tmp_path, target)


def test_it_is_written_in_the_format_of_zlab(tmp_path: Path) -> None:
    """Which says all that it is, the target's logits included."""
    target = glimmer.target()
    found = drafters.from_pretrained(glimmer.model(), target)
    folder = drafters.save_pretrained(found, tmp_path / "written", publisher="z-lab")
    assert drafters.inspect(folder, target).spec == found.model.spec
    generator = SpeculativeGenerator(target, drafters.from_pretrained(folder, target))
    assert generator.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)
