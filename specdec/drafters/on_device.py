"""Drafters that can draft inside a device round: from the committed text alone, with fixed shapes."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from specdec import ops
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.errors import UnsupportedError
from specdec.ops.lookup_tree import MOST
from specdec.protocols import Drafter


@dataclass(frozen=True, slots=True)
class DeviceLookup:
    """Prompt lookup and suffix drafting on the device, by `ops.lookup_tree`.

    Args:
        nodes: tree budget, root excluded.
        longest: length at which the count of matching tokens stops.
        occurrences: earlier occurrences that go into the tree; 1 gives a chain.
        depth: deepest node; None leaves it to the op.
    """

    nodes: int
    longest: int = 16
    occurrences: int = 16
    depth: int | None = None

    def __call__(
        self, tokens: Int[Tensor, "batch capacity"], lengths: Int[Tensor, " batch"], limits: Int[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch width"], Int[Tensor, "batch width"], Int[Tensor, " batch"]]:
        """Tokens, parents and number of nodes of the tree of each row."""
        return ops.lookup_tree(
            tokens,
            lengths,
            nodes=self.nodes,
            longest=self.longest,
            occurrences=self.occurrences,
            depth=self.depth,
            limits=limits,
        )


def on_device(drafter: Drafter, *, nodes: int, depth: int | None, chain: bool) -> DeviceLookup:
    """The device form of a text drafter, for a tree of `nodes` drafted nodes, at most `depth` deep, or for a chain.

    Text drafters draft by `ops.lookup_tree`: with the same match length and number of occurrences, but by its weights
    instead of learned rates, and from the request's own text only.

    Raises:
        UnsupportedError: if the drafter has no device form, or an option that this form would ignore; the message says
            which.
    """
    sources: tuple[Any, ...] = drafter._drafters if isinstance(drafter, CombinedDrafter) else (drafter,)
    lengths, occurrences = [], []
    for source in sources:
        if not isinstance(source, PromptLookupDrafter | SuffixDrafter):
            raise UnsupportedError(
                f"{type(source).__name__} cannot draft on the device{' beside others' if len(sources) > 1 else ''}; "
                "PromptLookupDrafter, SuffixDrafter and combinations of them can, ModelDrafter and BlockDrafter alone."
            )
        if not source.has_device_form:
            raise UnsupportedError(
                f"{type(source).__name__} on the device takes its match length and its number of occurrences; other "
                "options must be left as they are by default."
            )
        options = source._options
        lengths.append(options["longest"])
        occurrences.append(options["limit"])
    wanted = {"nodes": nodes, "longest": max(lengths), "occurrences": 1 if chain else max(occurrences)}
    for name, number in wanted.items():
        if number > MOST[name]:
            raise UnsupportedError(f"on the device, {name} is {MOST[name]} at most, got {number}.")
    return DeviceLookup(**wanted, depth=None if depth is None else min(depth, MOST["depth"]))
