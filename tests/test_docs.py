"""The generated tables are strict about their sources, and every example of a page is one that runs."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from specdec.hf.arguments import ARGUMENTS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def result() -> dict[str, Any]:
    return {
        "topic": "one",
        "command": "python bench.py",
        "revision": "abc",
        "versions": {"torch": "2"},
        "device": "cpu",
        "figures": {"speed": {"value": 1.23456, "unit": "ratio", "against": "plain | greedy"}},
    }


def test_a_benchmark_becomes_a_section(generate, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(result()))
    text = generate["benchmark_tables"](tmp_path)
    assert "## one" in text
    assert "| `speed` | 1.235 | ratio | plain \\| greedy |" in text
    assert "`python bench.py` at revision `abc` on cpu; torch 2." in text


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in result().items() if name != key}


def with_figure(**changes: Any) -> dict[str, Any]:
    return {**result(), "figures": {"speed": {**result()["figures"]["speed"], **changes}}}


@pytest.mark.parametrize(
    "malformed",
    [
        *(without(key) for key in result()),
        {**result(), "note": "extra"},
        {**result(), "topic": "two"},
        {**result(), "device": 1},
        {**result(), "versions": {}},
        {**result(), "figures": {}},
        {**result(), "figures": {"speed": 1.0}},
        with_figure(value="fast"),
        with_figure(value=True),
        with_figure(unit=None),
        with_figure(error=0.1),
        [],
    ],
)
def test_a_malformed_benchmark_stops_the_build(generate, tmp_path, malformed):
    (tmp_path / "one.json").write_text(json.dumps(malformed))
    with pytest.raises(ValueError, match=r"one\.json: expected"):
        generate["benchmark_tables"](tmp_path)


def test_every_benchmark_in_the_tree_is_well_formed(generate):
    generate["benchmark_tables"](DOCS / "benchmarks")


def test_every_argument_has_one_row(generate):
    rows = generate["arguments_table"]().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [
        argument.name
        for status in ("supported", "refused", "inert")
        for argument in sorted(ARGUMENTS, key=lambda argument: argument.name)
        if argument.status == status
    ]


def idle_examples(text: str) -> str:
    """The examples that look as if they ran, outside the blocks that do run."""
    return "\n".join(
        re.findall(r"^\s*>>> .*", re.sub(r"```\{doctest\}.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_example_of_a_page_runs(page):
    assert idle_examples(page.read_text()) == ""


def test_an_idle_example_would_be_found():
    assert idle_examples("```{doctest}\n>>> 1\n1\n```\n```python\n>>> 2\n```") == ">>> 2"
