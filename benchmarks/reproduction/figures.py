"""Plots of items: one figure an item, a panel beside the other, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ikbo_tree.demo.pictures import INK, MUTED, STYLE
from reproduction import counted
from reproduction.contenders import contender
from reproduction.results import Results, series
from reproduction.spec import Cell, Item, Panel


def draw(results: Results, item: Item) -> Figure | None:
    """The figure of an item; None without numbers."""
    shown = [p for p in item.panels if p.kind != "records" and _has(results, p)]
    if not shown:
        return None
    mpl.rcParams["svg.hashsalt"] = f"ikbo-tree {item.id}"
    mpl.rcParams["svg.fonttype"] = "none"
    with mpl.rc_context(STYLE | {"axes.titlesize": 10.5, "font.size": 9.5}):
        columns = min(3 if len(shown) > 2 else 2, len(shown))
        rows = -(-len(shown) // columns)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)
        figure = Figure(figsize=_size(results, shown, columns, rows), layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, shown, strict=False):
            _PAINTERS[panel.kind](axes, results, panel)
            axes.set_title(panel.title)
        _legend(figure, list(grid.flat[: len(shown)]), shown)
        figure.supxlabel(source(results, item), fontsize=7, color=MUTED, x=0.01, ha="left")
    return figure


def write(figure: Figure, folder: Path, name: str) -> list[Path]:
    """As SVG and PNG, without a date or a program's name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
    figure.savefig(paths[1], dpi=160, metadata={"Software": None})
    paths[0].write_text("\n".join(line.rstrip() for line in paths[0].read_text().split("\n")))
    return paths


def source(results: Results, item: Item) -> str:
    """Device, date and versions of the files that an item's numbers are from, in small print."""
    lines: list[str] = []
    for topic in item.topics:
        content = results.file(topic)
        if content is None:
            continue
        names = ("torch", "triton", "flash-attn-4")
        versions = ", ".join(
            f"{name} {content['versions'][name]}" for name in names if content["versions"].get(name)
        )
        lines.append(
            f"{content['device']}, {content['date']}, {versions}: {results.path(topic).name}"
        )
    return "\n".join(lines)


def _has(results: Results, panel: Panel) -> bool:
    return bool(marks(results) if panel.kind == "roofline" else series(results, panel))


def _size(results: Results, shown: Sequence[Panel], columns: int, rows: int) -> tuple[float, float]:
    if shown[0].kind == "steps":
        most = max(len(series(results, panel)) for panel in shown)
        return 4.9 * columns + 0.6, 1.3 + 0.3 * most
    if shown[0].kind == "roofline":
        return 9.6, 5.4
    return 3.9 * columns + (2.4 if len(shown) <= 2 else 0.6), 3.3 * rows + 0.4


def _legend(figure: Figure, drawn: Sequence[Axes], shown: Sequence[Panel]) -> None:
    if shown[0].kind == "steps":
        return
    handles: dict[str, Any] = {}
    for axes in drawn:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    many = len(shown) > 2
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center" if many else "outside right center",
        ncols=min(6, len(handles)) if many else 1,
        frameon=False,
        fontsize=9,
        handlelength=2.8,
    )


def _lines(axes: Axes, results: Results, panel: Panel) -> None:
    ticks: set[float] = set()
    for who, line in series(results, panel).items():
        points = [(float(x), at[0]) for (x, _), at in zip(panel.points, line, strict=True) if at]
        ticks.update(x for x, _ in points)
        colour, mark, _ = contender(who)
        ours = who.startswith("ikbo")
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=mark, markersize=6 if ours else 5,
            linewidth=2.2 if ours else 1.4, label=who, zorder=3 if ours else 2,
            linestyle="-" if ours else (0, (4, 1.5)), markeredgewidth=1.2,
        )  # fmt: skip
    if panel.log:
        axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [f"{x:,.0f}" for x in sorted(ticks)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    if panel.field == "rms":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y * 1e6:,.0f}"))
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.label)


def _bars(axes: Axes, results: Results, panel: Panel) -> None:
    lines = series(results, panel)
    groups = [[who for who in lines if lines[who][x]] for x in range(len(panel.points))]
    width = 0.84 / max(map(len, groups))
    for who, line in lines.items():
        places, heights = [], []
        for x, value in enumerate(line):
            if value is not None:
                offset = groups[x].index(who) - (len(groups[x]) - 1) / 2
                places.append(x + offset * width)
                heights.append(value[0])
        bars = axes.bar(
            places,
            heights,
            width,
            color=contender(who).colour,
            label=who,
            edgecolor="white",
            linewidth=0.5,
        )
        axes.bar_label(bars, ["0" if y == 0 else "" for y in heights], fontsize=8, color=INK)
    filled = [x for x, group in enumerate(groups) if group]
    axes.set_xticks(filled, [str(panel.points[x][0]) for x in filled])
    axes.set_xlim(min(filled) - 0.6, max(filled) + 0.6)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.label)


def _steps(axes: Axes, results: Results, panel: Panel) -> None:
    lines = {who: line[0][0] for who, line in series(results, panel).items() if line[0]}
    bars = axes.barh(
        list(lines),
        list(lines.values()),
        color=[contender(who).colour for who in lines],
        height=0.72,
    )
    for who, bar in zip(lines, bars, strict=True):
        if who.endswith("-compiled"):
            bar.set(hatch="///", edgecolor="white", linewidth=0)
    axes.bar_label(bars, [f"{y:.3g}" for y in lines.values()], padding=3, fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel(panel.label)


@dataclass(frozen=True)
class Mark:
    """A kernel below the roof.

    Attributes:
        workload: its name.
        who: the contender.
        source: whose bytes: "counted" or "NCU".
        intensity: operations a byte.
        tflops: its rate.
    """

    workload: str
    who: str
    source: str
    intensity: float
    tflops: float


_PLACED = (
    ("lce", "lce-b1024-r70", "materialised+broadcast", "flat"),
    ("lce", "lce-b1024-r70", "materialised", "op"),
    ("lce", "lce-b1024-r70", "decomposed-padded", "tree"),
    ("lce", "lce-b1024-r70", "ikbo-gluon", "tree"),
    ("lce", "lce3-b1024-r64", "ikbo-gluon", "tree"),
    ("attention", "attn-s1024-r64-n64-h2-d128", "cudnn-broadcast", "flat"),
    ("attention-sweeps", "attn-s1024-r64-n64-h2-d128", "cudnn-copied", "op"),
    ("attention-sweeps", "attn-s1024-r64-n64-h2-d128", "fa4-copied", "op"),
    ("attention", "attn-s1024-r64-n64-h2-d128", "ikbo-gluon", "tree"),
    ("attention", "attn-s4096-r64-n64-h2-d128", "ikbo-gluon", "tree"),
    ("attention", "attn-s2048-r64-n1-h2-d128", "ikbo-gluon", "tree"),
    ("attention", "attn3-u1024-v128-i8-n64-h2-d128", "ikbo-gluon", "tree"),
)
COUNTED_BY_NCU = (
    ("lce-b1024-r70-p32", "stages_kernel", "lce-b1024-r70", "lce"),
    ("attn-s4096-r64-n64-h2-d128", "attention_forward", "attn-s4096-r64-n64-h2-d128", "attention"),
)


def marks(results: Results) -> list[Mark]:
    """Of what was measured."""
    found = []
    for topic, workload, who, form in _PLACED:
        ms = results.found(Cell(topic, workload, who))
        if ms is not None:
            cost = counted.cost(workload, form)
            found.append(Mark(workload, who, "counted", cost.intensity, cost.flops / ms / 1e9))
    for row, kernel, workload, topic in COUNTED_BY_NCU:
        ms = results.found(Cell(topic, workload, "ikbo-gluon"))
        read, written = (
            results.found(Cell("counters", row, kernel, None, f"dram_{way}_mb"))
            for way in ("read", "write")
        )
        if ms is not None and read is not None and written is not None:
            flops = counted.cost(workload, "tree").flops
            intensity = flops / (read + written) / 1e6
            found.append(Mark(workload, "ikbo-gluon", "NCU", intensity, flops / ms / 1e9))
    return found


_SHAPES = {
    "lce-b1024-r70": "o",
    "lce3-b1024-r64": "P",
    "attn-s1024-r64-n64-h2-d128": "^",
    "attn-s4096-r64-n64-h2-d128": "D",
    "attn-s2048-r64-n1-h2-d128": "v",
    "attn3-u1024-v128-i8-n64-h2-d128": "X",
}


def _roofline(axes: Axes, results: Results, panel: Panel) -> None:
    content = results.file("lce") or results.file("attention")
    if content is not None and content["ceilings"]["matmul_tflops"]:
        copy, product = content["ceilings"]["copy_gbps"], content["ceilings"]["matmul_tflops"]
        x = np.array([20.0, product / copy * 1e3, 4000.0])
        y = np.minimum(x * copy / 1e3, product)
        axes.plot(x, y, color=INK, linewidth=1.5, label="roof")
        axes.text(
            23, 21 * copy / 1e3, f"a copy: {copy:,.0f} GB/s", va="center", fontsize=8, color=MUTED
        )
        axes.text(
            3900, product * 1.03, f"a product: {product:,.0f} TFLOP/s", ha="right", va="bottom",
            fontsize=8, color=MUTED,
        )  # fmt: skip
    for mark in marks(results):
        hollow, colour = mark.source == "NCU", contender(mark.who).colour
        workload = mark.workload.replace("-h2-d128", "")
        axes.scatter(
            mark.intensity, mark.tflops, s=64, marker=_SHAPES[mark.workload], linewidth=1.4,
            facecolor="none" if hollow else colour, edgecolor=colour,
            label=f"{workload}\n{mark.who}{', NCU' * hollow}", zorder=3,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=panel.xlabel, ylabel=panel.label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())


_PAINTERS = {"lines": _lines, "bars": _bars, "steps": _steps, "roofline": _roofline}
