"""Command-line options that both commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ikbo_tree.kernels.common.dispatch import checked_name


def _device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"{name!r} is no device that works here: {error}") from None
    return name


def _impl(name: str) -> str:
    try:
        return checked_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Out = Annotated[Path, typer.Option(help="Folder for the pictures.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed runs of every call.")]
Seed = Annotated[int, typer.Option(min=0, help="Everything random follows from it.")]
Device = Annotated[str, typer.Option(callback=_device, help="cpu, cuda, ...")]
Impl = Annotated[
    str, typer.Option(callback=_impl, help="Implementation of the tree's ops: auto, torch, ...")
]
Threads = Annotated[
    int,
    typer.Option(
        min=1, help="Threads torch may use; one, so that ratios say nothing of what else runs."
    ),
]
Json = Annotated[
    Path | None, typer.Option(help="File for all figures, in the form of benchmarks/results.")
]
