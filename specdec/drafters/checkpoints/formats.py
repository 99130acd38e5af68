"""What the loader must know of a published format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.feature import FeatureDrafter
from specdec.drafters.shortlist import Shortlist
from specdec.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Target:
    """What a format may leave to the target to say.

    Attributes:
        hidden_size: width of its states.
        layers: number of its layers.
        vocab_size: number of its logits.
        output_multiplier: factor on its logits, before the soft cap.
        softcap: bound of its logits, None for none.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    output_multiplier: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model: Any) -> "Target":
        """The facts of a model."""
        if not all(hasattr(model, name) for name in ("config", "get_input_embeddings", "get_output_embeddings")):
            raise UnsupportedError(f"target= takes a transformers model, got {type(model).__name__}.")
        config = model.config.get_text_config()
        rows = model.get_output_embeddings().weight.shape[0]
        return Target(
            int(config.hidden_size),
            int(config.num_hidden_layers),
            int(rows),
            float(getattr(config, "output_multiplier", 1.0)),
            getattr(config, "final_logit_softcapping", None),
        )


Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """A family of published formats.

    Attributes:
        known: what identifies it, for the reader of an error.
        dialect_of: from a configuration and the names of the tensors, the publisher; empty if it is another family.
        read_spec: from the same and the target, if it is known, the specification, with the keys it came from.
        build: the model of a specification, for a target (None: it is not known yet).
        drafter: the drafter of such a model.
        owns: whether a tensor is the drafter's, by its name among all names; the target's own may lie beside them.
        copied: for a tensor that repeats the target's `embedding` or `output head`, which of them.
        pack: the tensors under our names, which may be fewer and larger.
        published: the publisher's name for one of ours, which may depend on the names that are there.
        heads: of a specification, our tensors with one row for each token that can be drafted.
        integers: tensors that hold whole numbers.
    """

    known: str
    dialect_of: Callable[[Mapping[str, Any], frozenset[str]], str]
    read_spec: Callable[[Mapping[str, Any], frozenset[str], Target | None], tuple[Any, Keys]]
    build: Callable[[Any, Shortlist | None, Any], nn.Module]
    drafter: Callable[..., Any]
    owns: Callable[[str, frozenset[str]], bool] = lambda _, __: True
    copied: Callable[[str], str] = lambda _: ""
    pack: Callable[[Tensors], Tensors] = dict
    published: Callable[[str, frozenset[str]], str] = lambda name, _: name
    heads: Callable[[Any], tuple[str, ...]] = lambda _: ("lm_head.weight",)
    integers: frozenset[str] = frozenset()


def feature_drafter(
    model: Any, *, length: int | None, temperature: float | None, least_confidence: float | None
) -> FeatureDrafter:
    """The drafter of a feature model."""
    if least_confidence is not None:
        raise UnsupportedError(f"least_confidence={least_confidence}: {model.spec.family} has no confidence head.")
    return FeatureDrafter(model, length=length, temperature=temperature)
