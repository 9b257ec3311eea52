"""`ikbo-tree fuzz`: random trees against an op until one breaks it, then the smallest that does."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ikbo_tree.extras import require

DTYPES = ("float64", "float32", "float16", "bfloat16")


def fuzz(
    op: Annotated[str, typer.Option(help="Name of an op, or all.")] = "all",
    impl: Annotated[str, typer.Option(help="Implementation under test.")] = "auto",
    examples: Annotated[int, typer.Option(help="Trees to try for each op.")] = 300,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of the tensors: {', '.join(DTYPES)}.")] = "float32",
    max_depth: Annotated[int, typer.Option(help="Most levels of a tree, 1 to 5.")] = 5,
    max_rows: Annotated[int, typer.Option(help="Most rows of a level.")] = 300,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Checks every contract of an op on random trees, forward and backward.

    Exits with 1 at the first op that fails, after printing the smallest tree found that makes it
    fail, as Python that runs the failing check again.
    """
    require("hypothesis", "testing")
    from ikbo_tree.testing.check import CheckError
    from ikbo_tree.testing.fuzzing import find_failure, known_ops

    ops = known_ops() if op == "all" else (op,)
    for name in ops:
        if name not in known_ops():
            raise typer.BadParameter(
                f"must be all or one of {', '.join(known_ops())}", param_hint="--op"
            )
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}", param_hint="--dtype")
    out = Console()
    options: dict[str, Any] = {
        "impl": impl,
        "dtype": getattr(torch, dtype),
        "device": torch.device(device),
        "examples": examples,
        "seed": seed,
        "max_depth": max_depth,
        "max_rows": max_rows,
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    for name in ops:
        with Progress(*columns, console=out) as progress:
            task = progress.add_task(name, total=examples)
            failure: CheckError | None = find_failure(
                name, on_example=partial(progress.advance, task), **options
            )
        if failure is not None:
            command = (
                f"ikbo-tree fuzz --op {name} --impl {impl} --examples {examples} --seed {seed}"
                f" --dtype {dtype} --max-depth {max_depth} --max-rows {max_rows} --device {device}"
            )
            out.print(f"[red]{name} failed[/red]. The smallest example found:\n")
            out.print(str(failure), markup=False, highlight=False, soft_wrap=True)
            out.print(f"\nThe whole search again:\n{command}", markup=False, soft_wrap=True)
            raise typer.Exit(1)
    out.print(f"{len(ops)} ops, {examples} trees each: nothing found")
