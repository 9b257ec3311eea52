"""Writes the tables and plots of docs/benchmarks.md and docs/kernels: python benchmarks/render.py.

Between `<!-- results: NAME -->` and `<!-- end -->` comes what benchmarks/results/NAME.json says: a
line about the run, a table for each family of workloads and direction, and for families with a
number that varies a plot in docs/benchmarks/. Words behind NAME keep workloads that begin with one
of them. Topics of `render_kernels` and `render_checks` have tables of their own, and
`<!-- roofline: FAMILY -->` is arithmetic. Where a results file is missing, its block says so.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import render_checks
import render_kernels
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/benchmarks.md"
PLOTS = ROOT / "docs/benchmarks"
KERNELS = ROOT / "docs/kernels"
REPRODUCTION = ROOT / "docs/reproduction.md"
DOCUMENTS = (DOCUMENT, REPRODUCTION, *sorted(KERNELS.glob("*.md")))
TOPICS = render_kernels.TOPICS | render_checks.TOPICS

DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}
MOST_PLOTTED = 16
"""Workloads in a picture."""
_BLOCK = re.compile(r"(<!-- results: (\S+)(.*?) -->\n).*?(<!-- end -->)", re.S)
_ROOFLINE = re.compile(r"(<!-- roofline: (\S+) -->\n).*?(<!-- end -->)", re.S)


def document(text: str, at: Path = DOCUMENT) -> str:
    """The document with all its blocks written anew.

    Args:
        text: of the document.
        at: where it lies.
    """
    up = "../" * (len(at.relative_to(ROOT).parts) - 1)
    text = _BLOCK.sub(lambda m: f"{m[1]}{_block_of(m[2], m[3].split(), up)}{m[4]}", text)
    return _ROOFLINE.sub(lambda m: m[1] + "\n".join([*render_kernels.roofline(m[2]), m[3]]), text)


def named(text: str) -> list[str]:
    """The results files that a document shows, whether they are there or not."""
    return [name for _, name, _, _ in _BLOCK.findall(text)]


def load(name: str) -> dict[str, Any]:
    """A results file."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def _block_of(name: str, only: Sequence[str], up: str) -> str:
    if not (RESULTS / f"{name}.json").is_file():
        return f"There is no `benchmarks/results/{name}.json` yet.\n"
    return block(name, load(name), only, up)


def block(name: str, content: Mapping[str, Any], only: Sequence[str] = (), up: str = "../") -> str:
    """What a document says of one results file.

    Args:
        name: of the file.
        content: of the file.
        only: beginnings of the workloads that are shown; none: all are, and plotted.
        up: from the document's folder to the root.
    """
    versions = ", ".join(f"{who} {v}" for who, v in content["versions"].items() if v is not None)
    copy, product = content["ceilings"]["copy_gbps"], content["ceilings"]["matmul_tflops"]
    ceilings = ""
    if product is not None:
        ceilings = f"; a copy moves {copy:,.0f} GB/s, a matrix product does {product:,.3g} TFLOP/s"
    lines = [
        f"[`{name}.json`]({up}benchmarks/results/{name}.json): {content['device']},"
        f" {content['date']}, {versions}{ceilings}. `{content['command']}`",
        "",
    ]
    records = [r for r in content["records"] if r["workload"].startswith(tuple(only) or "")]
    content = {**content, "records": records}
    topic = name.split("_")[0]
    if topic in TOPICS:
        return "\n".join([*lines, *TOPICS[topic](content)])
    for title, frame in tables(content):
        lines += [f"{title}, {frame.attrs['unit']}:", ""]
        text = frame.map(lambda x: "" if pd.isna(x) else f"{x:,.3g}" if x < 1000 else f"{x:,.0f}")
        body = [[workload, *row] for workload, row in zip(text.index, text.to_numpy(), strict=True)]
        aligned = ["left"] + ["right"] * text.shape[1]
        lines += [tabulate(body, ["workload", *text.columns], "github", colalign=aligned), ""]
        if frame.attrs["plotted"] and not only:
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
        cells.attrs["plotted"] = "cuda" in content["versions"] and 2 < len(cells) <= MOST_PLOTTED
        cells.attrs["plotted"] &= content["versions"]["cuda"] is not None
        yield ", ".join(filter(None, (family, DIRECTIONS.get(direction), dtype))), cells


def _plot_name(name: str, title: str) -> str:
    return f"{name}_{title.replace(', ', '_').replace(' ', '-')}.svg"


def plot(name: str, content: Mapping[str, Any]) -> list[Path]:
    """A picture of each table of a GPU's with more than two workloads, or of each trace."""
    if name.startswith("timeline_"):
        return render_kernels.draw(content, KERNELS)
    if name.split("_")[0] in TOPICS:
        return []
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
    names: set[str] = set()
    for at in DOCUMENTS:
        text = at.read_text()
        at.write_text(document(text, at))
        print(at)
        names.update(named(text))
    for name in sorted(names):
        if options.no_plots or not (RESULTS / f"{name}.json").is_file():
            continue
        for path in plot(name, load(name)):
            print(path)


if __name__ == "__main__":
    main()
