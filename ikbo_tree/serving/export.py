"""Models as one file: an exported program and, inside it, the signature to serve it by."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ikbo_tree as ikbo
from ikbo_tree.errors import TreeError
from ikbo_tree.serving.buffers import TreeBuffers
from ikbo_tree.serving.merge import Merged, cut, merge
from ikbo_tree.serving.request import Request, check
from ikbo_tree.serving.signature import Signature

SIGNATURE = "ikbo_tree_signature.json"
"""Name of the extra file in the exported program's archive."""


def save(model: nn.Module, signature: Signature, example: Request, path: Path) -> None:
    """Exports a model, `model(tree=tree, **inputs)`, for any number of rows.

    A program that `rewrite` gave, with `compact` inputs, is such a model. If the signature says
    that scores are `independent`, that is tried on the example.

    Args:
        model: in evaluation mode, on the device where it will run.
        signature: how it is called.
        example: a request with at least two rows of every level.
        path: of the file, by custom `*.pt2`.

    Raises:
        BadRequestError: the example does not fit the signature.
        TreeError: it has too few rows, the model other arguments than the signature, or scores
            are not independent as the signature says.
    """
    names = [*signature.inputs, "tree"]
    arguments = [*inspect.signature(model.forward).parameters]
    if sorted(arguments) != sorted(names):
        raise TreeError("model", f"must take the arguments {sorted(names)}", str(arguments))
    checked = check(example, signature)
    for rows in checked.rows.values():
        if rows < 2:
            raise TreeError("example", "must have at least two rows of every level", f"{rows}")
    merged = merge(signature, [checked])
    tree, inputs = _prepared(model, merged)
    if signature.independent:
        _check_independent(model, signature, merged)
    given: dict[str, Any] = {
        name: tree if name == "tree" else inputs[name].clone() for name in arguments
    }
    # Only rows vary; a width that happens to equal them does not. Live counts have a fixed length.
    auto = {0: torch.export.Dim.AUTO}
    shapes = {
        name: [
            auto if leaf.shape[0] >= 2 and leaf is not tree._fields[0] else None for leaf in leaves
        ]
        if name == "tree"
        else auto
        for name, leaves in ((name, pytree.tree_leaves(value)) for name, value in given.items())
    }
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    content = json.dumps(signature.to_json())
    torch.export.save(program, path, extra_files={SIGNATURE: content})


def load(
    path: Path, *, device: torch.device | str = "cpu"
) -> tuple[Callable[..., Tensor], Signature]:
    """The model and the signature that `save` wrote.

    Args:
        path: of the file, from someone who is trusted: a program may do anything.
        device: where to put its parameters.

    Raises:
        TreeError: the file has no signature.
    """
    extra: dict[str, Any] = {SIGNATURE: ""}
    program = torch.export.load(path, extra_files=extra)
    if not extra[SIGNATURE]:
        raise TreeError("path", "must be a file that ikbo_tree.serving.save wrote", str(path))
    if torch.device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    return program.module(), Signature.from_json(json.loads(extra[SIGNATURE]))


def _prepared(model: nn.Module, merged: Merged) -> tuple[ikbo.BroadcastTree, Mapping[str, Tensor]]:
    """A batch as the model gets it, on the model's device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rows = merged.rows
    buffers = TreeBuffers(merged.signature, rows, device=device)
    tree, inputs = buffers.fill(merged)
    buffers.copy()
    return tree, inputs


def _check_independent(model: nn.Module, signature: Signature, merged: Merged) -> None:
    (whole,) = merged.parts
    half = {level: -(-rows // 2) for level, rows in whole.rows.items()}
    with torch.no_grad():
        tree, inputs = _prepared(model, merged)
        together = model(tree=tree, **inputs)[: whole.rows[signature.output]]
        alone = []
        for part in cut(signature, whole, {**whole.rows, signature.output: half[signature.output]}):
            tree, inputs = _prepared(model, merge(signature, [part]))
            alone.append(model(tree=tree, **inputs)[: part.rows[signature.output]])
    apart = torch.cat(alone)
    # Rounding differs between shapes; what another candidate does to a score is no rounding.
    if not torch.allclose(together, apart, rtol=1e-2, atol=1e-2 * float(together.abs().max())):
        rule = "must not be said to be independent: another candidate's absence changes scores"
        raise TreeError("scores", rule, f"{float((together - apart).abs().max())} of difference")
