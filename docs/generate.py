"""Generates the tables of the documentation, so that none of them is typed by hand.

Benchmark tables come from `docs/benchmarks/*.json`, which the scripts in `examples/benchmarks` write; the table of
`generate` arguments comes from `specdec.hf.arguments.ARGUMENTS`, which the code itself obeys. A file that does not
have the agreed form stops the build. A page that shows a topic includes `_generated/<topic>.md`, which is empty as long
as the topic has not been measured.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.hf.arguments import ARGUMENTS

TEXT_KEYS = ("topic", "command", "revision", "device")
KEYS = {*TEXT_KEYS, "versions", "figures"}
FIGURE_KEYS = {"value", "unit", "against"}

PLOTTED = {
    "gpu-rounds": "Steady rounds of one row, `b8` and `b32` of 8 and 32; 7 nodes for Gemma, 16 for the others. Above, "
    "their time by kind of kernel, and their wall time. Below, the wall time over the time in which kernels run, and "
    "over the time that reading the weights once takes. `c1024` is the length of the context; `eager` is one verify "
    "pass of plain transformers. A kernel that is set up while the one before still runs counts from then on in the "
    "time of its kind. `equal_to_plain` is the share of a text before the first token that plain greedy decoding "
    "decides otherwise: in bfloat16 near-ties fall either way ([lossless](device.md#lossless)), and `widest_gap` says "
    "how near they were.",
    "kv-codecs": "How far a codec moves the next-token law, by the bits of a stored number.",
    "qwen35-27b-shape": "Rounds of one row in the shape of Qwen3.5-27B, as for other models in [rounds on the device]"
    "(device.md). `plain` is without `compile()`; `eager` is one verify pass of plain transformers.",
    "verify-attention": "Bytes of the cached keys and values over the time of the op, as a share of the streaming read "
    "bandwidth that was measured in the same run.",
}
"""Topics with a plot, and what it shows."""

TABULATED = {
    "gated-delta": "Fold and verify of one layer in the shape of Qwen3.5-27B: `t16.b8` are 16 nodes in each of 8 rows. "
    "`vs_` says how many times as long another way takes for the same rows.",
    "gpu-rounds": "",
    "state-drift": "Relative error of a state in the last quarter of 4,096 tokens, beside one in float64; `growth` "
    "says how many times that of the second quarter it is. `usual` has keys of any direction and decays as layers are "
    "initialised; `hard` has keys with cosines of 0.98, full corrections and hardly any decay, so that errors stay for "
    "two thousand tokens. `_state` is the dtype of the state at rest, `_records` that of the updates that are folded "
    "into a float32 state.",
    "verify-attention": "",
}
"""Topics whose tables stand on pages of their own too, and what has to be said of them where no plot says it."""

SHOWN = sorted({*PLOTTED, *TABULATED})
"""Topics that pages of their own show."""

HEADINGS = {
    "gated-delta": "One layer, measured",
    "qwen35-27b-shape": "Whole rounds, measured",
    "state-drift": "Rounding, measured",
}
"""Headings of topics that share a page."""

Draw = Callable[[str, Mapping[str, float], Path], bool]
"""Draws the plot of a topic from its figures into a file; says whether it has one."""


def write_all(docs: Path, draw: Draw | None = None) -> None:
    """Writes every generated table and plot to `_generated` in the folder of the documentation.

    Args:
        docs: that folder.
        draw: draws a plot; None leaves plots out.
    """
    folder = docs / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "arguments.md").write_text(arguments_table(), encoding="utf-8")
    (folder / "benchmarks.md").write_text(benchmark_tables(docs / "benchmarks"), encoding="utf-8")
    for topic in SHOWN:
        (folder / f"{topic}.md").write_text(shown(docs, topic, draw), encoding="utf-8")


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
    return "\n".join([f"## {result['topic']}\n", circumstances(result), figures(result)])


def shown(docs: Path, topic: str, draw: Draw | None) -> str:
    """What a page shows of a topic: nothing before it was measured."""
    path = docs / "benchmarks" / f"{topic}.json"
    if not path.exists():
        return ""
    result = read(path)
    values = {name: figure["value"] for name, figure in result["figures"].items()}
    parts = [f"## {HEADINGS.get(topic, 'Measured')}\n"]
    if draw is not None and topic in PLOTTED and draw(topic, values, docs / "_generated" / f"{topic}.svg"):
        parts += [f"{PLOTTED[topic]}\n", f"![Plot of {topic}](_generated/{topic}.svg)\n"]
    if TABULATED.get(topic):
        parts.append(f"{TABULATED[topic]}\n")
    parts.append(circumstances(result))
    parts.append(figures(result) if topic in TABULATED else "All figures are in [Benchmarks](benchmarks.md).\n")
    return "\n".join(parts)


def circumstances(result: dict[str, Any]) -> str:
    """How a benchmark was run."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    return f"`{result['command']}` at revision `{result['revision']}` on {result['device']}; {versions}.\n"


def figures(result: dict[str, Any]) -> str:
    """The figures of a benchmark, a row each."""
    rows = [
        (f"`{name}`", f"{figure['value']:.4g}", figure["unit"], figure["against"])
        for name, figure in result["figures"].items()
    ]
    return table(("figure", "value", "unit", "against"), rows)


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
