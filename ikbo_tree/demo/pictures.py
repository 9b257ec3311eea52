"""What the figures look like (matplotlib, written as PNG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import ikbo_tree as ikbo
from ikbo_tree.demo.cost import Cost
from ikbo_tree.demo.training import EXACT, FLAT, TREE, Agreement
from ikbo_tree.extras import require

COLOURS = {FLAT: "#c4512f", TREE: "#12706b"}
LEVELS = ("#12706b", "#c98b1b", "#5b5ea6", "#9a3b6b")
INK, MUTED, GRID = "#22262b", "#6b737c", "#e4e7ea"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 160,
}


def fan_out(path: Path, tree: ikbo.BroadcastTree, title: str) -> None:
    """How uneven the tree is, and the rows that copies cost.

    Left: the number of children of every row, largest first. Right: rows of each level in the
    tree, and in a flat model.
    """
    with _figure(path, title, panels=2) as (left, right):
        for (above, below), colour in zip(_pairs(tree), LEVELS, strict=False):
            children = np.sort(tree.offsets(below, of=above).diff().cpu().numpy())[::-1]
            rank = np.arange(1, len(children) + 1)
            shown = children > 0
            name = f"{below} rows a {above}"
            left.plot(rank[shown], children[shown], color=colour, label=name, drawstyle="steps-mid")
        left.set(xscale="log", yscale="log", xlabel="rank of the row", ylabel="rows below it")
        left.set_title("Fan-out, largest first")
        left.legend(frameon=False)

        _plain_ticks(left.xaxis, left.yaxis)

        rows = [tree.rows(level) for level in tree.levels]
        place = np.arange(len(rows))[::-1]
        right.barh(place, [max(rows)] * len(rows), 0.6, color=COLOURS[FLAT], alpha=0.25)
        right.barh(place, rows, 0.6, color=COLOURS[TREE])
        for y, n in zip(place, rows, strict=True):
            copies = f"{n:,}, copied {max(rows) / n:,.1f}x" if n < max(rows) else f"{n:,}"
            right.annotate(copies, (max(rows), y), (8, 0), textcoords="offset points", va="center")
        right.set(xlim=(0, max(rows) * 1.7), yticks=place)
        right.set_xticks([0, max(rows)], ["0", f"{max(rows):,}"])
        right.set_yticklabels(list(tree.levels), color=INK)
        right.spines["bottom"].set_bounds(0, max(rows))
        right.grid(visible=False)
        right.set_title("Rows in the tree, and copied by a flat model")


def costs_over_ratios(
    path: Path, ratios: Sequence[float], costs: Mapping[str, Sequence[Mapping[str, Cost]]]
) -> None:
    """Time of every kind of call, and peak memory of the last kind, over candidates a user.

    Args:
        path: of the PNG.
        ratios: candidates a user.
        costs: kinds of calls, e.g. forward and training step; a pair of costs for each ratio.
    """
    title = "Flat and tree model, the same candidates below fewer and fewer users"
    with _figure(path, title, panels=len(costs) + 1) as panels:
        kinds = list(costs.items())
        for panel, (kind, pairs) in zip(panels, kinds, strict=False):
            lines = {who: [pair[who].median_ms for pair in pairs] for who in COLOURS}
            gains = [pair[TREE].times_faster_than(pair[FLAT]) for pair in pairs]
            _lines(panel, f"{kind}, ms", ratios, lines, gains)
        kind, pairs = kinds[-1]
        lines = {who: [pair[who].peak_mb for pair in pairs] for who in COLOURS}
        gains = [pair[FLAT].peak_mb / pair[TREE].peak_mb for pair in pairs]
        _lines(panels[-1], f"{kind}, peak MiB", ratios, lines, gains)


def _lines(
    panel: Any,
    title: str,
    ratios: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    gains: Sequence[float],
) -> None:
    """Flat and tree over the ratio, logarithmic, with the factor between them at every point."""
    for who, values in lines.items():
        panel.plot(ratios, values, color=COLOURS[who], marker="o", markersize=5)
    panel.fill_between(ratios, lines[TREE], lines[FLAT], color=GRID, alpha=0.5, linewidth=0)
    top, bottom = max(map(max, lines.values())), min(map(min, lines.values()))
    panel.set(xscale="log", yscale="log", xlabel="candidates a user")
    panel.set_ylim(bottom / 2.2, top * 2.2)
    panel.set_xlim(ratios[0] / 1.8, ratios[-1] * 1.8)
    for who, above in ((FLAT, True), (TREE, False)):
        panel.annotate(
            who,
            (ratios[0], lines[who][0]),
            (0, 11 if above else -18),
            textcoords="offset points",
            ha="center",
            color=COLOURS[who],
            fontweight="bold",
        )
    for x, flat, tree, gain in zip(ratios, lines[FLAT], lines[TREE], gains, strict=True):
        middle = np.sqrt(flat * tree)
        panel.text(x, middle, f"{gain:.1f}x", ha="center", va="center", fontsize=9, color=INK)
    _plain_ticks(panel.xaxis, panel.yaxis)
    panel.set_title(title)


def costs_of_workloads(path: Path, costs: Mapping[str, Mapping[str, Cost]], title: str) -> None:
    """Time and peak memory of a few workloads, side by side."""
    with _figure(path, title, panels=2) as (time, memory):
        place = np.arange(len(costs))
        for panel, unit in ((time, "ms"), (memory, "MiB")):
            for shift, who in ((-0.19, FLAT), (0.19, TREE)):
                values = [
                    c[who].median_ms if unit == "ms" else c[who].peak_mb for c in costs.values()
                ]
                panel.bar(place + shift, values, 0.34, color=COLOURS[who], label=who)
                for x, value, pair in zip(place + shift, values, costs.values(), strict=True):
                    label = f"{value:,.0f}"
                    if who == TREE:
                        gain = (
                            pair[TREE].times_faster_than(pair[FLAT])
                            if unit == "ms"
                            else pair[FLAT].peak_mb / value
                        )
                        label += f"\n{gain:.1f}x less"
                    panel.annotate(
                        label,
                        (x, value),
                        (0, 4),
                        textcoords="offset points",
                        ha="center",
                        fontsize=9,
                    )
            panel.set_xticks(place, list(costs), color=INK)
            panel.margins(y=0.22)
            panel.set_ylim(bottom=0)
            panel.grid(axis="x", visible=False)
        time.set_title("Time, median ms")
        memory.set_title("Peak memory, MiB")
        time.legend(frameon=False)


def losses(path: Path, curves: Mapping[str, Sequence[float]], agreement: Agreement) -> None:
    """Both loss curves on top of each other, and how far each is from float64.

    Args:
        path: of the PNG.
        curves: losses of `FLAT`, `TREE` and `EXACT`, step by step.
        agreement: of the three.
    """
    steps = np.arange(1, len(curves[EXACT]) + 1)
    with _figure(path, "The same training, flat and on the tree", panels=2) as (loss, error):
        loss.plot(steps, curves[FLAT], color=COLOURS[FLAT], linewidth=5, alpha=0.35, label=FLAT)
        loss.plot(steps, curves[TREE], color=COLOURS[TREE], linewidth=1.4, label=TREE)
        loss.set_title("Loss")
        loss.set_xlabel("step")
        loss.legend(frameon=False)

        bound = agreement.bound / 1e-7
        for who, marker in ((FLAT, "o"), (TREE, ".")):
            off = np.abs(np.subtract(curves[who], curves[EXACT])) / 1e-7
            style = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0, "linewidth": 0}
            error.plot(steps, off, marker=marker, color=COLOURS[who], label=who, **style)
        error.axhline(bound, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        error.annotate(
            "allowed to the tree model",
            (steps[-1], bound),
            (0, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        error.set_ylim(0, bound * 1.35)
        error.set_xlabel("step")
        error.set_title("Distance from float64, in 1e-7")
        error.legend(frameon=False, loc="upper left")


def _plain_ticks(*axes: Any) -> None:
    """10, 20, 50, 100, ... on logarithmic axes, less of them where they would crowd."""
    ticker = require("matplotlib.ticker", "cli")
    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(
            ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,))
        )
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))


def _pairs(tree: ikbo.BroadcastTree) -> list[tuple[str, str]]:
    """Neighbouring levels, then root and leaf."""
    pairs = list(pairwise(tree.levels))
    if len(tree.levels) > 2:
        pairs.append((tree.levels[0], tree.levels[-1]))
    return pairs


@contextmanager
def _figure(path: Path, title: str, *, panels: int) -> Iterator[Any]:
    """Axes side by side; the picture is written when the block ends."""
    with require("matplotlib", "cli").rc_context(STYLE):
        figure = require("matplotlib.figure", "cli").Figure(figsize=(4.4 * panels, 4.2))
        yield figure.subplots(1, panels)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13)
        figure.tight_layout(w_pad=2.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
