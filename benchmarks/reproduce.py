"""The article's measurements on this card; the command is `ikbo-tree reproduce`.

Runs the commands whose results files are missing, one process each, brings the tables of docs/ up
to date, then writes plots and docs/reproduction/report.html from all results files of the device.
`--only` runs those of some items again, `--all` everything; `--render` and `--list` run nothing and
need no GPU.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import harness
import torch
from reproduction import report
from reproduction.items import ITEMS, topics_of
from reproduction.results import Results
from reproduction.runs import RUNS

FOLDER = harness.ROOT / "docs/reproduction"
DEVICE = "nvidia-h200"
"""Whose results are checked in."""


def listing(results: Results) -> list[str]:
    """A line an item, and below it one for each results file."""
    lines = []
    for item in ITEMS.values():
        lines.append(f"{item.id:22} {item.title}")
        for topic in item.topics:
            there = "there" if results.file(topic) else "missing"
            run = RUNS[topic]
            lines.append(f"    {results.path(topic).name:42} {there:8} about {run.seconds:3} s")
    return lines


def measure(topics: Sequence[str]) -> list[str]:
    """Runs commands one after another; returns topics without a result."""
    failed = []
    for topic in topics:
        run = RUNS[topic]
        if run.missing:
            print(f"{topic}: left out, it needs {run.missing}", flush=True)
            continue
        print(f"{topic}: {run.command}", flush=True)
        begin = time.perf_counter()
        script = str(harness.ROOT / "benchmarks" / run.script)
        done = subprocess.run(
            [sys.executable, script, *shlex.split(run.arguments)], cwd=harness.ROOT
        )
        print(f"{topic}: {time.perf_counter() - begin:.0f} s", flush=True)
        if done.returncode:
            failed.append(topic)
    return failed


def chosen(results: Results, only: Sequence[str], everything: bool) -> list[str]:
    """Topics to measure: of some items, all, or those without a file."""
    topics = topics_of(list(only or ITEMS))
    if only or everything:
        return topics
    return [topic for topic in topics if results.file(topic) is None]


def is_hopper() -> bool:
    """Whether torch finds one."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=(), metavar="ID")
    parser.add_argument("--all", action="store_true", help="measure what has results, too")
    parser.add_argument("--render", action="store_true", help="measure nothing; needs no GPU")
    parser.add_argument("--list", action="store_true", help="show items and results files")
    parser.add_argument("--device", help=f"end of files' names; default this card, or {DEVICE}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of plots and page")
    options = parser.parse_args()
    measuring = not (options.render or options.list)
    if measuring and not is_hopper():
        parser.error("measuring needs a Hopper GPU, torch finds none; --render needs none")
    here = harness.slug(torch.cuda.get_device_name()) if is_hopper() else DEVICE
    results = Results(harness.RESULTS, options.device or here)
    if options.list:
        print("\n".join(listing(results)))
        return
    failed: list[str] = []
    if measuring:
        failed = measure(chosen(results, options.only, options.all))
        results = Results(harness.RESULTS, here)
        subprocess.run([sys.executable, str(harness.ROOT / "benchmarks/render.py")], check=True)
    for path in report.write(results, options.out):
        print(path)
    if failed:
        sys.exit(f"no results from {', '.join(failed)}")


if __name__ == "__main__":
    main()
