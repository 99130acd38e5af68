"""Generates the tables of the documentation, so that none of them is typed by hand.

Benchmark tables come from `docs/benchmarks/*.json`, which the scripts in `examples/benchmarks` write; the table of
`generate` arguments comes from `specdec.hf.arguments.ARGUMENTS`, which the code itself obeys. A file that does not
have the agreed form stops the build.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.hf.arguments import ARGUMENTS

TEXT_KEYS = ("topic", "command", "revision", "device")
KEYS = {*TEXT_KEYS, "versions", "figures"}
FIGURE_KEYS = {"value", "unit", "against"}


def write_all(docs: Path) -> None:
    """Writes every generated table to `_generated` in the folder of the documentation."""
    folder = docs / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "arguments.md").write_text(arguments_table(), encoding="utf-8")
    (folder / "benchmarks.md").write_text(benchmark_tables(docs / "benchmarks"), encoding="utf-8")


def arguments_table() -> str:
    """One row for each argument of `generate`: supported ones first, then refused, then those without effect."""
    order = ("supported", "refused", "inert")
    rows = sorted(ARGUMENTS, key=lambda argument: (order.index(argument.status), argument.name))
    return table(("argument", "status", "note"), [(f"`{row.name}`", row.status, row.note) for row in rows])


def benchmark_tables(folder: Path) -> str:
    """One section for each topic, in alphabetical order."""
    return "\n".join(section(path) for path in sorted(folder.glob("*.json")))


def section(path: Path) -> str:
    """The heading, the circumstances and the figures of one benchmark file."""
    result = read(path)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    figures = [
        (f"`{name}`", f"{figure['value']:.4g}", figure["unit"], figure["against"])
        for name, figure in result["figures"].items()
    ]
    return "\n".join(
        [
            f"## {result['topic']}\n",
            f"`{result['command']}` at revision `{result['revision']}` on {result['device']}; {versions}.\n",
            table(("figure", "value", "unit", "against"), figures),
        ]
    )


def read(path: Path) -> dict[str, Any]:
    """A benchmark file, checked.

    Raises:
        ValueError: if the file does not have exactly the agreed keys and types.
    """

    def demand(condition: bool, expected: str) -> None:
        if not condition:
            raise ValueError(f"{path.name}: expected {expected}. See docs/contributing.md for the format.")

    loaded = json.loads(path.read_text(encoding="utf-8"))
    demand(isinstance(loaded, dict) and set(loaded) == KEYS, f"an object with the keys {sorted(KEYS)}")
    result: dict[str, Any] = loaded
    demand(all(isinstance(result[key], str) for key in TEXT_KEYS), f"text for {', '.join(TEXT_KEYS)}")
    demand(result["topic"] == path.stem, f"the topic {path.stem!r}, the name of the file, not {result['topic']!r}")
    demand(isinstance(result["versions"], dict) and bool(result["versions"]), "versions as an object, not empty")
    demand(isinstance(result["figures"], dict) and bool(result["figures"]), "figures as an object, not empty")
    for name, figure in result["figures"].items():
        demand(
            isinstance(figure, dict) and set(figure) == FIGURE_KEYS, f"the keys {sorted(FIGURE_KEYS)} in figure {name}"
        )
        demand(
            isinstance(figure["value"], int | float) and not isinstance(figure["value"], bool),
            f"a number as the value of figure {name}",
        )
        demand(
            isinstance(figure["unit"], str) and isinstance(figure["against"], str),
            f"text as unit and against of figure {name}",
        )
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
