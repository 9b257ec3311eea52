"""Tables of what is no time: errors of bench_numerics.py, differing bits of bench_invariance.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from render_kernels import number, table, unique


def numerics(content: Mapping[str, Any]) -> list[str]:
    """A workload and dtype a line, a contender a column: errors in millionths."""
    lines = []
    for direction, name in (("fwd", "Results"), ("bwd", "Users' gradients")):
        records = [r for r in content["records"] if r["direction"] == direction]
        cells = {(r["workload"], r["dtype"], r["who"]): r["rms"] for r in records}
        who = unique(records, "who")
        body = [
            [workload, dtype, *(_millionths(cells.get((workload, dtype, w))) for w in who)]
            for workload in unique(records, "workload")
            for dtype in unique(records, "dtype")
            if (workload, dtype, who[0]) in cells
        ]
        title = f"{name}, root mean square error relative to that of the values, millionths:"
        lines += [title, "", *table(["workload", "dtype", *who], body, left=2)]
    return lines


def _millionths(rms: float | None) -> str:
    return "" if rms is None else number(rms * 1e6)


def invariance(content: Mapping[str, Any]) -> list[str]:
    """A contender a line."""
    head = ["workload", "who", "dtype", "other bits than alone", "of", "largest difference"]
    body = [
        [
            r["workload"], r["who"], r["dtype"], f"{r['differing']:,}", f"{r['elements']:,}",
            number(r["worst"]),
        ]
        for r in content["records"]
    ]  # fmt: skip
    return table(head, body, left=3)


TOPICS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "numerics": numerics,
    "invariance": invariance,
}
