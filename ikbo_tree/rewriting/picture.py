"""A rewritten graph as a picture, coloured by level: with matplotlib, or in Graphviz's language.

A lane for each level, coarse on top; from left to right ops in the order in which each could run at
the earliest. Ops without rows, as ranges of weights are, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from ikbo_tree.extras import require

if TYPE_CHECKING:
    from ikbo_tree.rewriting.report import Op, Report

COLOURS = ("#12706b", "#c98b1b", "#5b5ea6", "#9a3b6b", "#4f7a28", "#3a6ea5")
"""Of levels, coarse first; again from the front where there are more."""
INK, LINE = "#22262b", "#b4bac0"


@dataclass(frozen=True)
class Shown:
    """An op of the picture.

    Attributes:
        op: what the report knows of it.
        level: whose rows it has.
        label: its short name.
        column: how many ops come before it at least.
        reads: names of the ops whose results it takes.
    """

    op: Op
    level: str
    label: str
    column: int
    reads: tuple[str, ...]


def draw(report: Report, path: Path) -> None:
    """Writes the picture; `.dot` is text, all else goes to matplotlib."""
    if path.suffix == ".dot":
        path.write_text(dot(report))
    else:
        _plot(report, path)


def dot(report: Report) -> str:
    """The graph in the language of Graphviz: `dot -Tsvg graph.dot > graph.svg`."""
    shown = list(_shown(report))
    colours = _colours(report)
    lines = ["digraph rewritten {", ' rankdir=LR; node [style=filled, fontcolor="white"];']
    for level, colour in colours.items():
        lines.append(f' subgraph "cluster_{level}" {{ label="{level}";')
        for x in shown:
            if x.level == level:
                shape = "octagon" if x.op.together else "box"
                style = f'label="{x.label}", fillcolor="{colour}", shape={shape}'
                lines.append(f'  "{x.op.name}" [{style}];')
        lines.append(" }")
    lines += [f' "{read}" -> "{x.op.name}";' for x in shown for read in x.reads]
    return "\n".join([*lines, "}", ""])


def _colours(report: Report) -> dict[str, str]:
    levels = report.given.all_levels()
    return {level: COLOURS[i % len(COLOURS)] for i, level in enumerate(levels)}


def _shown(report: Report) -> Iterator[Shown]:
    """All ops with rows; outputs of an op that has several are read from it directly."""
    known = {op.name: op for op in report.ops if op.level is not None}
    columns: dict[str, int] = {}
    for node in report.graph.nodes:
        op = known.get(node.name)
        if op is not None and op.level is not None:
            reads = tuple(dict.fromkeys(n.name for n in _producers(node) if n.name in known))
            columns[node.name] = 1 + max((columns[n] for n in reads), default=-1)
            label = str(node.target).split(".")[1]
            yield Shown(op, op.level, label, columns[node.name], reads)


def _producers(node: fx.Node) -> Iterator[fx.Node]:
    for read in node.all_input_nodes:
        if isinstance(read.target, torch._ops.OpOverload):
            yield read
        elif read.op == "call_function":
            yield from _producers(read)


def _plot(report: Report, path: Path) -> None:
    figures = require("matplotlib.figure", "cli")
    shown, colours = list(_shown(report)), _colours(report)
    places, lanes, height = _places(shown, list(colours))
    width = 1 + max((x.column for x in shown), default=0)
    figure = figures.Figure(figsize=(max(8.0, 0.75 * width), max(3.0, 0.42 * height)))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.axis("off")
    for x in shown:
        for read in x.reads:
            (x0, y0), (x1, y1) = places[read], places[x.op.name]
            axes.plot([x0, x1], [y0, y1], color=LINE, linewidth=0.6, zorder=1)
    for x in shown:
        box = {
            "boxstyle": f"{'sawtooth' if x.op.together else 'round'},pad=0.3",
            "facecolor": colours[x.level],
            "edgecolor": "none",
        }
        place = {"ha": "center", "va": "center", "fontsize": 6}
        axes.text(*places[x.op.name], x.label, color="white", bbox=box, **place)
    for level, y in lanes.items():
        count = sum(x.level == level for x in shown)
        rows = report.rows.get(level)
        name = f"{level}, {count} ops"
        if rows is not None:
            name += f"\n{rows.least} to {rows.most} rows"
        axes.text(-1.2, y, name, color=INK, ha="right", va="center", fontsize=9)
    axes.set(xlim=(-5.5, width), ylim=(-height, 1))
    figure.savefig(path, dpi=110)


def _places(
    shown: list[Shown], levels: list[str]
) -> tuple[dict[str, tuple[float, float]], dict[str, float], int]:
    """Where ops are, one below the other where a lane has several in a column; lanes; height."""
    places: dict[str, tuple[float, float]] = {}
    lanes: dict[str, float] = {}
    top = 0
    for level in levels:
        columns: defaultdict[int, int] = defaultdict(int)
        for x in shown:
            if x.level == level:
                places[x.op.name] = (x.column, -(top + columns[x.column]))
                columns[x.column] += 1
        if columns:
            deep = max(columns.values())
            lanes[level] = -(top + (deep - 1) / 2)
            top += deep + 1
    return places, lanes, top
