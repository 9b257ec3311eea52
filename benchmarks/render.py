"""Writes the tables and plots of docs/benchmarks.md: python benchmarks/render.py.

Between `<!-- results: NAME -->` and `<!-- end -->` comes what benchmarks/results/NAME.json says: a
line about the run, a table for each family of workloads and direction, and for families with a
number that varies a plot in docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/benchmarks.md"
PLOTS = ROOT / "docs/benchmarks"

DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}
_BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.S)


def document(text: str) -> str:
    """The document with all its blocks written anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{block(m[2], load(m[2]))}{m[3]}", text)


def load(name: str) -> dict[str, Any]:
    """A results file."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def block(name: str, content: Mapping[str, Any]) -> str:
    """What the document says of one results file."""
    versions = ", ".join(f"{who} {v}" for who, v in content["versions"].items() if v is not None)
    copy, product = content["ceilings"]["copy_gbps"], content["ceilings"]["matmul_tflops"]
    ceilings = ""
    if product is not None:
        ceilings = f"; a copy moves {copy:,.0f} GB/s, a matrix product does {product:,.3g} TFLOP/s"
    lines = [
        f"[`{name}.json`](../benchmarks/results/{name}.json): {content['device']},"
        f" {content['date']}, {versions}{ceilings}. `{content['command']}`",
        "",
    ]
    for title, frame in tables(content):
        lines += [f"{title}, {frame.attrs['unit']}:", ""]
        text = frame.map(lambda x: "" if pd.isna(x) else f"{x:,.3g}" if x < 1000 else f"{x:,.0f}")
        body = [[workload, *row] for workload, row in zip(text.index, text.to_numpy(), strict=True)]
        aligned = ["left"] + ["right"] * text.shape[1]
        lines += [tabulate(body, ["workload", *text.columns], "github", colalign=aligned), ""]
        if frame.attrs["plotted"]:
            lines += [f"![{title}](benchmarks/{_plot_name(name, title)})", ""]
    return "\n".join(lines)


def tables(content: Mapping[str, Any]) -> Iterator[tuple[str, pd.DataFrame]]:
    """A title, and [workload, contender] medians, or rates where useful work is what counts."""
    frame = pd.DataFrame(content["records"])
    frame["family"] = frame["workload"].str.split("-").str[0]
    keys = ["family", "direction", "dtype"]
    for key, records in frame.groupby(keys, sort=False, dropna=False):
        family, direction, dtype = (None if pd.isna(part) else part for part in key)
        rates = family.startswith("attn") and records["tflops"].notna().all()
        values = "tflops" if rates else "median_ms"
        cells = records.pivot(index="workload", columns="who", values=values)
        cells = cells.loc[records["workload"].unique(), records["who"].unique()]
        cells.attrs["unit"] = "TFLOP/s" if rates else "ms"
        cells.attrs["plotted"] = "cuda" in content["versions"] and len(cells) > 2
        cells.attrs["plotted"] &= content["versions"]["cuda"] is not None
        yield ", ".join(filter(None, (family, DIRECTIONS.get(direction), dtype))), cells


def _plot_name(name: str, title: str) -> str:
    return f"{name}_{title.replace(', ', '_').replace(' ', '-')}.svg"


def plot(name: str, content: Mapping[str, Any]) -> list[Path]:
    """A picture of each table of a GPU's with more than two workloads."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ikbo-tree"
    written = []
    for title, frame in tables(content):
        if not frame.attrs["plotted"]:
            continue
        figure = Figure(figsize=(9, 0.5 + 0.14 * frame.size), layout="constrained")
        axes = figure.subplots()
        frame[::-1].plot.barh(ax=axes, width=0.8)
        axes.set_xlabel(frame.attrs["unit"])
        axes.set_ylabel("")
        axes.set_title(f"{title}, {content['device']}")
        axes.legend(fontsize="small")
        PLOTS.mkdir(exist_ok=True)
        written.append(PLOTS / _plot_name(name, title))
        figure.savefig(written[-1], metadata={"Date": None})
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(document(text))
    print(DOCUMENT)
    for _, name, _ in _BLOCK.findall(text):
        for path in () if options.no_plots else plot(name, load(name)):
            print(path)


if __name__ == "__main__":
    main()
