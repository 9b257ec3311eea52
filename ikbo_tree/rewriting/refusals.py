"""Which models cannot be rewritten, and the sentences that say why and where."""

from __future__ import annotations

import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)

from ikbo_tree.rewriting.errors import RefusedError

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


def not_exported(error: Exception) -> RefusedError:
    """Why torch.export failed, and at which line of the model."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _OWN))
    ]
    where = ""
    if frames:
        last = frames[-1]
        where = f' ("{last.filename}", line {last.lineno}, in {last.name}: `{last.line}`)'
    if isinstance(error, GuardOnDataDependentSymNode):
        return RefusedError(f"a size or a branch of it depends on a tensor's values{where}")
    first = str(error).strip().splitlines() or [""]
    why = f"{type(error).__name__}: {first[0]}"
    return RefusedError(f"torch.export makes no graph of it, for {why}{where}")


def refuse_writes(program: torch.export.ExportedProgram) -> None:
    """Writes to inputs or buffers, which are done after everything else in a captured graph."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    for kind, written in (
        ("input", signature.user_inputs_to_mutate),
        ("buffer", signature.buffers_to_mutate),
    ):
        for output, name in written.items():
            raise RefusedError(
                f"it writes to its {kind} {name!r} in place, in an order that the pass cannot keep"
                f"{source(nodes[output])}"
            )


def refuse_training(model: nn.Module) -> None:
    """A module in training mode."""
    for name, module in model.named_modules():
        if module.training:
            where = f"its module {name!r} ({type(module).__name__})" if name else "the model"
            raise RefusedError(f"{where} is in training mode; call model.eval() first")


def refuse_op(node: fx.Node) -> None:
    """What no graph for any tree can have, or no rewritten graph."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    why = None
    if torch.Tag.nondeterministic_seeded in target.tags and _draws(node):
        why = "draws random numbers, whose order a rewritten model would change"
    elif _in_training(node):
        why = "takes statistics of the batch, which mixes its rows and belongs to training"
    elif _drops_rows(node):
        why = "drops the rows' own dim where there is one row, so shapes would follow from the tree"
    elif target._schema.is_mutable and target.overloadpacket is not torch.ops.aten.batch_norm:
        why = "changes a tensor in place, in an order that the pass cannot keep"
    elif torch.Tag.data_dependent_output in target.tags:
        why = "makes a number of a tensor's values, which a graph for any tree cannot hold"
    elif (
        torch.Tag.dynamic_output_shape in target.tags
        and target.overloadpacket is not torch.ops.aten.repeat_interleave
        and free_unbacked_symbols(node.meta["val"])
    ):
        why = "gives a tensor whose size depends on values"
    if why is not None:
        raise RefusedError(f"{target.overloadpacket} {why}{source(node)}")


def _in_training(node: fx.Node) -> bool:
    if "batch_norm" not in str(node.target):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if "training" not in names:
        return "no_training" not in str(node.target)
    at = names.index("training")
    return bool(node.args[at] if len(node.args) > at else node.kwargs.get("training", False))


def _drops_rows(node: fx.Node) -> bool:
    """Whether a squeeze meets a dim whose size is a number of rows."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target.overloadpacket is not torch.ops.aten.squeeze:
        return False
    x = node.args[0]
    assert isinstance(x, fx.Node)
    sizes = x.meta["val"].shape
    named: Any = node.args[1] if len(node.args) > 1 else range(len(sizes))
    dims = [named] if isinstance(named, int) else named
    return any(isinstance(sizes[d], torch.SymInt) for d in dims)


def _draws(node: fx.Node) -> bool:
    """Whether an op that may be random is: dropout is not where it is told not to."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, None)
        value = argument.default_value if given is None else given
        if argument.name == "dropout_p":
            return bool(value != 0.0)
        if argument.name == "train":
            return value is not False
    return True


def source(node: fx.Node) -> str:
    """Where the model's source has the op, as the end of a sentence."""
    trace = (node.meta.get("stack_trace") or "").splitlines()
    found = [
        (line.strip().removeprefix("File "), code.strip())
        for line, code in pairwise(trace)
        if line.strip().startswith("File ")
    ]
    own = [x for x in found if f"{_TORCH}" not in x[0]] or found
    return f" ({own[-1][0]}: `{own[-1][1]}`)" if own else ""
