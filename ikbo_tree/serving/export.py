"""Models as one file: an exported program and, inside it, the signature to serve it by."""

from __future__ import annotations

import base64
import inspect
import io
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
from ikbo_tree.serving.coarse import Staged, results
from ikbo_tree.serving.merge import Merged, cut, merge
from ikbo_tree.serving.request import Request, check
from ikbo_tree.serving.signature import Signature

SIGNATURE = "ikbo_tree_signature.json"
"""Name of the extra file in the exported program's archive."""
COARSE = "ikbo_tree_coarse_{table}.pt2.base64"
"""Names of the extra files with coarse parts."""


def save(model: nn.Module, signature: Signature, example: Request, path: Path) -> None:
    """Exports a model, `model(tree=tree, **inputs)`, for any number of rows.

    A program that `rewrite` gave, with `compact` inputs, is such a model. If the signature says
    that scores are `independent`, or has coarse parts, whose rows must be, that is tried on the
    example.

    Args:
        model: in evaluation mode, on the device where it will run; a `Staged` one if the signature
            has coarse parts.
        signature: how it is called.
        example: a request with at least two rows of every level.
        path: of the file, by custom `*.pt2`.

    Raises:
        BadRequestError: the example does not fit the signature.
        TreeError: it has too few rows, the model other arguments than the signature, or rows are
            not independent as the signature says.
        Exception: what `torch.export` raises for models that it can't export.
    """
    if bool(signature.coarse) != isinstance(model, Staged):
        rule = "must be Staged if and only if the signature has coarse parts"
        raise TreeError("model", rule, type(model).__name__)
    scoring = model.model if isinstance(model, Staged) else model
    names = [*signature.behind_coarse.inputs, "tree"]
    arguments = [*inspect.signature(scoring.forward).parameters]
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
    extra = {SIGNATURE: json.dumps(signature.to_json())}
    if isinstance(model, Staged):
        _check_parts(model, inputs)
        for table, part in model.coarse.items():
            taken = {name: inputs[name].clone() for name in signature.coarse[table].takes}
            # Chunks have another number of rows than the example: a part must do for any.
            any_rows = {name: {0: torch.export.Dim.DYNAMIC} for name in taken}
            extra[COARSE.format(table=table)] = _text(_exported(part, taken, any_rows))
        with torch.no_grad():
            inputs = model.behind(inputs)
    given: dict[str, Any] = {
        name: tree if name == "tree" else inputs[name].clone() for name in arguments
    }
    # Only rows vary; a width that happens to equal them does not. Live counts have a fixed length.
    maps = [
        {0: torch.export.Dim.AUTO} if leaf.shape[0] >= 2 and leaf is not tree._fields[0] else None
        for leaf in pytree.tree_leaves(tree)
    ]
    torch.export.save(_exported(scoring, given, {"tree": maps}), path, extra_files=extra)


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
    signature = Signature.from_json(json.loads(extra[SIGNATURE]))
    model = _module(program, device)
    if not signature.coarse:
        return model, signature
    parts = {
        table: _module(torch.export.load(_bytes(extra[COARSE.format(table=table)])), device)
        for table in signature.coarse
    }
    return Staged(model, parts, signature), signature


def _exported(
    model: nn.Module, given: dict[str, Any], shapes: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    """The program for any number of rows, or as `shapes` says for some of the arguments."""
    auto = {0: torch.export.Dim.AUTO}
    varying = {name: shapes.get(name, auto) for name in given}
    with torch.no_grad():
        return torch.export.export(model, (), kwargs=given, dynamic_shapes=varying, strict=False)


def _module(program: torch.export.ExportedProgram, device: torch.device | str) -> nn.Module:
    if torch.device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    return program.module()


def _text(program: torch.export.ExportedProgram) -> str:
    """A program as extra files of another can hold it, which are text."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _bytes(text: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(text))


def _check_parts(model: Staged, inputs: Mapping[str, Tensor]) -> None:
    """Coarse parts on all rows and on each half of them."""
    for table, part in model.coarse.items():
        declared = model.signature.coarse[table]
        taken = {name: inputs[name] for name in declared.takes}
        with torch.no_grad():
            together = results(part, table, declared, taken)
            (rows,) = {len(x) for x in taken.values()}
            halves = [
                results(part, table, declared, {n: x[half] for n, x in taken.items()})
                for half in (slice(None, rows // 2), slice(rows // 2, None))
            ]
        for name, whole in together.items():
            argument = f'coarse["{table}"]'
            rule = f"must give each row of {name!r} from its own inputs: others change it"
            _check_same(argument, rule, whole, torch.cat([half[name] for half in halves]))


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
    rule = "must not be said to be independent: another candidate's absence changes scores"
    _check_same("scores", rule, together, torch.cat(alone))


def _check_same(argument: str, rule: str, together: Tensor, apart: Tensor) -> None:
    """Raises unless rows that were computed together and apart differ by rounding alone."""
    together, apart = together.double(), apart.double()
    if not torch.allclose(together, apart, rtol=1e-2, atol=1e-2 * float(together.abs().max())):
        raise TreeError(argument, rule, f"{float((together - apart).abs().max())} of difference")
