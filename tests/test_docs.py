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


def measured(folder: Path, topic: str, figures: dict[str, float]) -> None:
    """Writes a benchmark file as a page finds it."""
    (folder / "benchmarks").mkdir(exist_ok=True)
    rows = {name: {"value": value, "unit": "ratio", "against": "plain"} for name, value in figures.items()}
    text = json.dumps({**result(), "topic": topic, "figures": rows})
    (folder / "benchmarks" / f"{topic}.json").write_text(text)


def test_a_page_shows_nothing_of_a_topic_that_was_not_measured(generate, tmp_path):
    generate["write_all"](tmp_path)
    assert {
        topic: (tmp_path / "_generated" / f"{topic}.md").read_text() for topic in generate["SHOWN"]
    } == dict.fromkeys(generate["SHOWN"], "")


def test_a_page_shows_a_topic_as_soon_as_it_was_measured(generate, tmp_path):
    measured(tmp_path, "gpu-rounds", {"speed": 2})
    generate["write_all"](tmp_path)
    text = (tmp_path / "_generated" / "gpu-rounds.md").read_text()
    assert text.startswith("## Measured\n")
    assert "`python bench.py` at revision `abc` on cpu; torch 2." in text
    assert "| `speed` | 2 | ratio | plain |" in text
    assert "![" not in text


def test_a_page_shows_a_plot_where_one_can_be_drawn(generate, tmp_path):
    drawn = []
    measured(tmp_path, "kv-codecs", {"kl.one": 0.25})
    generate["write_all"](tmp_path, lambda *call: drawn.append(call) is None)
    assert drawn == [("kv-codecs", {"kl.one": 0.25}, tmp_path / "_generated" / "kv-codecs.svg")]
    text = (tmp_path / "_generated" / "kv-codecs.md").read_text()
    assert "![Plot of kv-codecs](_generated/kv-codecs.svg)" in text
    assert "kl.one" not in text  # its table is on the page of all benchmarks alone


def test_a_page_shows_a_table_where_there_is_no_plot(generate, tmp_path):
    measured(tmp_path, "state-drift", {"usual.float32": 1e-7})
    generate["write_all"](tmp_path, lambda *_: pytest.fail("it has no plot"))
    text = (tmp_path / "_generated" / "state-drift.md").read_text()
    assert text.startswith("## Rounding, measured\n")
    assert "Relative error of a state" in text
    assert "| `usual.float32` | 1e-07 | ratio | plain |" in text


def test_pages_include_the_topics_that_are_generated_for_them(generate):
    included = re.findall(r"_generated/(\S+)\.md", "".join(page.read_text() for page in PAGES))
    assert sorted(included) == sorted(["arguments", "benchmarks", *generate["SHOWN"]])


DRAWN = {
    "gpu-rounds": {
        "read_bandwidth": 4.0,
        "llama.c1024.wall_over_kernel": 1.25,
        "llama.c1024.milliseconds": 5.0,
        "llama.c1024.share.weights": 0.75,
        "llama.c1024.share.other": 0.25,
        "llama.c1024.wall_over_floor": 1.5,
        "llama.c1024.eager.wall_over_kernel": 3.0,
    },
    "kv-codecs": {"kl.INT8": 0.01, "bits.INT8": 8.5, "kl.INT4": 0.1, "bits.INT4": 5.0},
    "verify-attention": {"share.l8192.rows16.h8g4d128": 0.5, "share.l32768.rows16.h8g4d128": 0.75, "other": 1.0},
}
"""Figures of each topic that has a plot."""
SEEN = {
    "gpu-rounds": ["llama.c1024", "llama.c1024.eager", "weights", "other", "1.25", "1.50", "3.00"],
    "kv-codecs": ["INT8, 8.5 bits", "INT4, 5 bits"],
    "verify-attention": ["h8g4d128", "8,192 slots, 16 rows", "32,768 slots, 16 rows", "0.50", "0.75"],
}
"""What stands in their plots."""


@pytest.fixture(scope="module")
def plots() -> dict[str, Any]:
    pytest.importorskip("matplotlib", reason="needs the docs extra")
    return runpy.run_path(str(DOCS / "plots.py"))


@pytest.mark.parametrize("topic", DRAWN)
def test_a_plot_shows_the_figures(plots, tmp_path, topic):
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    assert plots["draw"](topic, DRAWN[topic], first)
    assert plots["draw"](topic, DRAWN[topic], again)
    assert first.read_bytes() == again.read_bytes()
    texts = [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", first.read_text())]
    assert [text for text in SEEN[topic] if text not in texts] == []


def test_topics_with_and_without_a_plot(generate, plots, tmp_path):
    assert set(plots["PLOTS"]) == set(generate["PLOTTED"])
    assert not plots["draw"]("cpu-rounds", {}, tmp_path / "none.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("topic", DRAWN)
def test_a_plot_without_its_figures_stops_the_build(plots, tmp_path, topic):
    with pytest.raises(ValueError, match="no figure is named like"):
        plots["draw"](topic, {"another": 1.0}, tmp_path / "none.svg")


def test_every_benchmark_in_the_tree_can_be_drawn(generate, plots, tmp_path):
    for topic in generate["PLOTTED"]:
        path = DOCS / "benchmarks" / f"{topic}.json"
        if path.exists():
            figures = generate["read"](path)["figures"]
            values = {name: figure["value"] for name, figure in figures.items()}
            assert plots["draw"](topic, values, tmp_path / "one.svg")


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
