"""`ikbo-tree tune`: the fastest tiles of the Triton kernels for given widths, written to a file."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ikbo_tree import tuning
from ikbo_tree.kernels.common import tuned
from ikbo_tree.tree import BroadcastTree

OPS = ("linear", "linear_compression", "target_attention")
DTYPES = ("float16", "bfloat16", "float32")


def tune(
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}.")],
    out: Annotated[Path, typer.Option(help="File for the tiles.")] = Path("tiles.json"),
    m: Annotated[int, typer.Option("--M", min=1, help="Rows of LCE's weights.")] = 433,
    n: Annotated[int, typer.Option("--N", min=1, help="Width of LCE's result, or linear's.")] = 256,
    k: Annotated[
        str, typer.Option("--K", help="Inputs of each level, coarse first; comma-separated.")
    ] = "1178,866",
    dim: Annotated[int, typer.Option(min=1, max=256, help="Of an attention head.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Of attention.")] = 2,
    n_seed: Annotated[int, typer.Option(min=1, help="Query rows an item.")] = 64,
    keys: Annotated[int, typer.Option(min=1, help="Keys a user.")] = 1024,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float16",
    items: Annotated[int, typer.Option(min=1, help="Rows of the finest level.")] = 1024,
    ratio: Annotated[int, typer.Option(min=1, help="Items a user.")] = 64,
) -> None:
    """Times the tiles that a kernel may have, on this GPU, and writes the fastest.

    Processes that find the file's name in IKBO_TREE_TILES use them for calls of the same widths and
    dtype, whatever the batch. Entries of other calls that the file has stay in it.
    """
    if op not in OPS:
        raise typer.BadParameter(f"must be one of {', '.join(OPS)}", param_hint="--op")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}", param_hint="--dtype")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU; torch finds none")
    from ikbo_tree.kernels.common.triton_timing import milliseconds

    widths, chosen = [int(width) for width in k.split(",")], getattr(torch, dtype)
    tree = _tree(items, ratio, len(widths))
    if op == "target_attention":
        questions = tuning.attention_questions(tree, n_seed, heads, dim, keys, chosen)
    elif op == "linear":
        questions = tuning.linear_questions(tree, n, widths, chosen)
    else:
        questions = tuning.linear_compression_questions(tree, m, n, widths, chosen)
    known = json.loads(out.read_text())["tiles"] if out.exists() else {}
    table = Table("call", "frozen ms", "best ms", "of", "tile")
    for question in questions:
        found = tuning.answer(question, milliseconds)
        known[question.key] = {
            **found.fields, "median_ms": found.best_ms, "frozen_ms": found.frozen_ms
        }  # fmt: skip
        tile = ", ".join(f"{name} {value}" for name, value in found.fields["tile"].items())
        times = (f"{found.frozen_ms:.4f}", f"{found.best_ms:.4f}", str(found.tried))
        table.add_row(question.key, *times, tile)
    content = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "triton": version("triton")},
        "tiles": known,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    console = Console()
    console.print(table)
    console.print(f"written to {out}; use it by {tuned.VARIABLE}={out}", soft_wrap=True)


def _tree(items: int, ratio: int, levels: int) -> BroadcastTree:
    """`items` rows below as many levels, the root's rows with `ratio` items each."""
    users = max(1, items // ratio)
    below = [items // users + (i < items % users) for i in range(users)]
    counts = {f"level{i}": [1] * users for i in range(1, levels - 1)}
    return BroadcastTree.from_counts({**counts, "item": below}, root="user").to("cuda")
