"""Tables and pictures of docs/kernels/: what `render.py` writes there, but for times of contenders.

Each topic of results files has a function here that returns the lines of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tabulate import tabulate

PEAK_TFLOPS, PEAK_GBPS = 989.4, 4800.0
"""Of an H200 by its datasheet: dense 16-bit products, memory."""

Records: TypeAlias = Sequence[Mapping[str, Any]]


def table(head: Sequence[str], body: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    """Lines of a Markdown table of text; the first `left` columns are aligned there."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in body]
    aligned = ["left"] * left + ["right"] * (len(head) - left)
    # Numbers come formatted.
    return [tabulate(cells, head, "github", colalign=aligned, disable_numparse=True), ""]


def unique(records: Records, key: str) -> list[str]:
    """Values of a key in the order in which they come."""
    return list(dict.fromkeys(record[key] for record in records))


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ablation(content: Mapping[str, Any]) -> list[str]:
    """A variant a line: its time and how many times the shipped kernel's that is."""
    ceilings, records = content["ceilings"], content["records"]
    lines = []
    if ceilings["copy_gbps"]:
        ridge = ceilings["matmul_tflops"] / ceilings["copy_gbps"] * 1e3
        lines += [f"The ridge between this run's two ceilings is {ridge:.0f} FLOP/B.", ""]
    for direction, name in (("fwd", "Forward"), ("bwd", "Backward")):
        here = [r for r in records if r["direction"] == direction]
        cells = {(r["workload"], r["who"]): r for r in here}
        workloads = unique(here, "workload")
        for workload in workloads:
            body = [
                [who, number(cells[workload, who]["median_ms"]), cells[workload, who]["note"]]
                for who in unique(here, "who")
                if (workload, who) in cells
            ]
            head = ["variant", "ms", "times the shipped (10 % to 90 % of rounds)"]
            lines += [f"{name}, `{workload}`:", "", *table(head, body)]
    return lines


COUNTERS = {
    "duration_us": "duration, us",
    "sm_mcycles": "cycles of an SM, millions",
    "sm_pct": "SM throughput, % of peak",
    "tensor_pct": "tensor cores active, %",
    "special_pct": "special functions, % of peak while active",
    "l2_pct": "L2 throughput, % of peak",
    "dram_pct": "DRAM throughput, % of peak",
    "l2_read_mb": "read from L2, MB",
    "dram_read_mb": "read from DRAM, MB",
    "dram_write_mb": "written to DRAM, MB",
    "instructions_m": "warp instructions, millions",
    "registers": "registers a thread at launch",
    "shared_kib": "shared memory a block, KiB",
    "warps_pct": "warps resident, % of the most",
    "blocks": "blocks",
}


def counters(content: Mapping[str, Any]) -> list[str]:
    """A counter a line, a kernel a column."""
    records = content["records"]
    head = ["", *(f"{r['workload']}: {r['who']}" for r in records)]
    body = [
        [title, *(number(r[key]) for r in records)]
        for key, title in COUNTERS.items()
        if any(r[key] is not None for r in records)
    ]
    return table(head, body)


def timeline(content: Mapping[str, Any]) -> list[str]:
    """A phase a line, then a picture, for each workload."""
    lines, records = [], content["records"]
    for workload in unique(records, "workload"):
        here = [r for r in records if r["workload"] == workload]
        head = ["phase", "times", "cycles", "10 %", "90 %", "of all time", "beside products"]
        body = [
            [
                r["phase"], f"{r['count']:,}", *(f"{r[q]:,}" for q in ("median", "p10", "p90")),
                f"{r['share']:.1%}", f"{r['beside']:.1%}",
            ]
            for r in here
        ]  # fmt: skip
        lines += [f"`{workload}`:", "", *table(head, body)]
        lines += [f"![{workload}, by clock]({picture_name(content, workload)})", ""]
    return lines


def picture_name(content: Mapping[str, Any], workload: str) -> str:
    """File of a picture, beside the pages."""
    device = content["device"].lower().replace(" ", "-")
    return f"timeline_{device}_{workload}.svg"


def machine_code(content: Mapping[str, Any]) -> list[str]:
    """A form of a kernel a line."""
    columns = {
        "workload": "form", "who": "kernel", "products": "HGMMA in the code",
        "registers": "registers", "spills": "spilled bytes", "shared_kib": "shared KiB",
        "early": "early exp2",
        "serialised": "serialised", "miscompiled": "miscompiled",
    }  # fmt: skip
    body = [[record[key] for key in columns] for record in content["records"]]
    return table(list(columns.values()), body, left=3)


TOPICS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "ablation": ablation,
    "counters": counters,
    "timeline": timeline,
    "machine-code": machine_code,
}


COLORS = {
    "main loop": "tab:blue",
    "epilogue": "tab:orange",
    "scores": "tab:blue",
    "first block": "tab:cyan",
    "last product": "tab:blue",
    "softmax": "tab:green",
    "store": "tab:orange",
}


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """A picture of each trace: a bar a consumer, cycles from left to right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mpl.rcParams["svg.hashsalt"] = "ikbo-tree"
    written = []
    for workload, trace in content["pictures"].items():
        figure = Figure(figsize=(11, 2.4), layout="constrained")
        axes = figure.subplots()
        shown = {}
        for consumer, phase, start, end in trace["intervals"]:
            kind = phase.split(",")[0]
            shown[kind] = Patch(color=COLORS[kind], label=kind)
            axes.broken_barh(
                [(start, end - start)], (consumer - 0.35, 0.7), facecolor=COLORS[kind],
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
        axes.set_yticks([1, 0], ["consumer 1", "consumer 0"])
        axes.set_xlabel("cycles")
        axes.set_title(f"{workload}, program {trace['program']}, {content['device']}")
        axes.legend(
            handles=list(shown.values()), loc="upper left", bbox_to_anchor=(1, 1), fontsize="small"
        )
        folder.mkdir(exist_ok=True)
        written.append(folder / picture_name(content, workload))
        figure.savefig(written[-1], metadata={"Date": None})
    return written


def roofline(family: str) -> list[str]:
    """Operations and bytes of a family's workloads, and the least times that a datasheet allows."""
    rows = _compression() if family == "lce" else _attention()
    head = [
        "workload", "GFLOP", "MB", "FLOP/B", "copied: GFLOP", "MB", "FLOP/B",
        "arithmetic, ms", "bytes, ms",
    ]  # fmt: skip
    body = [
        [
            f"`{name}`", *_intensity(flops, moved), *_intensity(*copied),
            f"{flops / PEAK_TFLOPS / 1e9:.3f}", f"{moved / PEAK_GBPS / 1e6:.3f}",
        ]
        for name, flops, moved, copied in rows
    ]  # fmt: skip
    return table(head, body)


def _intensity(flops: float, moved: float) -> list[str]:
    intensity = flops / moved
    return [
        number(flops / 1e9), number(moved / 1e6),
        f"{intensity:,.0f}" if intensity >= 10 else f"{intensity:.2g}",
    ]  # fmt: skip


_Line: TypeAlias = tuple[str, float, float, tuple[float, float]]


def _compression() -> list[_Line]:
    """Each level's product at its own rows; copied: one product of concatenated inputs an item."""
    from bench_lce import WIDTHS, M, N, tree_of

    found: list[_Line] = []
    for name in ("lce-b1024-r2", "lce-b1024-r70", "lce-b1024-r1000", "lce3-b1024-r64"):
        tree = tree_of(name)
        rows = {level: tree.rows(level) for level in tree.levels}
        items, wide = rows["item"], sum(WIDTHS[level] for level in rows)
        flops = sum(2.0 * M * N * n * WIDTHS[level] for level, n in rows.items())
        fixed = 2.0 * M * wide + 2.0 * M * N * items  # weights and results
        moved = fixed + sum(2.0 * N * n * WIDTHS[level] for level, n in rows.items())
        copied = (2.0 * M * N * items * wide, fixed + 2.0 * N * items * wide)
        found.append((name, flops, moved, copied))
    return found


def _attention() -> list[_Line]:
    """Scores and weighted sums; copied: keys and values for each item."""
    found: list[_Line] = []
    heads, D = 2, 128
    for keys, users, ratio, n in (
        (512, 32, 64, 64),
        (1024, 32, 64, 64),
        (1024, 32, 70, 64),
        (4096, 32, 64, 64),
        (512, 2048, 64, 1),
        (2048, 256, 512, 1),
    ):
        items, width = users * ratio, 2.0 * heads * D  # bytes of a row
        flops = 2.0 * width * keys * items * n
        rows = 2 * width * items * n  # queries and results
        copied = (flops, rows + 2 * width * keys * items)
        name = f"attn-s{keys}-r{ratio}-n{n}-h{heads}-d{D}"
        found.append((name, flops, rows + 2 * width * keys * users, copied))
    return found
