"""Draws the plots of the documentation from the figures of benchmarks, so that none of them is drawn by hand.

A topic has a plot if there is a function for it in `PLOTS`. Which figures it draws is decided by their names; a topic
with a plot but without a figure of such a name stops the build.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, float]
"""Figures of a topic: name and value."""

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "specdec",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "figure.facecolor": "white",
}
"""Texts stay texts, and the same figures give the same file."""

KINDS = ("weights", "experts", "attention", "small")
"""Kinds of kernels, in the order in which they are stacked; others follow by name."""


def draw(topic: str, values: Values, path: Path) -> bool:
    """Draws the plot of a topic into an SVG file; returns whether it has one.

    Raises:
        ValueError: if none of the figures that the plot shows is there.
    """
    if topic not in PLOTS:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure: Any = Figure(layout="constrained")
        PLOTS[topic](figure, values)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def named(values: Values, pattern: str) -> dict[tuple[str, ...], float]:
    """Values whose whole name matches, by the groups of the match, in their order.

    Raises:
        ValueError: if there is none.
    """
    matches = ((re.fullmatch(pattern, name), value) for name, value in values.items())
    found = {match.groups(): value for match, value in matches if match is not None}
    if not found:
        raise ValueError(f"no figure is named like {pattern!r}, among {sorted(values)}.")
    return found


def verify_attention(figure: Any, values: Values) -> None:
    """Share of the read bandwidth: a group of bars for each shape, a bar for each length of the context."""
    shares = {
        (shape, f"{int(context):,} slots, {rows} rows"): share
        for (context, rows, shape), share in named(values, r"share\.l(\d+)\.rows(\d+)\.(\w+)").items()
    }
    figure.set_size_inches(8, 3.5)
    axes = figure.subplots()
    groups(axes, shares)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.set(ylabel="share of the read bandwidth", ylim=(0, 1.1))
    axes.set_xlabel("shape: key/value heads (h), query heads of a group (g), dimension (d)")


def gpu_rounds(figure: Any, values: Values) -> None:
    """Time of a round by kind of kernel, with its wall time; and wall time over kernel time and over its floor."""
    shares = named(values, r"(.+)\.share\.(\w+)")
    walls = {name: values[f"{name}.milliseconds"] for name, _ in shares}
    kernels = {name: wall / values[f"{name}.wall_over_kernel"] for name, wall in walls.items()}
    present = {kind for _, kind in shares}
    kinds = [kind for kind in KINDS if kind in present] + sorted(present - {*KINDS})
    ratios = named(values, r"(.+)\.wall_over_(kernel|floor)")
    rows = len(walls), len({name for name, _ in ratios})
    figure.set_size_inches(8, 2 + 0.4 * sum(rows))
    upper, lower = figure.subplots(2, 1, height_ratios=rows)
    begin = dict.fromkeys(walls, 0.0)
    for kind in kinds:
        widths = {name: shares.get((name, kind), 0.0) * kernels[name] for name in walls}
        upper.barh(list(walls), list(widths.values()), left=list(begin.values()), height=0.6, label=kind)
        begin = {name: begin[name] + widths[name] for name in walls}
    upper.scatter(list(walls.values()), list(walls), marker="|", s=250, color="black", label="wall time", zorder=3)
    upper.invert_yaxis()
    upper.set_xlabel("milliseconds of a round, by kind of kernel")
    upper.legend(fontsize="small", ncols=len(kinds) + 1, loc="lower center", bbox_to_anchor=(0.5, 1))
    meaning = {"kernel": "time in which kernels run", "floor": "reading the weights once"}
    groups(lower, {(name, meaning[limit]): ratio for (name, limit), ratio in ratios.items()}, across=True)
    lower.axvline(1, color="grey", linewidth=0.8, linestyle="--")
    lower.set_xlabel("wall time of a round over a limit")


def kv_codecs(figure: Any, values: Values) -> None:
    """KL divergence of each codec, those with the most bits on top."""
    divergences = {name: kl for (name,), kl in named(values, r"kl\.(\w+)").items()}
    names = sorted(divergences, key=lambda name: (-values[f"bits.{name}"], divergences[name]))
    labels = [f"{name}, {values[f'bits.{name}']:.3g} bits" for name in names]
    figure.set_size_inches(8, 1 + 0.3 * len(names))
    axes = figure.subplots()
    axes.scatter([divergences[name] for name in names], labels, zorder=3)
    axes.invert_yaxis()
    axes.grid(axis="both", linewidth=0.5)
    axes.set(xscale="log", xlabel="KL divergence of the next-token law from that of a plain cache, nats")


PLOTS: dict[str, Callable[[Any, Values], None]] = {
    "gpu-rounds": gpu_rounds,
    "kv-codecs": kv_codecs,
    "qwen35-27b-shape": gpu_rounds,
    "verify-attention": verify_attention,
}


def groups(axes: Any, values: Mapping[tuple[str, str], float], *, across: bool = False) -> None:
    """Bars in groups: the first part of a key is the group, the second the colour; what is missing has no bar.

    Args:
        axes: where to draw.
        values: length of each bar.
        across: whether bars lie, the first group on top.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(group for group, _ in values))}
    series = list(dict.fromkeys(name for _, name in values))
    size = 0.8 / len(series)
    for index, name in enumerate(series):
        offset = (index - (len(series) - 1) / 2) * size
        bars = {places[group] + offset: value for (group, own), value in values.items() if own == name}
        drawn = (axes.barh if across else axes.bar)([*bars], [*bars.values()], 0.9 * size, label=name)
        axes.bar_label(drawn, fmt="{:.2f}", fontsize="small", padding=2)
    (axes.set_yticks if across else axes.set_xticks)([*places.values()], [*places])
    axes.margins(**{"x" if across else "y": 0.15})
    if across:
        axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1))
