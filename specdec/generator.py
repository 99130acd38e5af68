"""`SpeculativeGenerator`: `generate()` with the signature and results of `model.generate`, by speculative rounds.

transformers prepares the call (arguments, processors, criteria, lengths, cache) through `custom_generate=`; the
rounds run on what it prepared. `generate` folds over `rounds`, so the two can never disagree.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec import control, drafters, trees, verify
from specdec import rounds as loop
from specdec.errors import SpecdecError, UnsupportedError
from specdec.evaluate import Recorder
from specdec.hf import arguments, compat, device_rounds, support
from specdec.hf.attention import Attention
from specdec.hf.cache import RowCache
from specdec.hf.ledger import TokenLedger
from specdec.hf.records import Records
from specdec.hf.request import Attachment, Execution, Request, in_plain_mode
from specdec.hf.target import ModelTarget
from specdec.kv import KVCacheConfig
from specdec.protocols import Controller, Drafter, TreeBuilder, Verifier
from specdec.stats import GenerationStats
from specdec.types import Round


class SpeculativeGenerator:
    """Wraps a causal language model; `generate` returns what `model.generate` returns, in fewer target forwards.

    Args:
        model: a decoder-only transformers model with attention layers; verification runs through `torch.compile` if
            the model was wrapped by it.
        drafter: where proposals come from; None is prompt lookup, which needs no second model.
        tree: which nodes to draft; None is a best-first tree of 15 nodes.
        verifier: how the target decides; None picks a lossless rule that fits the tree and `do_sample`.
        cache: codecs of the target's keys and values (`kv.KVCacheConfig`, `kv.INT8`); None stores them as they are.
        tokenizer: for `stop_strings`; may also be given per call.
        controller: how much to draft each round; None always drafts the full tree. `control.Goodput()` measures
            and drafts only what pays.
        attention: who computes the attention of verify forwards: the `model`'s own function with a mask, or
            `ops.tree_attention` (`reference` or `triton`); `auto` takes the kernel where there is a GPU.
        execution: where rounds run. `host`: part by part, with every option. `device`: each as one program on the
            model's device, captured as a CUDA graph where there is one; what that cannot serve is refused. `auto`:
            on a GPU where it can be, else on the host.

    Raises:
        UnsupportedError: if the model or the combination of parts cannot be served exactly.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, drafters, trees
        >>> from specdec.testing import tiny_model
        >>> model = tiny_model("llama")
        >>> generator = SpeculativeGenerator(model, drafter=drafters.PromptLookupDrafter(), tree=trees.Chain(4))
        >>> prompt = torch.tensor([[5, 6, 7, 5, 6]])
        >>> ids = generator.generate(prompt, max_new_tokens=8, do_sample=False)
        >>> bool((ids == model.generate(prompt, max_new_tokens=8, do_sample=False)).all())
        True
        >>> generator.stats.new_tokens
        8
    """

    def __init__(
        self,
        model: torch.nn.Module,
        drafter: Drafter | None = None,
        tree: TreeBuilder | None = None,
        verifier: Verifier | None = None,
        cache: KVCacheConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        controller: Controller | None = None,
        attention: Attention = "model",
        execution: Execution = "host",
    ) -> None:
        """Checks the parts; runs nothing."""
        support.check_model(model)
        if cache is not None and not isinstance(cache, KVCacheConfig):
            raise UnsupportedError(f"cache= takes a kv.KVCacheConfig, such as kv.INT8, got {type(cache).__name__}.")
        for name, part, protocol in (
            ("drafter", drafter, Drafter),
            ("tree", tree, TreeBuilder),
            ("verifier", verifier, Verifier),
            ("controller", controller, Controller),
        ):
            arguments.check_part(name, part, protocol)
        RowCache(model.config, cache)  # raises where a codec cannot store rows of this model
        if attention not in get_args(Attention):
            raise UnsupportedError(f"attention must be one of {', '.join(get_args(Attention))}, got {attention!r}.")
        if execution not in get_args(Execution):
            raise UnsupportedError(f"execution must be one of {', '.join(get_args(Execution))}, got {execution!r}.")
        self.model: Any = model
        self.drafter: Drafter = drafter if drafter is not None else drafters.PromptLookupDrafter()
        self.tree: TreeBuilder = tree if tree is not None else trees.BestFirst(nodes=15)
        self.verifier, self.cache, self.tokenizer = verifier, cache, tokenizer
        self.attention, self.execution = attention, execution
        self.controller: Controller = controller if controller is not None else control.Always()
        if verifier is not None:
            verifier.check(self.tree)
        if isinstance(self.tree, Recorder) and type(verifier) not in (type(None), verify.TargetOnly):
            raise UnsupportedError(f"rounds are recorded under verify.TargetOnly, not {type(verifier).__name__}.")
        self._generate: Callable[..., Any] = _plain_generate(model)
        self._serving: Request | None = None
        self.stats, self._programs, self._compiled = GenerationStats(), device_rounds.Programs(), False

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path,
        *,
        target_options: Mapping[str, Any] | None = None,
        drafter_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "SpeculativeGenerator":
        """Loads a target and the drafter that was published for it.

        Args:
            target: a folder, or a repository of the Hub, for `AutoModelForCausalLM.from_pretrained`.
            drafter: a folder or a repository for `drafters.from_pretrained`.
            target_options: what the former takes (`dtype`, `device_map`, `revision`, ...).
            drafter_options: what the latter takes (`revision`, `length`, ...).
            **options: what the generator itself takes (`tree`, `execution`, ...).
        """
        model = AutoModelForCausalLM.from_pretrained(target, **(target_options or {}))
        return cls(model, drafters.from_pretrained(drafter, model, **(drafter_options or {})), **options)

    def __repr__(self) -> str:
        model, drafter, controller = (type(part).__name__ for part in (self.model, self.drafter, self.controller))
        verifier = "a lossless verifier" if self.verifier is None else type(self.verifier).__name__
        parts = [model, drafter, repr(self.tree), verifier, controller, f"attention={self.attention}"]
        parts += [f"execution={self.execution}{', compiled' * self._compiled}"] if self.execution != "host" else []
        parts += [] if self.cache is None else [repr(self.cache)]
        return f"<SpeculativeGenerator: {', '.join(parts)}>"

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: Any = None,
        *,
        num_draft_tokens: int | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Same arguments, results and errors as `model.generate`, plus two of its own.

        Args:
            inputs: prompt ids `[batch, seq]`; or `input_ids=...`, or `inputs_embeds=...`.
            generation_config: as in `model.generate`, like the arguments after it.
            logits_processor: extra processors; each runs once per committed token with the true prefix.
            stopping_criteria: extra criteria; each is asked once per committed token with the true prefix.
            prefix_allowed_tokens_fn: constrains tokens by the true prefix.
            synced_gpus: refused when True.
            assistant_model: refused; give the generator a drafter.
            streamer: gets the prompt, then one token at a time, then `end()`.
            negative_prompt_ids: for `guidance_scale`.
            negative_prompt_attention_mask: for `guidance_scale`.
            custom_generate: refused.
            num_draft_tokens: tree budget of this call, at most the tree's own; 0 drafts nothing.
            generator: source of randomness for draws; None is torch's default.
            **kwargs: everything else `model.generate` takes (`specdec.hf.arguments.ARGUMENTS` lists all).

        Returns:
            `[batch, seq]` token ids, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate=True`.

        Raises:
            UnsupportedError: for an argument that cannot be served, before any forward pass.
        """
        request = self._prepare(
            inputs,
            num_draft_tokens=num_draft_tokens,
            generator=generator,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            synced_gpus=synced_gpus,
            assistant_model=assistant_model,
            streamer=streamer,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            custom_generate=custom_generate,
            **kwargs,
        )
        for _ in in_plain_mode(self._run(request)):
            pass
        return request.result()

    def rounds(self, inputs: Tensor | None = None, **kwargs: Any) -> Iterator[Round]:
        """The same loop, opened: yields every `Round` as it is committed. Takes the arguments of `generate`.

        Arguments are checked at once; the model first runs when the iterator is first advanced. A drafter and a
        controller serve one request at a time: finish or close an iterator before the next call.
        """
        return in_plain_mode(self._run(self._prepare(inputs, **kwargs)))

    def compile(self) -> "SpeculativeGenerator":
        """Lets `torch.compile` fuse what lies between the matrix products of device rounds; returns the generator.

        Projections of the same input become one product, whose weights are copies. Where their kernels run, products
        and norms are run by `ops.skinny_linear` and `ops.rms_norm`; experts by `ops.routed_experts`. The model stays
        as it is. The first request takes as long as the compiler, a minute or two. `execution="host"` is refused; of
        `execution="auto"`, requests that run on the host stay as they are.
        """
        device_rounds.check_compilable(self.execution)
        self._compiled = True
        return self

    def attach(self) -> contextlib.AbstractContextManager["SpeculativeGenerator"]:
        """Makes `model.generate` itself speculative, until `detach()` or the end of a `with` block.

        Pipelines, evaluation harnesses and trainers that call `model.generate` then use it unchanged.

        Example:
            >>> import torch
            >>> from specdec import SpeculativeGenerator
            >>> from specdec.testing import tiny_model
            >>> model = tiny_model("llama")
            >>> generator = SpeculativeGenerator(model)
            >>> with generator.attach():
            ...     ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
            >>> generator.stats.new_tokens
            4
        """
        if "generate" in vars(self.model):
            raise UnsupportedError(
                "model.generate is already replaced on this object, by this generator or another; call detach() first."
            )
        vars(self.model)["generate"] = self.generate
        return Attachment(self)

    def detach(self) -> None:
        """Gives the model its own `generate` back; does nothing if it has it."""
        if vars(self.model).get("generate") == self.generate:
            del vars(self.model)["generate"]

    @torch.inference_mode(False)  # what stays here for later requests must not be of that mode
    def _prepare(
        self,
        inputs: Tensor | None,
        *,
        num_draft_tokens: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> Request:
        """Lets transformers resolve the call and binds what it resolved; runs nothing."""
        attached = vars(self.model).get("generate") == self.generate
        arguments.check_call(kwargs, kwargs.get("generation_config"), self.model.generation_config, attached=attached)
        kwargs.pop("custom_generate", None)
        arguments.check_helpers(kwargs, generator, streamer)
        nodes = arguments.tree_budget(self.tree, num_draft_tokens)
        kwargs = arguments.with_stop_strings(
            kwargs, self.model.generation_config, tokenizer if tokenizer is not None else self.tokenizer
        )

        def bind(
            _: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Request:
            arguments.check_model_inputs(model_kwargs)
            arguments.check_outputs(generation_config)
            config, drafting = generation_config, nodes > 0
            longest = arguments.longest_text(stopping_criteria.max_length)
            input_ids = arguments.token_ids(input_ids)
            target = ModelTarget(
                self.model,
                input_ids,
                model_kwargs=model_kwargs,
                generation_config=config,
                feature_layers=self.drafter.feature_layers if drafting else (),
                cache=self.cache,
                attention=self.attention,
            )
            records = Records(
                batch=input_ids.shape[0],
                scores=bool(config.return_dict_in_generate and config.output_scores),
                logits=bool(config.return_dict_in_generate and config.output_logits),
                hidden_states=bool(config.return_dict_in_generate and config.output_hidden_states),
                attentions=bool(config.return_dict_in_generate and config.output_attentions),
            )
            verifier = self.verifier
            if verifier is None:
                verifier = verify.default_verifier(self.tree, do_sample=bool(config.do_sample))
            mask = model_kwargs.get("attention_mask")
            make_ledger = functools.partial(
                TokenLedger,
                prompt_mask=mask[:, -input_ids.shape[1] :].bool() if mask is not None and input_ids.shape[1] else None,
                processors=logits_processor,
                criteria=stopping_criteria,
                max_length=longest,
                do_sample=bool(config.do_sample),
                temperature=1.0 if config.temperature is None else float(config.temperature),
                pad_token=compat.pad_token(config),
                records=records,
                on_token=None if streamer is None else lambda column: streamer.put(column.cpu()),
                attention_columns=target.plain_columns if records.attentions else None,
                generator=generator,
            )
            ledger = make_ledger(input_ids)
            ledger.check_verifier(verifier.stepwise)
            obstacle = "rounds run on the host"
            if self.execution == "device" or (self.execution == "auto" and target.model_device.type == "cuda"):
                obstacle = device_rounds.obstacle(
                    target, ledger, self.drafter, self.tree, verifier, self.controller, nodes, config
                )
                if obstacle and self.execution == "device":
                    reason = obstacle.rstrip(".")
                    raise UnsupportedError(
                        f"execution='device' cannot serve this request: {reason}. execution='host' serves it."
                    )
            return Request(
                target=target,
                ledger=ledger if obstacle else make_ledger(input_ids.cpu()),
                obstacle=obstacle,
                records=records,
                config=config,
                prompt=input_ids,
                streamer=streamer,
                verifier=verifier,
                nodes=nodes,
                generator=generator,
            )

        request: Request = self._generate(inputs, custom_generate=bind, **kwargs)
        return request

    def _run(self, request: Request) -> Generator[Round, None, None]:
        """Runs the rounds of a request and keeps its statistics."""
        listed = drafters.Shortlist.of([self.drafter])
        self._serving, stats = request, GenerationStats(None if listed is None else listed.mask)
        self.stats = stats
        if request.streamer is not None:
            request.streamer.put(request.prompt.cpu())
        for round in self._rounds(request):
            stats.record(round)
            yield round
            if self._serving is not request:
                raise SpecdecError(
                    "another request began on this generator before these rounds were finished; its drafter and its "
                    "controller serve one request at a time. Use one SpeculativeGenerator, drafter and controller for "
                    "each, or finish or close() this iterator first."
                )
        if request.streamer is not None:
            request.streamer.end()

    def _rounds(self, request: Request) -> Iterator[Round]:
        """The rounds of a request, where they are run."""
        options: dict[str, Any] = {"nodes": request.nodes, "generator": request.generator}
        if not request.obstacle:
            return device_rounds.device_rounds(
                request.target,
                request.ledger,
                self.drafter,
                self.tree,
                self._programs,
                compiled=self._compiled,
                **options,
            )
        return loop.rounds(
            request.target,
            self.drafter,
            self.tree,
            request.verifier,
            request.ledger,
            self.controller,
            **options,
        )


def _plain_generate(model: Any) -> Callable[..., Any]:
    """The model's own `generate`, also while another generator is attached to it."""
    owner = getattr(model.generate, "__self__", None)
    plain: Callable[..., Any] = owner._generate if isinstance(owner, SpeculativeGenerator) else model.generate
    return plain
