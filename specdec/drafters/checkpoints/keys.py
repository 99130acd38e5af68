"""Reading a configuration so that nothing in it is overlooked: every key is read, known to say nothing, or named."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UnsupportedError

ABSENT = object()

SILENT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_dir",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "hidden_act",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "_name_or_path",
        "num_anchors",
        "num_target_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
)
"""Keys that say nothing about what a drafter computes, or that other keys say again."""


@dataclass(frozen=True, slots=True)
class Note:
    """Where a value came from: a key of the configuration, or, if `assumed`, a rule where the key was missing."""

    field: str
    value: Any
    source: str
    assumed: bool = False


@dataclass(slots=True)
class Keys:
    """The keys of a configuration, of which it remembers which ones were asked for.

    Args:
        parts: named dictionaries, the first that has a key wins.
        notes: what was found where.
    """

    parts: dict[str, dict[str, Any]]
    notes: dict[str, Note] = field(default_factory=dict)
    _asked: set[tuple[str, str]] = field(default_factory=set)

    def get(self, name: str, default: Any = ABSENT, *, also: Sequence[str] = (), why: str = "") -> Any:
        """The value of a key, under this name or another one.

        Args:
            name: the key.
            default: what holds where it is missing; without one the key is required.
            also: other names of it.
            why: the rule that gives the default, for the notes.

        Raises:
            UnsupportedError: if a required key is missing.
        """
        found = ABSENT
        for key in (name, *also):
            for part, values in self.parts.items():
                if values.get(key) is not None:
                    self._asked.add((part, key))
                    if found is ABSENT:
                        found = values[key]
                        self.notes[name] = Note(name, found, f"{part}{key}")
                elif key in values:
                    self._asked.add((part, key))  # an explicit null says as much as a missing key
        if found is not ABSENT:
            return found
        if default is ABSENT:
            raise UnsupportedError(f"config.json has no {name!r}, which the drafter cannot do without.")
        self.notes[name] = Note(name, default, why or "default", assumed=True)
        return default

    def integer(self, name: str, default: Any = ABSENT, **options: Any) -> int:
        """As `get`, for a whole number."""
        value = self.get(name, default, **options)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedError(f"config.json: {name!r} must be a whole number, got {value!r}.")
        return value

    def optional(self, name: str, kind: type, **options: Any) -> Any:
        """As `get`, for a value of a kind (`bool`, or `float` for any number) that may be missing: then None."""
        value = self.get(name, None, **options)
        allowed = kind if kind is bool else int | float
        if value is not None and (not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool))):
            raise UnsupportedError(f"config.json: {name!r} must be a {kind.__name__} or null, got {value!r}.")
        return value

    def number(self, name: str, default: Any = ABSENT, **options: Any) -> float:
        """As `get`, for a number."""
        value = self.get(name, default, **options)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedError(f"config.json: {name!r} must be a number, got {value!r}.")
        return float(value)

    def flag(self, name: str, default: Any = ABSENT, **options: Any) -> bool:
        """As `get`, for true or false."""
        value = self.get(name, default, **options)
        if not isinstance(value, bool):
            raise UnsupportedError(f"config.json: {name!r} must be true or false, got {value!r}.")
        return value

    def integers(self, name: str, default: Any = ABSENT, **options: Any) -> tuple[int, ...]:
        """As `get`, for a list of whole numbers."""
        value = self.get(name, default, **options)
        if not isinstance(value, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise UnsupportedError(f"config.json: {name!r} must be a list of whole numbers, got {value!r}.")
        return tuple(value)

    def take(self, *names: str) -> None:
        """Marks keys as read that are read in another way."""
        self._asked |= {(part, name) for part, values in self.parts.items() for name in names if name in values}

    def unknown(self) -> list[str]:
        """Keys that nobody asked for and that are not known to say nothing."""
        known = [*self.notes, *SILENT]
        found = []
        for part, values in self.parts.items():
            for key in values:
                if (part, key) not in self._asked and key not in SILENT:
                    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
                    found.append(f"{part}{key}" + (f" (is {close[0]} meant?)" if close else ""))
        return sorted(found)
