"""Ops that move rows along a tree: broadcast, reduce, segment_softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.reduce.op import OPS
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.kernels.segment_softmax.op import segment_softmax as _segment_softmax

if TYPE_CHECKING:
    from ikbo_tree.tree import BroadcastTree

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def broadcast(x: Tensor, *, tree: BroadcastTree, level: str, to: str, impl: str = "auto") -> Tensor:
    """Copies each row of `level` to the rows of the finer level `to` below it.

    Args:
        x: [rows of `level`, ...], any dtype.
        tree: the tree.
        level: `x`'s level or table.
        to: a level at or below `level` (for a table: at or below the level it hangs off).
        impl: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of `to`, ...] in `x`'s dtype, a new contiguous tensor; dead rows are zero.
        Differentiable any number of times; gradients of 16-bit `x` are summed in float32.

    Raises:
        TreeError: unknown names, `to` not below `level`, rows or device that do not fit.

    >>> tree = BroadcastTree.from_counts({"item": [2, 0, 1]}, root="user")
    >>> broadcast(torch.tensor([1.0, 2.0, 3.0]), tree=tree, level="user", to="item")
    tensor([1., 1., 3.])
    """
    checked_name(impl)
    route = checked_route(tree, to, level)
    tree.check("x", x, level)
    out: Tensor = _broadcast(x, *route, impl)
    return out


def reduce(
    x: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    to: str,
    op: str = "sum",
    impl: str = "auto",
) -> Tensor:
    """Reduces the rows of `level` below each row of the coarser level `to`.

    A row with nothing below it gets the op's identity: 0 for sum and mean, -inf for max and
    logsumexp, +inf for min (the dtype's least and greatest value for integers), and no gradient
    passes there. A segment of nothing but -inf counts as empty for logsumexp.

    Args:
        x: [rows of `level`, ...]. Sums are taken in float32 (float64 for float64, int64 for
            integers) and rounded once. Integers (and bool for sum) have sum, max and min.
        tree: the tree.
        level: `x`'s level.
        to: a level at or above `level`, or a table reached from it.
        op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"logsumexp"`, elementwise over trailing dims.
            NaN wins every max and min; ties share the gradient evenly, as in torch.amax.
        impl: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of `to`, ...] in `x`'s dtype (a sum of integers: int64), a new contiguous tensor;
        dead rows are zero. Sum and mean are differentiable any number of times; the others once.

    Raises:
        TreeError: unknown names, `to` not above `level`, rows or device that do not fit.
        TypeError: a dtype that the op does not take.
        ValueError: no such op.

    >>> tree = BroadcastTree.from_counts({"item": [2, 0, 1]}, root="user")
    >>> reduce(torch.tensor([1.0, 2.0, 3.0]), tree=tree, level="item", to="user", op="max")
    tensor([2., -inf, 3.])
    """
    checked_name(impl)
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    route = checked_route(tree, level, to)
    tree.check("x", x, level)
    allowed: tuple[torch.dtype, ...] = _FLOATS
    if op in ("sum", "max", "min"):
        allowed += _INTEGERS
    if op == "sum":
        allowed += (torch.bool,)
    _check_dtype(x, allowed, f'reduce with op="{op}"')
    out: Tensor = _reduce(x, *route, op, impl)
    return out


def segment_softmax(
    x: Tensor, *, tree: BroadcastTree, level: str, of: str, impl: str = "auto"
) -> Tensor:
    """Softmax over the rows of `level` that share a row of the coarser level `of`.

    Args:
        x: [rows of `level`, ...], a float dtype; trailing dims are independent of each other.
            Computed in float32 (float64 for float64).
        tree: the tree.
        level: `x`'s level.
        of: a level at or above `level`, or a table reached from it.
        impl: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of `level`, ...] in `x`'s dtype, a new contiguous tensor: over each segment it sums
        to 1, or is 0 where the segment is -inf throughout. Dead rows are zero. Differentiable once.

    Raises:
        TreeError: unknown names, `of` not above `level`, rows or device that do not fit.
        TypeError: `x` is of no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 0, 1]}, root="user")
    >>> segment_softmax(torch.zeros(3), tree=tree, level="item", of="user")
    tensor([0.5000, 0.5000, 1.0000])
    """
    checked_name(impl)
    route = checked_route(tree, level, of)
    tree.check("x", x, level)
    _check_dtype(x, _FLOATS, "segment_softmax")
    out: Tensor = _segment_softmax(x, *route, impl)
    return out


def checked_route(tree: BroadcastTree, fine: str, coarse: str) -> Route:
    """The maps from a level up to another one, or to itself."""
    route = tree.route(fine, coarse)
    if route is not None:
        return route
    # A level to itself: every row is its own segment.
    live = tree.live(fine)
    rows = tree.capacity(fine)
    device = tree.device
    index = torch.arange(rows, dtype=torch.int32, device=device)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
    if live is not None:
        index = index.masked_fill(index >= live, 0)
        offsets = torch.minimum(offsets, live)
    return Route(index, offsets, None, live, live)


def _check_dtype(x: Tensor, allowed: tuple[torch.dtype, ...], what: str) -> None:
    if x.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"x must be of dtype {names} for {what}; got {x.dtype}")
