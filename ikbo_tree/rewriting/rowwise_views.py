"""Rules, continued: views, and what copies or cuts along other dims (see `rowwise`)."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from ikbo_tree.rewriting.rowwise import (
    ROWS,
    Operand,
    RowCall,
    Rows,
    aten,
    front,
    is_whole,
    rank,
    rule,
)
from ikbo_tree.rewriting.values import Merged


@rule("unsqueeze")
def unsqueeze(call: RowCall) -> Rows | None:
    """A new dim before or behind."""
    x = call.only("self")
    if x is None:
        return None
    return Rows(x.dim + (front(call.args["dim"], rank(x) + 1) <= x.dim), x.merged)


@rule("transpose", "permute", "t", "numpy_T")
def permuted(call: RowCall) -> Rows | None:
    """Dims in another order."""
    x = call.only("self")
    if x is None:
        return None
    order = list(range(rank(x)))
    if "dims" in call.args:
        order = [front(d, rank(x)) for d in call.args["dims"]]
    elif "dim0" in call.args:
        a, b = (front(call.args[name], rank(x)) for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    elif set(call.args) == {"self"}:
        order.reverse()
    else:
        return None
    return Rows(order.index(x.dim), x.merged)


def expression(size: Any) -> sympy.Expr:
    """A size as a polynomial of the levels' sizes."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias")
def reshaped(call: RowCall) -> Rows | None:
    """Rows may share a dim with what lies before and behind them."""
    x = call.only("self")
    if x is None or "dtype" in call.args:
        return None
    fine = [expression(n) for n in call.fine]
    wanted = [expression(n) for n in call.out.shape]
    before = sympy.Mul(*fine[: x.dim]) * x.merged.outer
    batch = fine[x.dim] / (x.merged.outer * x.merged.inner)
    for dim, size in enumerate(wanted):
        if sympy.Mul(*wanted[:dim]) == 0:
            return None
        outer = sympy.simplify(before / sympy.Mul(*wanted[:dim]))
        if outer.is_Integer and outer > 0:
            inner = sympy.simplify(size / (batch * outer))
            if inner.is_Integer and inner > 0:
                break
    else:
        return None
    given = call.args.get("size", call.args.get("shape"))
    if given is None or len(given) != len(wanted):
        return None
    sizes = [n if isinstance(n, int) else g for n, g in zip(call.out.shape, given, strict=True)]
    if any(isinstance(n, int) and n == -1 for i, n in enumerate(sizes) if i != dim):
        return None
    sizes[dim] = ROWS
    merged = Merged(int(outer), int(inner))
    return Rows(dim, merged, {"self": x, "shape": sizes}, aten.reshape.default)


@rule("select_scatter", "slice_scatter")
def written(call: RowCall) -> Rows | None:
    """One entry or a range of another dim replaced, or all rows: row by row."""
    x, source = call.args["self"], call.args["src"]
    if not isinstance(x, Operand) or not isinstance(source, Operand):
        return None
    at = front(call.args["dim"], rank(x))
    if at == x.dim and not (rank(source) == rank(x) and is_whole(call.args)):
        return None
    gone = rank(source) < rank(x) and at < x.dim
    same = (source.dim + gone, source.merged) == (x.dim, x.merged)
    return Rows(x.dim, x.merged) if same else None


@rule("expand")
def expanded(call: RowCall) -> Rows | None:
    """Other dims grow."""
    x = call.only("self")
    if x is None:
        return None
    dim = len(call.out.shape) - rank(x) + x.dim
    sizes = list(call.args["size"])
    sizes[dim] = -1
    return Rows(dim, x.merged, {"size": sizes})


@rule("repeat")
def repeated(call: RowCall) -> Rows | None:
    """Other dims are repeated."""
    x = call.only("self")
    dim = 0 if x is None else len(call.out.shape) - rank(x) + x.dim
    return None if x is None or call.args["repeats"][dim] != 1 else Rows(dim, x.merged)


@rule("tile")
def tiled(call: RowCall) -> Rows | None:
    """As `repeat`, with as many dims as there are."""
    x = call.only("self")
    if x is None:
        return None
    ndim = len(call.out.shape)
    times = [1] * (ndim - len(call.args["dims"])) + list(call.args["dims"])
    dim = ndim - rank(x) + x.dim
    return Rows(dim, x.merged) if times[dim] == 1 else None


@rule("repeat_interleave")
def repeated_within(call: RowCall) -> Rows | None:
    """Along another dim."""
    x = call.only("self")
    if x is None or call.args.get("dim") is None:
        return None
    return None if front(call.args["dim"], rank(x)) == x.dim else Rows(x.dim, x.merged)


@rule("constant_pad_nd", "pad")
def padded(call: RowCall) -> Rows | None:
    """Other dims are padded; the amounts come last dim first."""
    x = call.only("self")
    if x is None or call.args.get("mode", "constant") != "constant":
        return None
    back = rank(x) - 1 - x.dim
    return None if any(call.args["pad"][2 * back : 2 * back + 2]) else Rows(x.dim, x.merged)


@rule("tril", "triu")
def triangles(call: RowCall) -> Rows | None:
    """Of the last two dims."""
    x = call.only("self")
    return None if x is None or x.dim >= rank(x) - 2 else Rows(x.dim, x.merged)


@rule("diagonal")
def diagonal(call: RowCall) -> Rows | None:
    """Two dims become the last one."""
    x = call.only("self")
    if x is None:
        return None
    gone = {front(call.args[name], rank(x)) for name in ("dim1", "dim2")}
    return None if x.dim in gone else Rows(x.dim - sum(d < x.dim for d in gone), x.merged)


@rule("unfold")
def unfold(call: RowCall) -> Rows | None:
    """Windows of another dim, which become the last one."""
    x = call.only("self")
    if x is None or front(call.args["dimension"], rank(x)) == x.dim:
        return None
    return Rows(x.dim, x.merged)
