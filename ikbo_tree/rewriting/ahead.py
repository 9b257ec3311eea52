"""Rewritten models compiled ahead of time, by AOTInductor: `package`, then `load` anywhere.

What AOTInductor compiles calls ops of libraries by their schemas, and passes None where an argument
is an empty list (torch 2.13). So ops with such arguments are called by other names, which lack them
and are registered here: a process that loads a package by torch itself has to import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

import ikbo_tree.ops  # noqa: F401  registers the ops
from ikbo_tree.kernels.common.library import NAMESPACE, register


def package(program: torch.export.ExportedProgram, path: str | Path) -> str:
    """Compiles an exported program for the device that it was exported on.

    Args:
        program: of a rewritten model, with `dynamic_shapes=report.dynamic_shapes()` for the ranges
            of its levels; its calls of ops are changed in place.
        path: of the package, which ends in `.pt2`.

    Returns:
        The path.
    """
    _without_empty_lists(program.graph_module.graph)
    program.graph_module.recompile()
    found: str = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return found


def load(path: str | Path) -> Callable[..., Any]:
    """The compiled program, called as the rewritten model is."""
    found: Callable[..., Any] = torch._inductor.aoti_load_package(str(path))
    return found


def _shorter(name: str, left_out: tuple[str, ...]) -> Any:
    """`name` without some arguments that are lists, for the case that they are empty."""
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    given, returns = str(op._schema).partition("(")[2].split(") -> ", 1)
    pieces = given.split(", ")
    kept = [i for i, piece in enumerate(pieces) if piece.split()[-1] not in left_out]

    def forward(*values: Any) -> Any:
        args: list[Any] = [[] for _ in pieces]
        for i, value in zip(kept, values, strict=True):
            args[i] = value
        return op(*args)

    schema = f"({', '.join(pieces[i] for i in kept)}) -> {returns}"
    return register(f"{name}_short", schema, forward, forward)


_SHORT = {
    getattr(getattr(torch.ops, NAMESPACE), name).default: (left_out, _shorter(name, left_out))
    for name, left_out in (
        ("target_attention", ("bias", "bias_of")),
        ("linear", ("live",)),
        ("linear_compression", ("live",)),
    )
}


def _without_empty_lists(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _SHORT:
            continue
        left_out, short = _SHORT[node.target]
        names = [argument.name for argument in node.target._schema.arguments]
        args = dict(zip(names, node.args, strict=True))
        if not any(args[name] for name in left_out):
            node.target = short
            node.args = tuple(value for name, value in args.items() if name not in left_out)
