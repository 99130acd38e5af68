"""Which codec holds what."""

from typing import Any

import pytest
import torch

from specdec import kv
from specdec.errors import UnsupportedError


def test_by_default_everything_is_plain() -> None:
    config = kv.KVCacheConfig()
    assert (config.keys, config.values) == (kv.Plain(), kv.Plain())
    assert config.bits_per_element(64, dtype=torch.float32) == 32
    assert config.for_layer("sliding_attention") is config


def test_a_layer_type_of_its_own() -> None:
    config = kv.KVCacheConfig(keys=kv.Int8(), layers={"sliding_attention": kv.KVCacheConfig()})
    assert config.for_layer("full_attention").keys == kv.Int8()
    assert config.for_layer("sliding_attention").keys == kv.Plain()


def test_bits_are_the_mean_of_keys_and_values() -> None:
    config = kv.KVCacheConfig(keys=kv.Int8(), values=kv.Int4())
    assert config.bits_per_element(128, 64) == pytest.approx((8.25 * 128 + 5 * 64) / 192)


@pytest.mark.parametrize(
    ("preset", "bits"), [(kv.INT8, 8.25), (kv.FP8_INT8, 8.25), (kv.INT8_INT4, 6.625), (kv.INT4, 5.0)]
)
def test_presets(preset: kv.KVCacheConfig, bits: float) -> None:
    assert preset.bits_per_element(128) == bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": kv.Int8}, "takes a codec such as"),
        ({"values": "int8"}, "got 'int8'"),
        ({"layers": {"sliding_attention": kv.Int8()}}, "takes {layer type: KVCacheConfig"),
        ({"layers": [kv.INT8]}, "takes {layer type: KVCacheConfig"),
        ({"layers": {"linear_attention": kv.KVCacheConfig()}}, "names \\['linear_attention'\\]"),
        ({"layers": {"full_attention": kv.KVCacheConfig(layers={"full_attention": kv.INT8})}}, "inside layers="),
    ],
)
def test_what_is_no_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _unchecked(**options)


def _unchecked(**options: Any) -> kv.KVCacheConfig:
    """A configuration made without the check of annotations, which only tests have."""
    config = object.__new__(kv.KVCacheConfig)
    for name, default in (("keys", kv.Plain()), ("values", kv.Plain()), ("layers", {})):
        object.__setattr__(config, name, options.get(name, default))
    config.__post_init__()
    return config
