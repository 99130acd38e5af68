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
from specdec.hf import compat
from specdec.hf.attention import CONTEXT, attending, read
from specdec.hf.features import joined
from specdec.hf.fixed_cache import FixedCache

OPERATOR = "specdec::device_attention"


class RoundContext:
    """What the attention function needs to know in a device round; the cache writes and hands out rows."""

    def __init__(self, cache: FixedCache, model: Any, impl: ops.Impl) -> None:
        """Sees nothing yet."""
        self.cache, self.impl = cache, impl
        self._config = model.config.get_text_config(decoder=True)
        register_operator()
        self.visible: Tensor | None = None
        self.depths: Tensor | None = None

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
        with attending(self._config), self.serving():
            output = forward(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=None,
                use_cache=True,
                return_dict=True,
                **({"output_hidden_states": list(features)} if features else {}),
                **{compat.CACHE_NAME: self.cache, CONTEXT: self},
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


_serving: list[RoundContext] = []
"""The round that is being run or captured; the operator asks here."""


@lru_cache(maxsize=1)
def register_operator() -> None:
    """Makes attention an operator that `torch.compile` leaves alone."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layer: int, scale: float, softcap: float
    ) -> Tensor:
        return _serving[-1].attend(layer, query, key, value, scale, softcap or None, sinks).contiguous()

    def shaped(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001 - the operator's
        batch, heads, rows, _ = query.shape
        return query.new_empty(batch, rows, heads, value.shape[-1])

    schema = "(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scale, float softcap) -> Tensor"
    torch.library.custom_op(OPERATOR, attention, mutates_args=(), schema=schema).register_fake(shaped)
