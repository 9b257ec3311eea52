"""`ikbo-tree reproduce`: the published article's measurements on this card, and a report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

CHECKOUT = Path(__file__).parents[2]
"""Where the code of measurements lies, if this is one."""


def reproduce(
    only: Annotated[
        list[str] | None, typer.Option(help="Measure this item, again if need be; repeatable.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Measure what has results, too.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Only write the report; needs no GPU.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show items and results files.")] = False,
    device: Annotated[
        str | None, typer.Option(help="With --render, --list: end of the results files' names.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default docs/reproduction.")] = None,
) -> None:
    """Measures what the article shows, and more, on a Hopper GPU; writes plots and a report.

    Without options it measures what has no results yet. The measurements belong to a checkout:
    install the package with pip install -e.
    """
    script = CHECKOUT / "benchmarks" / "reproduce.py"
    if not script.is_file():
        rule = "needs a checkout of ikbo-tree with its benchmarks, installed by pip install -e"
        raise typer.BadParameter(f"{rule}; there is no {script}", param_hint="reproduce")
    flags = {"--all": everything, "--render": render, "--list": listed}
    command = [sys.executable, str(script), *(flag for flag, given in flags.items() if given)]
    command += ["--only", *only] if only else []
    command += ["--device", device] if device else []
    command += ["--out", str(out.resolve())] if out else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)
