"""Embedding look-ups whose gradient is summed in a fixed order, in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops.checks import check_float, in_force
from ikbo_tree.ops.crossing import on_host, widened
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    unique: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Rows of an embedding table, looked up at the ids' own level.

    A look-up is a broadcast from the table's rows to those that name them, and its gradient the sum
    over each id's rows, in the order of those rows: the same bits in every run, summed in float32.
    Where one side table of ids serves several look-ups, `tree.with_table` prepares it once.

    Args:
        ids: [rows of `level`, ...], any integer dtype, each in 0 ... V - 1. On a CPU this is
            checked, on CUDA torch's own look-up stops the device.
        weight: [V, D], a float dtype.
        tree: the tree.
        level: the level or table of the ids.
        unique: look up distinct ids alone, then copy to all rows that have them: less is read from
            a table that is far away, and no more than the distinct rows is summed. It finds the
            ids by sorting, and on CUDA waits for their number; a traced program, where that number
            is not known, looks up all. Values are the same either way. Off by default: from memory
            that the device reads itself, sorting costs more than reading a row again.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of `level`, ..., D] in `weight`'s dtype; dead rows are zero. Differentiable any number
        of times by `weight`, whose gradient is dense.

    Raises:
        TreeError: an unknown name; shapes, rows, ids or devices that do not fit.
        TypeError: ids are no integers, `weight` is of no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> weight = torch.tensor([[0.0], [10.0], [20.0]], requires_grad=True)
    >>> out = embedding(torch.tensor([2, 0, 2]), weight, tree=tree, level="item")
    >>> out.flatten().tolist(), torch.autograd.grad(out.sum(), weight)[0].flatten().tolist()
    ([20.0, 0.0, 20.0], [1.0, 0.0, 2.0])
    """
    checked_name(impl)
    _check(ids, weight, tree, level)
    live, each = tree.live(level), math.prod(ids.shape[1:])
    # Dead rows may hold anything.
    index = zero_dead_rows(ids, live).reshape(-1).to(torch.int64)
    end = None if live is None else live * each
    if on_host(ids) and index.numel():
        _check_range(index, weight.shape[0], end)
    table = weight
    if unique and weight.shape[0] and not torch.compiler.is_compiling():
        distinct, index = torch.unique(index, return_inverse=True)
        table = weight.index_select(0, distinct)
    elif weight.shape[0] and all(map(on_host, (ids, weight))) and _plain(impl):
        return zero_dead_rows(_looked_up(weight, index).view(*ids.shape, weight.shape[1]), live)
    dead = None
    if end is not None:
        dead = torch.arange(index.shape[0], device=index.device) >= end
        index = index.masked_fill(dead, 0)
    rows, order = table.shape[0], None
    if torch.is_grad_enabled() and weight.requires_grad:
        # The rows of each id, dead ones behind them all: what the gradient is summed over.
        rank = index if dead is None else index.masked_fill(dead, rows)
        ordered, order = torch.sort(rank, stable=True)
        bounds = torch.arange(rows + 1, device=index.device)
        offsets = torch.searchsorted(ordered, bounds, out_int32=True)
        order = order.to(torch.int32)
    else:
        offsets = index.new_zeros((), dtype=torch.int32).expand(rows + 1)
    out: Tensor = _broadcast(table, index.to(torch.int32), offsets, order, end, None, impl)
    return out.view(*ids.shape, weight.shape[1])


def _plain(impl: str) -> bool:
    return in_force(impl) in ("auto", "torch")


def _looked_up(weight: Tensor, index: Tensor) -> Tensor:
    """[ids, D] on a CPU, where torch's own gradient adds the rows of each id one after another.

    It does so in the dtype that it gets, so those of 16 bits are widened before.
    """
    if weight.dtype == widened(weight[:0]).dtype or not weight.requires_grad:
        return torch.nn.functional.embedding(index, weight)
    found: Tensor = _LookUp.apply(weight, index)  # type: ignore[no-untyped-call]
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, index: Tensor) -> Tensor:
        return weight.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        weight, index = inputs
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = torch.ops.aten.embedding_dense_backward(
            widened(grad), *ctx.saved_tensors, ctx.rows, -1, False
        )
        return total.to(grad.dtype), None


def _check(ids: Tensor, weight: Tensor, tree: BroadcastTree, level: str) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers; got {ids.dtype}")
    tree.check("ids", ids, level)
    check_float("weight", weight)
    if weight.dim() != 2:
        raise TreeError("weight", "must have shape [V, D]", shape_of(weight))
    if weight.device != ids.device:
        raise TreeError("weight", f"must be on {ids.device} like the ids", str(weight.device))
    for argument, x, size in (("ids", ids, ids.numel()), ("weight", weight, weight.shape[0])):
        if size >= 2**31:
            raise TreeError(argument, "must have less than 2^31 entries (rows)", shape_of(x))


def _check_range(ids: Tensor, rows: int, end: Tensor | None) -> None:
    """Of live ids."""
    living = ids if end is None else ids[: int(end)]
    if living.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(living))
    if low < 0 or high >= rows:
        got = low if low < 0 else high
        raise TreeError("ids", f"must lie in 0 ... {rows - 1}, the rows of weight", str(got))
