"""Split products of 16-bit values, by the ops that hand float32 from level to level.

Products that are split into ordinary ones would be rounded to 16 bits before they meet: an error
that the model does not have. `ikbo_tree.linear` and `linear_compression` keep partial results in
float32 and round once. What they cannot take is not split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Engine
from ikbo_tree.rewriting.values import ALONE, Cat, Dense, Lazy, Path, Value, common, shape

SHORT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Stage:
    """Rows of one level, what they are multiplied with, and the maps that lead to them."""

    x: fx.Node
    weight: fx.Node
    path: Path


def is_short(engine: Engine, value: Value) -> bool:
    """Whether partial sums of such values need more bits than they have."""
    return engine.like(value).dtype in SHORT


def summed(
    engine: Engine, pairs: list[tuple[Value, Value]], *, left: bool, bias: Value | None
) -> Value | None:
    """The sum over levels of products, rounded once; None where no op takes them.

    Args:
        engine: it.
        pairs: (part [rows, ..., K], weight [N, K]), or, unless `left`, (part [rows, K, N], weight
            [M, K]) whose product is weight @ part.
        left: whether rows are multiplied from the right.
        bias: [N] or None.
    """
    stages = [_stage(engine, part, weight) for part, weight in pairs]
    ndim = len(engine.shape(pairs[0][0]))
    if not all(stages) or (not left and (ndim != 3 or bias is not None)):
        return None
    added = engine.plain(bias) if bias is not None else None
    if added is not None and not isinstance(added, Dense):
        return None
    found = [s for s in stages if s is not None]
    near = common([s.path for s in found])
    if left and ndim == 2:
        node = _emit(engine, found, near, None, [added.node if added else None])
    else:
        node = _compressed(engine, found, near, left, added.node if added else None)
    return Lazy(node, near, 0) if near else Dense(node)


def _stage(engine: Engine, part: Value, weight: Value) -> _Stage | None:
    x, w = engine.plain(part), engine.plain(weight)
    if isinstance(x, Cat) or not isinstance(w, Dense) or len(shape(w.node)) != 2:
        return None
    if isinstance(x, Lazy) and (x.dim, x.merged) != (0, ALONE):
        return None
    if x.node.meta["val"].dtype != w.node.meta["val"].dtype:
        return None
    return _Stage(x.node, w.node, x.path if isinstance(x, Lazy) else ())


def _compressed(
    engine: Engine, stages: list[_Stage], near: Path, left: bool, bias: fx.Node | None
) -> fx.Node:
    """By `linear_compression`, of [rows, K, what lies between]; `left` operands are turned."""
    call, size = engine.build.call, engine.build.size
    if not left:
        return _emit(engine, stages, near, None, [])
    x = stages[0].x
    between = [size(x, d) for d in range(1, len(shape(x)) - 1)]
    turned = []
    for stage in stages:
        flat = stage.x
        if len(between) > 1:
            flat = call(aten.flatten.using_ints, flat, 1, len(between))
        turned.append(_Stage(call(aten.transpose.int, flat, 1, 2), stage.weight, stage.path))
    out = call(aten.transpose.int, _emit(engine, turned, near, bias, []), 1, 2)
    if len(between) == 1:
        return out
    return call(aten.reshape.default, out, [-1, *between, size(out, 2)])


def _emit(
    engine: Engine, stages: list[_Stage], near: Path, one_row: fx.Node | None, bias: list[Any]
) -> fx.Node:
    """The call, coarse levels first; the last one is `near`, where the result is.

    Args:
        engine: it.
        stages: in any order, one a path.
        near: path of the result.
        one_row: [N] to be added to each row: by a table of a single row, all ones.
        bias: the op's argument of that name, if it has one.
    """
    build, call = engine.build, engine.build.call
    ordered = sorted(stages, key=lambda s: -len(s.path))
    if ordered[-1].path != near:
        ordered.append(_empty(engine, ordered[0], near))
    consumer, maps = [], []
    for i, stage in enumerate(ordered[:-1]):
        below = max(
            (j for j in range(i + 1, len(ordered)) if _begins(ordered[j].path, stage.path)),
            key=lambda j: len(ordered[j].path),
        )
        far = stage.path[len(ordered[below].path) :]
        step = engine.merged(far, build.size(stage.x, 0))
        consumer.append(below)
        maps.append((build.int32(step.index), step.offsets, step.order))
    x, weight = [s.x for s in ordered], [s.weight for s in ordered]
    live = _live(engine, ordered)
    if one_row is not None:
        value, rows = x[0].meta["val"], build.size(x[0], 0)
        integers = {"dtype": torch.int32, "device": value.device}
        ones = [1, 1, build.size(x[0], 2)]
        if live:
            live.insert(0, call(aten.ones.default, [1], **integers))
        x.insert(0, call(aten.ones.default, ones, dtype=value.dtype, device=value.device))
        weight.insert(0, call(aten.unsqueeze.default, one_row, 1))
        end = call(aten.full.default, [1], rows, **integers)
        offsets = call(aten.constant_pad_nd.default, end, [1, 0])
        consumer = [1, *(c + 1 for c in consumer)]
        maps.insert(0, (call(aten.zeros.default, [rows], **integers), offsets, None))
    index, offsets_of, order = (list(m) for m in zip(*maps, strict=True))
    op = torch.ops.ikbo_tree.linear if bias else torch.ops.ikbo_tree.linear_compression
    rest: tuple[Any, ...] = (consumer, index, offsets_of, order, live, None, "auto")
    return call(op.default, x, weight, *bias, *rest)


def _live(engine: Engine, ordered: list[_Stage]) -> list[fx.Node]:
    """Live counts of all stages' rows; none where every row is live."""
    if not engine.live:
        return []
    fine = ordered[0].path[0].fine
    found = []
    for stage in ordered:
        level = stage.path[-1].coarse if stage.path else fine
        rows = engine.build.size(stage.x, 0)
        options = {"dtype": torch.int32, "device": stage.x.meta["val"].device}
        known = engine.live.get(level)
        found.append(known or engine.build.call(aten.full.default, [1], rows, **options))
    return found


def _begins(start: Path, path: Path) -> bool:
    return path[: len(start)] == start


def _empty(engine: Engine, like: _Stage, near: Path) -> _Stage:
    """No columns on the rows of `near`, where none of the parts has its rows."""
    call, size = engine.build.call, engine.build.size
    rows = size(like.path[len(near)].index, 0)
    value, width = like.x.meta["val"], size(like.weight, 0)
    options = {"dtype": value.dtype, "device": value.device}
    tail = [size(like.x, 2)] if len(shape(like.x)) == 3 else []
    x = call(aten.zeros.default, [rows, 0, *tail], **options)
    return _Stage(x, call(aten.zeros.default, [width, 0], **options), near)
