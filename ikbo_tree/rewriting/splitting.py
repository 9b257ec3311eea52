"""Ops over values of several levels: concatenations that are never made, sums taken apart.

The rules of the published decomposition: `linear(cat(user, item))` is `linear(user)`, once a user,
gathered, plus `linear(item)`. Parts of equal lineage go through one product; the sum runs from the
coarsest level down, so that every partial result is gathered once.
"""

from __future__ import annotations

from typing import Any

import torch

from ikbo_tree.rewriting import wide
from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Call, Engine, path_of, structural
from ikbo_tree.rewriting.rowwise import front
from ikbo_tree.rewriting.values import Cat, Lazy, Value


@structural("cat")
def cat(engine: Engine, call: Call) -> Value | None:
    """Puts off a concatenation along a dim that is no batch dim."""
    parts = [engine.plain(x) for x in call.args["tensors"]]
    shapes = [engine.shape(x) for x in parts]
    if len({len(s) for s in shapes}) != 1:  # torch skips empty vectors
        return None
    dim = front(call.args["dim"], len(shapes[0]))
    flat: list[tuple[Value, int]] = []
    for part, size in zip(parts, shapes, strict=True):
        if isinstance(part, Cat) and part.dim == dim:
            flat += zip(part.parts, part.widths, strict=True)
        else:
            flat.append((part, size[dim]))
    if any(isinstance(x, Lazy) and x.dim == dim for x, _ in flat):
        return None
    if any(not isinstance(n, int) for _, n in flat):
        return None
    found = Cat(tuple(x for x, _ in flat), tuple(n for _, n in flat), dim)
    return _together(engine, found)


def _together(engine: Engine, found: Cat) -> Value:
    """Parts of one lineage as one, if that is all of them."""
    paths = {path_of(x) for x in found.parts}
    (path,) = paths if len(paths) == 1 else ((),)
    if path and path == path_of(found):
        engine.done = ("sunk", path)
        return engine.at(found, len(path))
    return found


@structural("stack")
def stack(engine: Engine, call: Call) -> Value | None:
    """As a concatenation of unsqueezed parts."""
    parts = [
        engine.apply(aten.unsqueeze.default, x, call.args["dim"]) for x in call.args["tensors"]
    ]
    found: Value = engine.apply(aten.cat.default, parts, call.args["dim"])
    return found


@structural("concat", "concatenate", "hstack", "column_stack")
def other_spellings(engine: Engine, call: Call) -> Value | None:
    """Of `cat`, along dim 1 of matrices."""
    tensors = call.args["tensors"]
    if "dim" not in call.args and any(len(engine.shape(x)) < 2 for x in tensors):
        return None
    found: Value = engine.apply(aten.cat.default, tensors, call.args.get("dim", 1))
    return found


@structural("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk")
def taken_apart(engine: Engine, call: Call) -> tuple[Value, ...] | None:
    """A concatenation that is split again: ranges of it."""
    x = call.args["self"]
    if not isinstance(x, Cat) or front(call.args["dim"], len(call.out[0].shape)) != x.dim:
        return None
    found, at = [], 0
    for piece in call.out:
        width = piece.shape[x.dim]
        if not isinstance(width, int):
            return None
        found.append(engine.apply(aten.slice.Tensor, x, x.dim, at, at + width))
        at += width
    return tuple(found)


@structural("slice")
def within_parts(engine: Engine, call: Call) -> Value | None:
    """A range of a concatenation, if it takes whole parts or lies in one."""
    x = call.args["self"]
    if not isinstance(x, Cat) or call.args["step"] != 1:
        return None
    start, end = call.args["start"] or 0, call.args["end"]
    if front(call.args["dim"], len(call.out.shape)) != x.dim or not isinstance(start, int):
        return None
    total = sum(x.widths)
    end = total if end is None else end
    if not isinstance(end, int):
        return None
    start, end = (min(max(n + total if n < 0 else n, 0), total) for n in (start, end))
    kept, at = [], 0
    for part, width in zip(x.parts, x.widths, strict=True):
        low, high = max(start, at) - at, min(end, at + width) - at
        if low < high:
            piece = part
            if high - low < width:
                piece = engine.apply(aten.slice.Tensor, part, x.dim, low, high)
            kept.append((piece, high - low))
        at += width
    if not kept:
        return None
    if len(kept) == 1:
        return kept[0][0]
    return _together(engine, Cat(tuple(p for p, _ in kept), tuple(w for _, w in kept), x.dim))


@structural("select")
def one_of_parts(engine: Engine, call: Call) -> Value | None:
    """One entry of a concatenation: of the part that it lies in."""
    x, index = call.args["self"], call.args["index"]
    if not isinstance(x, Cat) or not isinstance(index, int):
        return None
    if front(call.args["dim"], len(call.out.shape) + 1) != x.dim:
        return None
    index = index + sum(x.widths) if index < 0 else index
    for part, width in zip(x.parts, x.widths, strict=True):
        if index < width:
            found: Value = engine.apply(aten.select.int, part, x.dim, index)
            return found
        index -= width
    return None


@structural("sum", "mean")
def over_parts(engine: Engine, call: Call) -> Value | None:
    """A sum over a concatenation is the sum of its parts' sums."""
    x = call.args["self"]
    dims = call.args.get("dim")
    if not isinstance(x, Cat) or not dims or call.args.get("dtype") is not None:
        return None
    ndim = len(engine.shape(x))
    dims = [front(d, ndim) for d in dims]
    if x.dim not in dims:
        return None
    args = (dims, call.args["keepdim"])
    short = call.out.dtype if wide.is_short(engine, x) else None
    named = {"dtype": torch.float32} if short else {}
    sums = [engine.apply(aten.sum.dim_IntList, part, *args, **named) for part in x.parts]
    total = added(engine, sums)
    if call.packet is aten.mean:
        count = sum(x.widths)
        for d in dims:
            if d != x.dim:
                size = engine.shape(x)[d]
                if not isinstance(size, int):
                    return None
                count *= size
        total = engine.apply(aten.div.Tensor, total, count)
    if short:
        total = engine.apply(aten.to.dtype, total, short)
    engine.done = ("split", ())
    return total


@structural("linear")
def linear(engine: Engine, call: Call) -> Value | None:
    """One product a level, each on its own rows."""
    x, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if not isinstance(x, Cat) or x.dim != len(engine.shape(x)) - 1:
        return None

    def product(part: Value, columns: Value, added: Value | None) -> Value:
        return engine.apply(aten.linear.default, part, columns, added)  # type: ignore[no-any-return]

    return _split(engine, x, weight, 1, product, bias)


@structural("addmm")
def addmm(engine: Engine, call: Call) -> Value | None:
    """A product and what is added to it."""
    x, weight, bias = (call.args[name] for name in ("mat1", "mat2", "self"))
    if not isinstance(x, Cat):
        return None
    if wide.is_short(engine, x):
        if (call.args["alpha"], call.args["beta"], len(engine.shape(bias)), x.dim) != (1, 1, 1, 1):
            return None
        return _split(engine, x, weight, 0, None, bias)
    terms = [engine.apply(aten.mm.default, call.args["mat1"], call.args["mat2"]), call.args["self"]]
    for i, name in enumerate(("alpha", "beta")):
        if call.args[name] != 1:
            terms[i] = engine.apply(aten.mul.Tensor, terms[i], call.args[name])
    return added(engine, terms)


@structural("mm", "bmm", "matmul")
def matmul(engine: Engine, call: Call) -> Value | None:
    """A product over a concatenation's own dim, on either side: the linear compression is one."""
    a = call.args["self"]
    b = call.args["other"] if call.packet is aten.matmul else call.args["mat2"]
    ranks = [len(engine.shape(x)) for x in (a, b)]
    if min(ranks) < 2:
        return None

    def left(part: Value, rows: Value, bias: Value | None) -> Value:
        return engine.apply(call.target, part, rows)  # type: ignore[no-any-return]

    def right(part: Value, columns: Value, bias: Value | None) -> Value:
        return engine.apply(call.target, columns, part)  # type: ignore[no-any-return]

    if isinstance(a, Cat) and a.dim == ranks[0] - 1:
        return _split(engine, a, b, ranks[1] - 2, left)
    if isinstance(b, Cat) and b.dim == ranks[1] - 2:
        return _split(engine, b, a, ranks[0] - 1, right, of_rows=False)
    return None


def _split(
    engine: Engine,
    x: Cat,
    other: Value,
    dim: int,
    product: Any,
    bias: Value | None = None,
    *,
    of_rows: bool = True,
) -> Value | None:
    """The sum over lineages of `product(part of x, the range of other that meets it, bias)`.

    Args:
        engine: it.
        x: one factor.
        other: the other, and its `dim` that is summed over.
        dim: the other one is [N, K], or [K, N] if it is 0 and x is the first factor.
        product: of float32 or wider values; 16-bit ones go through `wide`.
        bias: of all, which the coarsest rows carry: they are fewest.
        of_rows: whether x is the first factor.
    """
    groups: dict[Any, list[tuple[Value, Value, int]]] = {}
    at = 0
    for part, width in zip(x.parts, x.widths, strict=True):
        met = engine.apply(aten.slice.Tensor, other, dim, at, at + width)
        key = ("cat", at) if isinstance(part, Cat) else path_of(part)
        groups.setdefault(key, []).append((part, met, at))
        at += width
    if len(groups) == 1:
        return None
    ordered = sorted(groups.values(), key=lambda g: -len(path_of(g[0][0])))
    pairs = []
    for group in ordered:
        part, met = group[0][0], group[0][1]
        if len(group) > 1:
            part = engine.apply(aten.cat.default, [p for p, _, _ in group], x.dim)
            met = _range(engine, other, dim, group)
        pairs.append((part, met))
    found: Value | None
    if wide.is_short(engine, x):
        if of_rows and dim == 0:
            pairs = [(part, engine.apply(aten.transpose.int, met, 0, 1)) for part, met in pairs]
        found = wide.summed(engine, pairs, left=of_rows, bias=bias)
        if found is None:
            return None
    else:
        biases = [bias, *[None] * (len(pairs) - 1)]
        products = [product(*pair, own) for pair, own in zip(pairs, biases, strict=True)]
        found = added(engine, products)
    engine.done = ("split", path_of(found))
    return found


def _range(engine: Engine, other: Value, dim: int, group: list[tuple[Value, Value, int]]) -> Value:
    """What meets the parts of a group: one view where they are neighbours."""
    at = [start for _, _, start in group]
    widths = [engine.shape(met)[dim] for _, met, _ in group]
    if all(a + w == b for a, w, b in zip(at, widths, at[1:], strict=False)):
        return engine.apply(aten.slice.Tensor, other, dim, at[0], at[-1] + widths[-1])  # type: ignore[no-any-return]
    return engine.apply(aten.cat.default, [met for _, met, _ in group], dim)  # type: ignore[no-any-return]


def added(engine: Engine, values: list[Value]) -> Value:
    """The sum, coarse first: each partial sum is gathered once, to the next finer level."""
    ordered = sorted(values, key=lambda v: -len(path_of(v)))
    total = ordered[0]
    for value in ordered[1:]:
        total = engine.apply(aten.add.Tensor, total, value)
    return total
