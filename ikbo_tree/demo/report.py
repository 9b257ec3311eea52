"""Results: tables on the terminal, and files in the form that `benchmarks/results` has."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ikbo_tree as ikbo
from ikbo_tree.demo.cost import Cost, ceilings
from ikbo_tree.demo.training import FLAT, TREE, Agreement
from ikbo_tree.extras import require


@dataclass
class Results:
    """Figures of one run on one device.

    Attributes:
        device: where models ran.
        impl: implementation of the tree's ops.
        records: costs, one for each contender, workload and direction.
        checks: what was compared, by name: differences, bounds, AUC.
    """

    device: torch.device
    impl: str = "auto"
    records: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The device for headings, on a CPU with the threads that torch uses."""
        threads = torch.get_num_threads()
        plural = "" if threads == 1 else "s"
        return f"cpu, {threads} thread{plural}" if self.device.type == "cpu" else str(self.device)

    def add(self, workload: str, direction: str, costs: Mapping[str, Cost], note: str = "") -> None:
        """Records of the flat and the tree model.

        Args:
            workload: e.g. `"model-demo-r100"`, r for finest rows a root row.
            direction: `"fwd"`, or `"fwd_bwd"` for a training step.
            costs: of `FLAT` and `TREE`.
            note: what else to know.
        """
        automatic = self.impl == "auto" and self.device.type == "cpu"
        ours = "ikbo-torch" if automatic else f"ikbo-{self.impl}"
        for name, cost in costs.items():
            self.records.append(
                {
                    "workload": workload,
                    "who": ours if name == TREE else "materialised+broadcast",
                    "direction": direction,
                    "dtype": "float32",
                    "median_ms": round(cost.median_ms, 4),
                    "p10_ms": round(cost.quantile(0.1), 4),
                    "p90_ms": round(cost.quantile(0.9), 4),
                    "tflops": None,
                    "gbps": None,
                    "peak_mb": round(cost.peak_mb, 3),
                    "note": note or None,
                }
            )

    def write(self, path: Path | None) -> list[Path]:
        """Writes the file, if one is wanted, with versions, ceilings and the command line."""
        if path is None:
            return []
        content = {
            "device": device_name(self.device),
            "date": datetime.now(UTC).date().isoformat(),
            "command": shlex.join(_nameless(argument) for argument in sys.argv),
            "versions": {
                "torch": torch.__version__,
                "triton": _version("triton"),
                "cuda": torch.version.cuda,
                "ikbo_tree": _version("ikbo-tree"),
            },
            "ceilings": ceilings(self.device),
            "records": self.records,
            "checks": self.checks,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return [path]


class Printer:
    """Headings, sentences and tables on the terminal (rich)."""

    def __init__(self) -> None:
        self._console = require("rich.console", "cli").Console()

    def heading(self, text: str) -> None:
        """A line that opens a section."""
        self._console.print(f"\n[bold]{text}[/bold]", highlight=False)

    def say(self, text: str) -> None:
        """A paragraph."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; the first column is text, the others are numbers."""
        box = require("rich.box", "cli").SIMPLE_HEAD
        table = require("rich.table", "cli").Table(box=box, pad_edge=False, collapse_padding=True)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def fan_outs(self, tree: ikbo.BroadcastTree) -> None:
        """The tree's levels: rows, copies that a flat model makes, children."""
        rows = []
        for name, level in tree.stats().levels.items():
            _, median, p90, _, most = level.fan_out or (0.0,) * 5
            children = (
                [f"{level.mean_fan_out:.1f}", f"{median:.0f}", f"{p90:.0f}", f"{most:.0f}"]
                if level.fan_out
                else [""] * 4
            )
            rows.append([name, f"{level.rows:,}", f"x {level.copies:,.1f}", *children])
        columns = ["level", "rows", "flat holds", "children: mean", "median", "p90", "most"]
        self.table(columns, rows)

    def agreements(self, results: Mapping[str, Agreement]) -> None:
        """How close flat and tree model are, by what was compared."""
        rows = [
            [
                name,
                f"{found.difference:.1e}",
                f"{found.flat_error:.1e}",
                f"{found.tree_error:.1e}",
                f"{found.bound:.1e}",
            ]
            for name, found in results.items()
        ]
        self.table(["", "flat - tree", "flat - float64", "tree - float64", "allowed"], rows)

    def losses(self, losses: Sequence[float]) -> None:
        """Where training began and ended."""
        self.say(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")

    def written(self, paths: Sequence[Path]) -> None:
        """Which files there are."""
        self.say("written: " + ", ".join(str(path) for path in paths))

    def memory_measure(self) -> None:
        """What the memory figures are."""
        self.say("memory: the most that PyTorch's allocator had handed out at one time, in MiB")

    def costs(self, title: str, first: str, rows: Mapping[str, Mapping[str, Cost]]) -> None:
        """Flat and tree, time and memory, of workloads by name.

        Args:
            title: what was run.
            first: what the names are.
            rows: costs of `FLAT` and `TREE` by name.
        """
        self.say(title)
        table = []
        for name, costs in rows.items():
            flat, tree = costs[FLAT], costs[TREE]
            table.append(
                [
                    name,
                    f"{flat.median_ms:,.1f}",
                    f"{tree.median_ms:,.1f}",
                    f"{tree.times_faster_than(flat):.2f}x",
                    f"{flat.peak_mb:,.1f}",
                    f"{tree.peak_mb:,.1f}",
                    f"{flat.peak_mb / tree.peak_mb:.1f}x",
                ]
            )
        columns = [first, "flat ms", "tree ms", "faster", "flat MiB", "tree MiB", "less"]
        self.table(columns, table)


def device_name(device: torch.device) -> str:
    """The GPU's name; or the CPU's model, the cores this process may use, and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found.group(1).strip() if found else name
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count()
    return f"{name}, {cores} cores, {torch.get_num_threads()} threads"


def _nameless(argument: str) -> str:
    """Without the folders of this machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
