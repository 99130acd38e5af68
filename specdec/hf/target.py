"""A Hugging Face causal model as a `Target`: the model's own forward, our cache, a 4D mask and explicit positions.

No modelling code is copied and nothing is patched. The prompt runs through the same code as in plain `generate`;
a tree runs as one batch of rows whose mask holds the committed slots and each node's ancestors, and whose position
ids are the root's position plus the depth.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GenerationConfig

from specdec import ops
from specdec.errors import ShapeError, SpecdecError, UnsupportedError
from specdec.hf import compat, gated_delta, geometry, masks, support
from specdec.hf.attention import CONTEXT, Attention, Columns, TreeContext, attending, choose, obstacle
from specdec.hf.cache import RowCache, RowLayer, check_loadable
from specdec.hf.features import FeatureRecord, hidden_states, joined
from specdec.kv import KVCacheConfig
from specdec.ops._checks import booleans
from specdec.trees import topology
from specdec.types import CommittedRows, DraftTree, TargetOutput


class ModelTarget:
    """A model bound to one batch of prompts. Satisfies `specdec.protocols.Target` and `ModelRunner`.

    Args:
        model: a decoder-only causal model of transformers with attention layers; may be wrapped by `torch.compile`.
        input_ids: prompt token ids, left-padded; may have no columns when `model_kwargs` holds `inputs_embeds`.
        model_kwargs: what `generate` would hand to the forward (attention_mask, position_ids, cache, ...).
        generation_config: the resolved configuration of the call (chunked prefill, lengths of continued caches).
        feature_layers: indices into the model's hidden states to return as features.
        cache: codecs of keys and values; None stores them as they are.
        attention: who computes the attention of verify forwards; see `specdec.hf.attention`.

    Raises:
        UnsupportedError: if the model or an argument cannot be served exactly.

    Example:
        >>> import torch
        >>> from specdec.hf import ModelTarget
        >>> from specdec.testing import tiny_model
        >>> from specdec.types import DraftTree
        >>> target = ModelTarget(tiny_model("llama"), torch.tensor([[5, 6, 7]]))
        >>> target.prefill().logits.shape
        torch.Size([1, 1, 97])
        >>> target.verify(DraftTree.from_root(torch.tensor([8]))).logits.shape
        torch.Size([1, 1, 97])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        input_ids: Int[Tensor, "batch prompt"],
        *,
        model_kwargs: dict[str, Any] | None = None,
        generation_config: GenerationConfig | None = None,
        feature_layers: Sequence[int] = (),
        cache: KVCacheConfig | None = None,
        attention: Attention = "model",
    ) -> None:
        """Checks the model and prepares an empty cache; runs nothing."""
        support.check_model(model)
        self.model: Any = model
        self._gated = gated_delta.modules_of(gated_delta.tested_layers(support.plain(model)))
        given = (model_kwargs or {}).get(compat.CACHE_NAME)
        if given is not None:
            check_loadable(given)
        self._input_ids = input_ids
        self._kwargs = dict(model_kwargs or {})
        self._generation_config = generation_config if generation_config is not None else GenerationConfig()
        self._features = tuple(feature_layers)
        self._record = FeatureRecord() if self._features else None
        self._check_features(given)
        self._batch = input_ids.shape[0]
        self._device, self.model_device = input_ids.device, _device_of(self.model, input_ids.device)
        self._limit = support.position_limit(self.model.config)
        self._dict_mask = compat.has_layer_types(self.model.config)
        self._kinds = geometry.layer_windows(self._decoder, type(support.plain(model)).__name__)
        decoder = self._decoder
        kinds = getattr(decoder, "layer_types", None) or compat.get_layer_types_and_kwargs(decoder)[0]
        self._windows = tuple(self._kinds[kind] for kind in kinds if kind in self._kinds)
        self._attending = tuple(
            self._kinds[kind] for kind in kinds if kind in self._kinds and kind != "linear_attention"
        )
        self._pending_depths = torch.zeros(self._batch, 0, dtype=torch.int64, device=self._device)
        self._wants_hidden = bool(self._kwargs.get("output_hidden_states"))
        self._wants_attentions = bool(self._kwargs.get("output_attentions"))
        self._geometry = geometry.PromptGeometry.of(self._kwargs, input_ids, self._generation_config)
        self._prompt_mask, self.next_position = self._geometry.mask, self._geometry.following
        self.cache = RowCache(self.model.config, cache, self._prompt_mask)
        self._op = choose(attention, self.model_device, **self._asked)
        self.starts = None if self._prompt_mask is None else (~self._prompt_mask).sum(-1)
        self._check_rope()
        self._token_type = self._kwargs.get("token_type_ids")
        self.columns: dict[int | None, tuple[int, int]] = {}
        self._tree: DraftTree | None = None
        self._last_lengths = self.cache.lengths
        self._last_visible = torch.zeros(self._batch, 0, 0, dtype=torch.bool)

    @property
    def impl(self) -> ops.Impl | None:
        """The implementation of `ops.tree_attention` that was asked for; None for the model's own attention."""
        return self._op

    @property
    def device_obstacle(self) -> str:
        """Why this request cannot run in device rounds, which attend by the op and have one input; empty if it can."""
        if self._kwargs.get("token_type_ids") is not None:
            return "token_type_ids are not handed on"
        if self._geometry.axes is not None:
            return "its positions have several axes that differ"
        return obstacle(**self._asked)

    @property
    def _asked(self) -> dict[str, Any]:
        """What an implementation of the op must be able to do."""
        latent = compat.caches_latents(self.model.config)
        return {"weights": self._wants_attentions, "prompt": self._prompt_mask, "latent": latent}

    @property
    def _decoder(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Committed cache slots per row, left padding included."""
        return self.cache.lengths

    @property
    def depth_limit(self) -> Int[Tensor, " batch"] | None:
        """Deepest node that still has a position below the model's `max_position_embeddings`."""
        return None if self._limit is None else self._limit - 1 - self.next_position

    @torch.no_grad()
    def prefill(self) -> TargetOutput:
        """Runs the prompt, once; logits of its last token only."""
        if self.lengths.numel():
            raise SpecdecError("prefill() ran already; a ModelTarget serves one text. Make another for the next.")
        kwargs = dict(self._kwargs)
        given = kwargs.get(compat.CACHE_NAME)
        if given is not None and given.get_seq_length() > 0:
            self.cache.load(given)
        kwargs[compat.CACHE_NAME] = self.cache
        kwargs["use_cache"] = True
        kwargs["logits_to_keep"] = 1
        kwargs.update(self._output_kwargs())
        model: Any = support.plain(self.model)
        with hidden_states(model, self._features) as chunks, self._recurrent(kwargs):
            output = compat.prefill(model, self._input_ids, self._generation_config, kwargs)
        self.cache.end_prefill(self._batch, self._device)
        features = None
        if self._record is not None:
            features = torch.cat(chunks, 1)  # a prompt may be run in chunks, whose states the output does not join
            self._record.prompt(features)
        return self._pack(output, output.logits[:, -1:], features)

    def verify(self, tree: DraftTree) -> TargetOutput:
        """One forward over all nodes of a tree; an earlier one that was not committed is dropped.

        Raises:
            ShapeError: for a tree of another batch, and parents that do not come before their children.
            SpecdecError: before `prefill`.
        """
        if not self.lengths.numel():
            raise SpecdecError("verify() needs a prompt in the cache; call prefill() first.")
        topology.require_trees("verify", tree, self._batch)
        self._drop_pending()
        self._tree = tree
        visible = topology.reach(tree.parents)
        output = self.append(tree.tokens, visible.sum(-1) - 1, visible)
        if self._record is not None and output.features is not None:
            self._record.verified(output.features)
        return output

    def commit(self, nodes: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Keeps a root path and drops the rest of the tree; raises `ShapeError` for what is no such path."""
        if self._tree is None:
            raise SpecdecError("commit() was called without a tree; call verify() first, and commit once.")
        topology.require_path("commit", self._tree.parents, nodes, counts)
        if self._record is not None:
            self._record.committed(nodes, counts)
        self.keep(nodes, counts)

    def take_features(self, columns: int) -> Float[Tensor, "batch columns features"] | None:
        """Features of the committed tokens by their column, for a drafter that starts; None if none were asked for.

        They are told once; what is committed later is told round by round.
        """
        record, self._record = self._record, None
        return None if record is None else record.take(columns)

    def committed_rows(self, kind: str) -> CommittedRows:
        """Keys and values of the committed tokens, in the last layer of a type that computes its own.

        Raises:
            UnsupportedError: if the model has no such layer.
        """
        kinds, _ = compat.get_layer_types_and_kwargs(self._decoder)
        layers = [layer for each, layer in zip(kinds, self.cache.layers, strict=False) if each == kind]
        own = [layer for layer in layers if isinstance(layer, RowLayer)]
        if not own:
            raise UnsupportedError(f"{type(self.model).__name__} has no layer of type {kind!r} with keys of its own.")
        return self.cache.committed(own[-1], self.next_position)

    @torch.no_grad()
    def append(
        self,
        tokens: Int[Tensor, "batch rows"],
        depths: Int[Tensor, "batch rows"],
        visible: Bool[Tensor, "batch rows pending"],
    ) -> TargetOutput:
        """Runs new rows after the pending ones; see `specdec.protocols.ModelRunner`.

        Raises:
            ShapeError: if `visible` does not have one column for each pending row, the new ones included.
        """
        expected = (*tokens.shape, self._pending_depths.shape[1] + tokens.shape[1])
        if depths.shape != tokens.shape or tuple(visible.shape) != expected:
            raise ShapeError(
                f"{tokens.shape[1]} new rows after {self._pending_depths.shape[1]} pending ones need depths of shape "
                f"{list(tokens.shape)} and visible of shape {list(expected)}, got {list(depths.shape)} and "
                f"{list(visible.shape)}."
            )
        lengths = self.cache.lengths
        self._last_lengths, self._last_visible = lengths, visible
        self._pending_depths = torch.cat([self._pending_depths, depths], 1)
        plan = self.cache.begin(tokens.shape[1], encoded=self._op is not None, visible=visible)
        self.columns = {
            window: (layer.first_visible(plan.shortest), plan.end) for window, layer in self.cache.windows.items()
        }
        kwargs = {compat.CACHE_NAME: self.cache, **self._output_kwargs()}
        mask, attention = None, cast(AbstractContextManager[None], nullcontext())
        if self._op is None:
            mask = self._mask(lengths, depths, visible)
        else:
            kwargs[CONTEXT] = self._tree_context(lengths, visible, self._op)
            attention = attending(self._decoder)
        if self._token_type is not None:
            kwargs["token_type_ids"] = self._to_model(self._token_type[:, -1:].expand(-1, tokens.shape[1]))
        with attention, self._recurrent(kwargs):
            output = self.model(
                input_ids=self._to_model(tokens),
                position_ids=self._to_model(self._geometry.positions(self.next_position[:, None] + depths)),
                attention_mask=self._to_model(mask),
                use_cache=True,
                return_dict=True,
                **kwargs,
            )
        return self._pack(output, output.logits, joined(output, self._features) if self._features else None)

    def _recurrent(self, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Lets recurrent layers ask the cache, where the model has any."""
        if not self._gated:
            return nullcontext()
        kwargs[gated_delta.CONTEXT] = self.cache.recurrent
        return gated_delta.running(self._gated)

    def _to_model(self, given: Any) -> Any:
        """The same tensor, or tensors, where the model wants its inputs; plain `generate` moves the prompt there."""
        if isinstance(given, dict):
            return {key: self._to_model(value) for key, value in given.items()}
        return given if given is None else given.to(self.model_device)

    def keep(self, rows: Int[Tensor, "batch path"], counts: Int[Tensor, " batch"]) -> None:
        """Commits pending rows; see `specdec.protocols.ModelRunner`."""
        self.cache.keep(rows, counts)
        self.next_position = self.next_position + counts
        self._drop_pending()

    def _drop_pending(self) -> None:
        self.cache.pending, self._tree = 0, None
        self._pending_depths = self._pending_depths[:, :0]

    def plain_columns(self, row: int, node: int) -> tuple[Tensor, ...]:
        """Columns of the last forward's attentions that plain decoding would have at a node, per layer, in order."""
        length, path = int(self._last_lengths[row]), self._last_visible[row, node].nonzero().squeeze(1)
        columns = []
        for window in self._attending:
            first, _ = self.columns[window]
            slots = torch.cat([torch.arange(first, length, device=path.device), length + path])
            columns.append((slots if window is None else slots[-window:]) - first)
        return tuple(columns)

    def _tree_context(
        self, lengths: Int[Tensor, " batch"], visible: Bool[Tensor, "batch rows pending"], impl: ops.Impl
    ) -> TreeContext:
        """The tree of this forward, as our attention function wants it."""
        columns = {
            window: Columns(lengths - first, None if self.starts is None else (self.starts - first).clamp_min(0))
            for window, (first, _) in self.columns.items()
        }
        return TreeContext(topology.pack(visible), self._pending_depths, columns, self._windows, impl)

    def _mask(
        self,
        lengths: Int[Tensor, " batch"],
        depths: Int[Tensor, "batch rows"],
        visible: Bool[Tensor, "batch rows pending"],
    ) -> Any:
        """The mask for each layer type, or None where every column is visible and the model needs none."""
        if self._batch == 1 and depths.shape[1] == 1 and visible.shape[1:] == (1, 1) and self._prompt_mask is None:
            return None
        made: dict[int | None, Tensor] = {}
        for window, (first, last) in self.columns.items():
            mask = masks.visible_slots(
                lengths, depths, self._pending_depths, visible, self._prompt_mask, window, first, last
            )
            made[window] = masks.for_implementation(mask, self._decoder, self.model.dtype)
        if not self._dict_mask:
            return next(iter(made.values()))
        # Recurrent layers take a mask of padding, which no drafted row is.
        return {kind: None if kind == "linear_attention" else made[window] for kind, window in self._kinds.items()}

    def _check_features(self, given: Any) -> None:
        """Refuses requests in which the features of a part of the text could not be had."""
        if not self._features:
            return
        states = int(self._decoder.num_hidden_layers)
        past = 0 if given is None else int(given.get_seq_length())
        obstacle = ""
        if min(self._features) < 0 or max(self._features) > states:
            obstacle = f"the model has hidden states 0 to {states}"
        elif past > 0:
            obstacle = f"those of the {past} tokens in the given cache are not known; pass the whole text instead"
        elif self._kwargs.get("inputs_embeds") is not None:
            obstacle = "inputs_embeds= has no token ids to go with them"
        if obstacle:
            raise UnsupportedError(f"the drafter reads hidden states {self._features}: {obstacle}.")

    def _check_rope(self) -> None:
        """Refuses texts that would outgrow the frequencies of some rotary embeddings; see `support.check_rope`."""
        start, most = int(self.next_position.max()), self._generation_config.max_length
        # The last token is never run.
        longest = None if most is None else start + math.ceil(most) - self._input_ids.shape[1] - 1
        support.check_rope(self._decoder, start, longest)

    def _output_kwargs(self) -> dict[str, Any]:
        if self._wants_hidden:
            hidden: Any = True
        else:
            hidden = list(self._features) or None
        return {
            name: value
            for name, value in (("output_hidden_states", hidden), ("output_attentions", self._wants_attentions))
            if value
        }

    def _pack(self, output: Any, logits: Tensor, features: Tensor | None) -> TargetOutput:
        return TargetOutput(
            logits=logits,
            features=features,
            hidden_states=tuple(output.hidden_states) if self._wants_hidden else None,
            attentions=tuple(output.attentions) if self._wants_attentions else None,
        )


def open_model(
    model: torch.nn.Module, tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]
) -> ModelTarget:
    """Binds a model to the tokens marked in `mask` and runs them, repacked with padding on the left.

    Raises:
        ShapeError: for a mask that is not boolean or of another shape.
    """
    booleans("open_model", "mask", mask, list(tokens.shape), "True for tokens that count")
    counts = mask.sum(-1)
    width = max(1, int(counts.max()))
    order = mask.to(torch.int64).sort(dim=-1, stable=True).indices[:, -width:]
    packed, real = tokens.gather(1, order), mask.gather(1, order)
    device = _device_of(model, tokens.device)
    kwargs: dict[str, Any] = {"position_ids": (real.cumsum(-1) - 1).clamp_min(0).to(device)}
    if not bool(real.all()):
        kwargs["attention_mask"] = real.to(device=device, dtype=torch.int64)
    target = ModelTarget(model, packed.to(device), model_kwargs=kwargs)
    target.prefill()
    return target


def _device_of(model: torch.nn.Module, fallback: torch.device) -> torch.device:
    """Where a model wants its inputs.

    Weights that accelerate has offloaded are nowhere (`meta`); its hooks move inputs to where they are run.
    """
    return next((weight.device for weight in model.parameters() if weight.device.type != "meta"), fallback)
