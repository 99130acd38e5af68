"""In which words ops refuse arguments that do not belong together."""

from collections.abc import Callable

from specdec.errors import ShapeError


def demands(op: str) -> Callable[[bool, str], None]:
    """A function that raises `ShapeError` in the name of an op unless a condition holds."""

    def demand(condition: bool, message: str) -> None:
        if not condition:
            raise ShapeError(f"{op}: {message}.")

    return demand
