"""How the layers of a model find their rows in a device round: by an operator that knows whom it serves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec import ops
from specdec.errors import SpecdecError
from specdec.hf import compat, gated_delta, support
from specdec.hf.attention import CONTEXT, attending, read
from specdec.hf.features import joined
from specdec.hf.fixed_cache import FixedCache
from specdec.hf.fixed_states import FixedStates

OPERATOR = "specdec::device_attention"
CONVOLUTION, RULE = "specdec::device_convolution", "specdec::device_rule"


class RoundContext:
    """What the attention function needs to know in a device round; the cache writes and hands out rows."""

    def __init__(self, cache: FixedCache, model: Any, impl: ops.Impl) -> None:
        """Sees nothing yet."""
        self.cache, self.impl = cache, impl
        self._config = model.config.get_text_config(decoder=True)
        register_operator()
        self.visible: Tensor | None = None
        self.depths: Tensor | None = None
        layers = gated_delta.gated_layers(support.plain(model)) if cache.recurrent is not None else []
        self._gated = gated_delta.modules_of(layers)

    def run(
        self,
        forward: Callable[..., Any],
        tokens: Int[Tensor, "batch rows"],
        positions: Int[Tensor, "batch rows"],
        visible: Int[Tensor, "batch rows words"],
        depths: Int[Tensor, "batch rows"],
        cached: Int[Tensor, " batch"],
        features: tuple[int, ...] = (),
    ) -> tuple[Float[Tensor, "batch rows vocab"], Float[Tensor, "batch rows features"] | None]:
        """One forward over new rows behind the `cached` committed slots: its logits, and the states of some layers."""
        self.cache.begin(cached, tokens.shape[1])
        self.visible, self.depths = visible, depths
        kwargs: dict[str, Any] = {compat.CACHE_NAME: self.cache, CONTEXT: self}
        if self.cache.recurrent is not None:
            self.cache.recurrent.begin(visible)
            kwargs[gated_delta.CONTEXT] = self
        with attending(self._config), gated_delta.running(self._gated), self.serving():
            output = forward(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=None,
                use_cache=True,
                return_dict=True,
                **({"output_hidden_states": list(features)} if features else {}),
                **kwargs,
            )
        return output.logits, joined(output, features) if features else None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Says whose rows the operator stores."""
        _serving.append(self)
        try:
            yield
        finally:
            _serving.pop()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores the rows of a layer and attends to them, `[batch, rows, heads, dim]`.

        To `torch.compile` this is one operator, which knows by itself whom it serves.
        """
        if torch.compiler.is_compiling():
            wanted = query.shape[-1] ** -0.5 if scale is None else scale
            attended: Tensor = torch.ops.specdec.device_attention(
                query, key, value, sinks, layer, wanted, 0.0 if softcap is None else softcap
            )
            return attended
        if self.visible is None or self.depths is None:
            raise SpecdecError("a device round attends before it has a tree.")
        keys, values, forward, window = self.cache.store(layer, key, value)
        return read(
            query,
            keys,
            values,
            self.visible,
            forward.lengths,
            depths=self.depths,
            starts=forward.starts,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            impl=self.impl,
        )

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The convolution of a recurrent layer, `[batch, channels, rows]`; one operator to `torch.compile`."""
        states = self._states()
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.specdec.device_convolution(inputs, weight, bias, states.serving, activation or "")
            return found.transpose(1, 2)
        return states.convolve(states.serving, inputs, weight, bias, activation)

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """The gated delta rule of a layer; one operator to `torch.compile`. The cache has no use for a state."""
        states = self._states()
        if torch.compiler.is_compiling():
            output: Tensor = torch.ops.specdec.device_rule(query, key, value, decay, beta, states.serving)
        else:
            output = states.rule(states.serving, query, key, value, decay, beta)
        return output, output

    def _states(self) -> FixedStates:
        if self.cache.recurrent is None:
            raise SpecdecError("the model runs a recurrent layer, and the cache of its device rounds has none.")
        return self.cache.recurrent


_serving: list[RoundContext] = []
"""The round that is being run or captured; the operator asks here."""


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes attention, and what recurrent layers ask for, operators that `torch.compile` leaves alone.

    Compiled code relies on results that are contiguous; kernels give them so, references of the ops need not.
    """

    def attention(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int, scale: float, softcap: float
    ) -> Tensor:
        return _serving[-1].attend(layer, query, key, value, scale, softcap or None, sinks).contiguous()

    def shaped(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001 - the operator's
        batch, heads, rows, _ = query.shape
        return query.new_empty(batch, rows, heads, value.shape[-1])

    schema = "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale, float softcap) -> Tensor"
    torch.library.custom_op(OPERATOR, attention, mutates_args=(), schema=schema).register_fake(shaped)

    def convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, place: int, activation: str) -> Tensor:
        found = _serving[-1]._states().convolve(place, inputs, weight, bias, activation or None)
        return found.transpose(1, 2).contiguous()

    def rows(inputs: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001 - the operator's
        return inputs.new_empty(inputs.shape[0], inputs.shape[2], inputs.shape[1])

    def rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, place: int) -> Tensor:
        return _serving[-1]._states().rule(place, query, key, value, decay, beta).contiguous()

    schema = "(Tensor inputs, Tensor weight, Tensor? bias, int place, str activation) -> Tensor"
    torch.library.custom_op(CONVOLUTION, convolution, mutates_args=(), schema=schema).register_fake(rows)
    schema = "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, int place) -> Tensor"

    def like_values(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001 - the operator's
        return value.new_empty(value.shape)

    torch.library.custom_op(RULE, rule, mutates_args=(), schema=schema).register_fake(like_values)
