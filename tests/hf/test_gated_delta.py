"""Which layers a tree may run through: the test at load, the refusals by name, and names that are put back."""

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specdec import SpeculativeGenerator
from specdec.errors import UnsupportedError
from specdec.hf import gated_delta, support
from specdec.hf.target import ModelTarget
from specdec.testing import tiny_model
from tests.hf.hybrid import HYBRID, PLAIN, Hybrid, follow, modules, walk
from tests.hf.texts import ROWS, Texts, draft, model, play

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def first_layer(family: str, dtype: torch.dtype = torch.float64) -> Any:
    return gated_delta.gated_layers(tiny_model(family, dtype=dtype))[0]


# ------------------------------------------------------------------------------------------------------ the self-test


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_all_families_pass(family, dtype):
    """And leave no state behind, neither in the layer nor in its module."""
    layer = first_layer(family, dtype)
    before = names(sys.modules[type(layer).__module__])
    weights = copy.deepcopy(layer.state_dict())
    gated_delta.self_test(layer)
    assert names(sys.modules[type(layer).__module__]) == before
    assert all(map(torch.equal, weights.values(), layer.state_dict().values()))


@pytest.mark.parametrize("family", HYBRID)
def test_each_family_has_as_many_gated_layers_as_its_configuration_says(family):
    target = model(family)
    kinds = target.config.get_text_config(decoder=True).layer_types
    assert len(gated_delta.gated_layers(target)) == kinds.count("linear_attention") == 3
    assert gated_delta.gated_layers(model("llama")) == []


def test_weights_that_are_elsewhere_are_not_tested():
    """Offloaded layers have nothing to run with yet."""
    gated_delta.self_test(first_layer("qwen3_5").to("meta"))


def _another_kernel(patch: pytest.MonkeyPatch, layer: Any) -> None:
    """What `use_kernels=True` may do: a forward that never asks the names of the module."""
    module = sys.modules[type(layer).__module__]
    originals, forward = names(module), layer.forward

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop(gated_delta.CONTEXT, None)
        present = names(module)
        for name, original in originals.items():
            setattr(module, name, original)
        try:
            return forward(*args, **kwargs)
        finally:
            for name, function in present.items():
                setattr(module, name, function)

    patch.setattr(layer, "forward", kernel)


def _rule_by(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch, Any], None]:
    def mutate(patch: pytest.MonkeyPatch, layer: Any) -> None:
        def other(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
            output, state = walk(*change(query, key, value, g, beta), **options)
            return output, None if state is None else state.to(torch.float32)

        for name in gated_delta.RULES[0]:
            patch.setattr(sys.modules[type(layer).__module__], name, other)

    return mutate


def _without_length(patch: pytest.MonkeyPatch, layer: Any) -> None:
    """Keys and queries as they are, whatever the layer asks for."""

    def other(*given: Any, **options: Any) -> Any:
        return walk(*given, **{**options, "use_qk_l2norm_in_kernel": False})

    for name in gated_delta.RULES[0]:
        patch.setattr(sys.modules[type(layer).__module__], name, other)


def _another_convolution(patch: pytest.MonkeyPatch, layer: Any) -> None:
    module = sys.modules[type(layer).__module__]
    convolve = module.causal_conv1d_fn
    update = module.causal_conv1d_update
    patch.setattr(module, "causal_conv1d_fn", lambda *args, **options: 1.5 * convolve(*args, **options))
    patch.setattr(module, "causal_conv1d_update", lambda *args, **options: 1.5 * update(*args, **options))


def _wider_state(patch: pytest.MonkeyPatch, layer: Any) -> None:
    """Outputs are right, and what is left behind is not."""

    def other(*given: Any, **options: Any) -> Any:
        output, state = walk(*given, **options)
        return output, None if state is None else (1.05 * state if given[0].shape[1] == 1 else state).float()

    for name in gated_delta.RULES[0]:
        patch.setattr(sys.modules[type(layer).__module__], name, other)


OTHERS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Any], None], str]] = {
    "another kernel": (_another_kernel, "another kernel has taken its place.*use_kernels=False"),
    "no decay": (_rule_by(lambda q, k, v, g, beta: (q, k, v, 0 * g, beta)), "differs from that of single steps"),
    "no correction": (_rule_by(lambda q, k, v, g, beta: (q, k, v, g, 0 * beta + 1)), "does not compute the gated"),
    "strengths above one": (_rule_by(lambda q, k, v, g, beta: (q, k, v, g, 2 * beta)), "does not compute the gated"),
    "lengths of keys": (_without_length, "does not compute the gated delta rule that this version knows"),
    "another convolution": (_another_convolution, "does not compute the gated"),
    "a state that grows": (_wider_state, "differs from that of single steps"),
}


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_does_something_else_is_refused(family, name, monkeypatch):
    """Before any forward of the model, with the name of the layer and what to do."""
    target = tiny_model(family)
    layer: Any = gated_delta.gated_layers(target)[0]
    before = names(sys.modules[type(layer).__module__])
    mutate, message = OTHERS[name]
    target.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    with monkeypatch.context() as patch:
        mutate(patch, layer)
        changed = names(sys.modules[type(layer).__module__])
        with pytest.raises(UnsupportedError, match=f"(?s){type(layer).__name__}.*{message}.*model.generate"):
            ModelTarget(target, torch.tensor([[5, 6, 7]]))
        assert names(sys.modules[type(layer).__module__]) == changed
    assert names(sys.modules[type(layer).__module__]) == before
    gated_delta.self_test(layer)


# ----------------------------------------------------------------------------------------------------- other families


def test_kin_that_go_by_the_same_names_are_served():
    """A family that nothing was written for: the names and the self-test decide. It has a sliding layer too."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.LaraMiniConfig(
        **{**SMALL, **sizes, **experts, "num_hidden_layers": 4, "sliding_window": 6, "linear_value_head_dim": 12},
        shared_expert_intermediate_size=32,
    )
    assert config.layer_types[:2] == ["linear_attention", "sliding_attention"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = transformers.LaraMiniForCausalLM(config).double().eval()
    target.set_experts_implementation("eager")
    assert max(follow(Hybrid(target, ROWS[:3]), seed=1, rounds=4, most=7)) <= PLAIN


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 24}
RECURRENT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "falcon_mamba": (
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2},
        "linear_attention",
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**SMALL, "attn_layer_indices": [1], **HEADS}, "hybrid|linear_att"),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**SMALL, "attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2},
        "linear_attention",
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", SMALL, "linear_attention|mamba"),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**SMALL, **HEADS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
        "linear_attention|mamba",
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {**SMALL, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
        "linear_attention",
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {**SMALL, "layers_block_type": ["mamba", "hybrid"]},
        "hybrid|linear_attention",
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
            "indexer_head_dim": 256,
            "indexer_kv_heads": 1,
            "indexer_n_heads": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
        "indexed_attention",
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_other_recurrent_layers_are_refused_by_the_name_of_their_type(name):
    """Models without weights show that nothing runs. The survey of `test_support` has more."""
    config, kind, options, message = RECURRENT[name]
    with torch.device("meta"):
        other = getattr(transformers, kind)(getattr(transformers, config)(**options))
    other.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass before the refusal"))
    for use in (
        lambda: support.check_model(other),
        lambda: SpeculativeGenerator(other),
        lambda: ModelTarget(other, torch.tensor([[5, 6]])),
    ):
        with pytest.raises(UnsupportedError, match=message):
            use()


# ------------------------------------------------------------------------------------------------- names put back


def names(module: Any) -> dict[str, Any]:
    """What the names of a module stand for."""
    return {
        name: getattr(module, name) for name in (gated_delta.CONVOLUTION, *gated_delta.RULES[0], "causal_conv1d_update")
    }


def test_names_are_put_back_after_an_error():
    found, before = tuple(modules()), [names(module) for module in modules()]

    def fail() -> None:
        with gated_delta.running(found):
            assert all(names(module) != was for module, was in zip(found, before, strict=True))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [names(module) for module in found] == before


def test_names_are_put_back_after_a_failed_forward():
    """In a prompt and in a tree; the target serves again afterwards, if nothing had been folded."""
    target = model("qwen3_5")
    module = sys.modules[type(target).__module__]
    before = names(module)
    texts = Texts(target, ROWS[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target.lm_head), "forward", lambda *_: 1 / 0)
        for use in (lambda: Texts(target, ROWS[:2]), lambda: texts.target.verify(draft(1, [3, 3]))):
            with pytest.raises(ZeroDivisionError):
                use()
            assert names(module) == before
    assert play(texts, seed=1, rounds=2) <= PLAIN


def test_the_last_of_nested_users_puts_names_back():
    one, *others = modules()
    before = [names(module) for module in modules()]
    with gated_delta.running((one, *others)):
        inside = names(one)
        with gated_delta.running((one,)):
            assert names(one) == inside
        assert names(one) == inside != before[0]
    assert [names(module) for module in modules()] == before
    with gated_delta.running((one,)):
        assert names(one) == inside, "a compiled forward is bound to them"
        assert [names(module) for module in others] == before[1:]


def test_functions_that_were_replaced_in_between_are_the_ones_that_are_called():
    """By a kernel that was installed after the first forward, say."""
    module, called = modules()[1], []
    with gated_delta.running((module,)):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, gated_delta.RULES[0][0], lambda *_, **__: called.append(1))
        with gated_delta.running((module,)):
            rule = getattr(module, gated_delta.RULES[0][0])
            rule(*torch.zeros(5), use_qk_l2norm_in_kernel=True)
        assert called == [1]


def test_other_users_of_the_module_get_the_originals():
    """Plain forwards while a forward of ours runs, in other threads too."""
    target, ids = model("qwen3_5"), torch.tensor([ROWS[1]])
    with torch.no_grad():
        expected = target(ids).logits
        with gated_delta.running((sys.modules[type(target).__module__],)):
            assert torch.equal(target(ids).logits, expected)


def test_threads_share_the_names():
    """Each finds its functions from its first forward to its last, and nobody's are left behind."""
    before, start = [names(module) for module in modules()], threading.Barrier(4)

    def serve(index: int) -> float:
        start.wait()
        return play(Texts(model(HYBRID[index % 2]), ROWS[:2]), seed=index, rounds=3, most=4)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(serve, range(4))) <= PLAIN
    assert [names(module) for module in modules()] == before


def test_users_who_do_not_count_each_other_are_noticed(monkeypatch):
    """The second would take the functions of the first for those of the module, and leave them behind."""
    one = modules()[0]
    before = names(one)
    for name, function in before.items():
        monkeypatch.setattr(one, name, function)
    for record in ("_users", "_originals", "_stand_ins"):
        monkeypatch.setattr(gated_delta, record, {})
    with gated_delta.running((one,)):
        monkeypatch.setitem(gated_delta._users, one.__name__, 0)
        with gated_delta.running((one,)):
            pass
        monkeypatch.setitem(gated_delta._users, one.__name__, 1)
    assert names(one) != before
