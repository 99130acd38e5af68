"""Reading a configuration so that nothing in it is overlooked: every key is read, known to say nothing, or named."""

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from specdec.errors import UnsupportedError

T = TypeVar("T")

ABSENT: Any = object()

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
        "is_encoder_decoder",
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
class Kind(Generic[T]):
    """What the value of a key must be.

    Args:
        words: for messages.
        fits: whether a value is of this kind; a bool is never a number.
        read: turns such a value into what the specification holds.
    """

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], T]

    def of(self, key: str, value: Any) -> T:
        """The value.

        Raises:
            UnsupportedError: if it is of another kind, with the key, what came and what is expected.
        """
        if not self.fits(value):
            raise UnsupportedError(f"config.json: {key!r} must be {self.words}, got {reprlib.repr(value)}.")
        return self.read(value)


def _whole(least: float = -math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(above: float = -math.inf) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf

    return fits


def _list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


COUNT: Kind[int] = Kind("a whole number, 0 or more", _whole(0.0), int)
SIZE: Kind[int] = Kind("a whole number, 1 or more", _whole(1.0), int)
NUMBER: Kind[float] = Kind("a number", _number(), float)
POSITIVE: Kind[float] = Kind("a number above 0", _number(0.0), float)
FLAG: Kind[bool] = Kind("true or false", lambda value: isinstance(value, bool), bool)
TEXT: Kind[str] = Kind("a text", lambda value: isinstance(value, str), str)
OBJECT: Kind[dict[str, Any]] = Kind("an object of keys and values", lambda value: isinstance(value, dict), dict)
INTEGERS: Kind[tuple[int, ...]] = Kind("a list of whole numbers", _list(_whole()), tuple)
TEXTS: Kind[tuple[str, ...]] = Kind("a list of texts", _list(TEXT.fits), tuple)
OBJECTS: Kind[tuple[dict[str, Any], ...]] = Kind("a list of objects", _list(OBJECT.fits), tuple)


def section(config: Mapping[str, Any], name: str, part: str = "") -> dict[str, Any]:
    """The keys of a part of a configuration, none where it is missing.

    Args:
        config: keys and values.
        name: of the part.
        part: where the configuration itself stands, for messages.
    """
    found = config.get(name)
    return {} if found is None else OBJECT.of(f"{part}{name}", found)


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

    @overload
    def get(self, name: str, kind: Kind[T], default: None, *, also: Sequence[str] = (), why: str = "") -> T | None: ...

    @overload
    def get(self, name: str, kind: Kind[T], default: T = ..., *, also: Sequence[str] = (), why: str = "") -> T: ...

    def get(
        self, name: str, kind: Kind[T], default: Any = ABSENT, *, also: Sequence[str] = (), why: str = ""
    ) -> T | None:
        """The value of a key, under this name or another one, which must be of its kind wherever it stands.

        Args:
            name: the key.
            kind: what it must be.
            default: what holds where it is missing; without one the key is required.
            also: other names of it.
            why: the rule that gives the default, for the notes.

        Raises:
            UnsupportedError: if a required key is missing, or a value is of another kind.
        """
        found: list[tuple[str, T]] = []
        for key in (name, *also):
            for part, values in self.parts.items():
                if key in values:
                    self._asked.add((part, key))
                if values.get(key) is not None:  # an explicit null says as much as a missing key
                    found.append((f"{part}{key}", kind.of(f"{part}{key}", values[key])))
        if found:
            source, value = found[0]
            self.notes[name] = Note(name, value, source)
            return value
        if default is ABSENT:
            raise UnsupportedError(
                f"config.json has no {name!r}, which the drafter cannot do without; expected {kind.words}."
            )
        self.notes[name] = Note(name, default, why or "default", assumed=True)
        return default  # type: ignore[no-any-return]  # of the kind, or None

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
