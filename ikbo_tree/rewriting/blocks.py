"""Dot products of every two features of a concatenation, block by block.

Features of one level meet each other once a row of that level; those of two levels meet on the
finer one's rows. Blocks that are the transposes of others are not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Call, Engine, path_of, structural
from ikbo_tree.rewriting.values import Cat, Dense, Lazy, Value


@dataclass(frozen=True)
class _Side:
    """A factor's parts, those of equal lineage as one.

    Attributes:
        whole: the parts of each lineage, side by side.
        parts: the same one by one.
        runs: (lineage, start, stop) of neighbouring parts of one lineage, in the model's order.
    """

    whole: dict[Any, Value]
    parts: dict[Any, list[Value]]
    runs: list[tuple[Any, int, int]]


@structural("bmm", "matmul")
def dots(engine: Engine, call: Call) -> Value | None:
    """Rows of one concatenation by columns of another: [..., M, K] by [..., K, N]."""
    a = call.args["self"]
    b = call.args["other"] if call.packet is aten.matmul else call.args["mat2"]
    ndim = len(call.out.shape)
    if not isinstance(a, Cat) or not isinstance(b, Cat):
        return None
    if (a.dim, b.dim) != (ndim - 2, ndim - 1) or ndim < 3:
        return None
    rows, columns = _side(engine, a), _side(engine, b)
    if len(rows.whole) < 2 and len(columns.whole) < 2:
        return None
    blocks: dict[Any, Value] = {}
    for g, left in rows.whole.items():
        for h, right in columns.whole.items():
            if (h, g) in blocks and all(_turned(rows.parts, columns.parts, x) for x in (g, h)):
                blocks[g, h] = engine.apply(aten.transpose.int, blocks[h, g], -2, -1)
            else:
                blocks[g, h] = engine.apply(call.target, left, right)
    lines = []
    for g, start, stop in rows.runs:
        line = [
            (_cut(engine, blocks[g, h], (start, stop), (low, high)), high - low)
            for h, low, high in columns.runs
        ]
        lines.append((_side_by_side(line, ndim - 1), stop - start))
    found = _side_by_side(lines, ndim - 2)
    engine.done = ("split", path_of(found))
    return found


def _side(engine: Engine, x: Cat) -> _Side:
    """A part that is a concatenation by itself has no lineage but its own."""
    keys = [("cat", i) if isinstance(p, Cat) else path_of(p) for i, p in enumerate(x.parts)]
    parts: dict[Any, list[Value]] = {}
    starts: list[int] = []
    ends: dict[Any, int] = {}
    for key, part, width in zip(keys, x.parts, x.widths, strict=True):
        parts.setdefault(key, []).append(part)
        starts.append(ends.get(key, 0))
        ends[key] = starts[-1] + width
    whole = {
        key: own[0] if len(own) == 1 else engine.apply(aten.cat.default, own, x.dim)
        for key, own in parts.items()
    }
    runs = []
    places = zip(keys, starts, x.widths, strict=True)
    for key, run in groupby(places, key=lambda place: place[0]):
        found = list(run)
        runs.append((key, found[0][1], found[-1][1] + found[-1][2]))
    return _Side(whole, parts, runs)


def _turned(a: dict[Any, list[Value]], b: dict[Any, list[Value]], key: Any) -> bool:
    """Whether the second's parts are the first's, transposed."""
    if len(a.get(key, ())) != len(b.get(key, ())):
        return False
    for x, y in zip(a[key], b[key], strict=True):
        if not isinstance(x, (Dense, Lazy)) or not isinstance(y, (Dense, Lazy)):
            return False
        if y.node.target is not aten.transpose.int or y.node.args[0] is not x.node:
            return False
        ndim = len(x.node.meta["val"].shape)
        if {int(d) % ndim for d in y.node.args[1:]} != {ndim - 2, ndim - 1}:  # type: ignore[arg-type]
            return False
    return True


def _cut(engine: Engine, x: Value, rows: tuple[int, int], columns: tuple[int, int]) -> Value:
    """A range of a block."""
    for dim, (start, stop) in ((-2, rows), (-1, columns)):
        if (start, stop) != (0, engine.shape(x)[dim]):
            x = engine.apply(aten.slice.Tensor, x, dim, start, stop)
    return x


def _side_by_side(parts: list[tuple[Value, int]], dim: int) -> Value:
    if len(parts) == 1:
        return parts[0][0]
    return Cat(tuple(x for x, _ in parts), tuple(n for _, n in parts), dim)
