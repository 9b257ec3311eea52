"""`ikbo-tree analyze`: what copying coarse rows to the items costs, for a log of requests."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from ikbo_tree.analysis import Broadcasting, Ceilings, broadcasting
from ikbo_tree.errors import TreeError

DTYPES = ("float64", "float32", "float16", "bfloat16")


def analyze(
    log: Annotated[
        Path, typer.Argument(help="A CSV file with a header, one line an item.", exists=True)
    ],
    keys: Annotated[
        str, typer.Option(help="Columns that tell rows apart, outer to inner; comma-separated.")
    ],
    width: Annotated[
        list[str], typer.Option(help="LEVEL=ELEMENTS, once for each level with features.")
    ],
    out: Annotated[int, typer.Option(min=1, help="Columns of the linear map.")] = 1,
    item: Annotated[str, typer.Option(help="Name of the items' level.")] = "item",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    ceilings: Annotated[
        Path | None,
        typer.Option(help="A results file with what a device does at most.", exists=True),
    ] = None,
    result: Annotated[Path | None, typer.Option("--json", help="File for the numbers.")] = None,
) -> None:
    """Counts what a flat model pays for copies before a linear map, and what a tree op pays.

    A level has a row for each distinct key below each row of the level above it: name a column of
    requests first where each request has features of its own.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}", param_hint="--dtype")
    try:
        found = broadcasting(
            _columns(log, keys.split(",")),
            widths=_widths(width),
            out=out,
            levels=("", item),
            dtype=getattr(torch, dtype),
        )
        known = None if ceilings is None else Ceilings.from_results(ceilings)
    except (TreeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    found.show(known)
    if result is not None:
        result.write_text(json.dumps(_numbers(found, known), indent=1) + "\n")


def _columns(path: Path, names: list[str]) -> dict[str, list[str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            rule = f"must name columns of {list(reader.fieldnames or ())}"
            raise typer.BadParameter(f"{rule}; got {missing[0]!r}", param_hint="--keys")
        rows = list(reader)
    return {name: [row[name] for row in rows] for name in names}


def _widths(given: list[str]) -> dict[str, int]:
    found = {}
    for entry in given:
        level, _, elements = entry.partition("=")
        if not elements.isdecimal():
            rule = "must be LEVEL=ELEMENTS, e.g. user=512"
            raise typer.BadParameter(f"{rule}; got {entry!r}", param_hint="--width")
        found[level] = int(elements)
    return found


def _numbers(found: Broadcasting, ceilings: Ceilings | None) -> dict[str, object]:
    forms = {"flat": found.linear.flat, "tree": found.linear.tree}
    linear: dict[str, dict[str, float]] = {
        name: {"flops": work.total.flops, "bytes": work.total.bytes} for name, work in forms.items()
    }
    if ceilings is not None:
        for name, work in forms.items():
            linear[name]["seconds_at_least"] = work.seconds(ceilings)
    return {
        "rows": {name: level.rows for name, level in found.stats.levels.items()},
        "copied_bytes": found.stats.extra_bytes,
        "flops_on_copies": found.stats.extra_flops,
        "linear": linear,
        "ceilings": None if ceilings is None else ceilings.source,
    }
