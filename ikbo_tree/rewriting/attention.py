"""scaled_dot_product_attention with keys and values of coarser levels: `target_attention`.

The query rows below one coarse row share its keys and values, which stay where they are. Keys that
were concatenated from several levels become several memories in one softmax. A mask that is the
same for all queries of a row becomes the memory's mask or bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Call, Engine, structural
from ikbo_tree.rewriting.values import ALONE, Cat, Dense, Lazy, Path, Value, shape


@dataclass(frozen=True)
class _Part:
    """Keys and values of one level: nodes [its rows, heads, keys, width], and its path."""

    k: fx.Node
    v: fx.Node
    path: Path
    mask: fx.Node | None


@structural("scaled_dot_product_attention")
def target_attention(engine: Engine, call: Call) -> Value | None:
    """[rows, heads, queries, width] over [coarse rows, key heads, keys, width], any levels."""
    q, k, v = (engine.plain(call.args[name]) for name in ("query", "key", "value"))
    if call.args["is_causal"] or call.args["dropout_p"] != 0.0 or isinstance(q, Cat):
        return None
    if len(call.out.shape) == 3:
        return _without_heads(engine, call)
    near: Path = q.path if isinstance(q, Lazy) else ()
    if not _rows_first(q):
        return None
    parts = []
    for part, own, mask in _parts(engine, k, v, call.args["attn_mask"]):
        found = _part(engine, part, own, mask, near, shape(q.node)[1])
        if found is None:
            return None
        parts.append(found)
    if not parts or all(len(part.path) == len(near) for part in parts):
        return None
    heads, key_heads = shape(q.node)[1], shape(parts[0].k)[1]
    if heads != key_heads and not call.args["enable_gqa"]:
        return None
    o = _emit(engine, q.node, parts, near, call.args["scale"])
    engine.done = ("replaced", max((p.path for p in parts), key=len))
    return Lazy(o, near, 0) if near else Dense(o)


def _without_heads(engine: Engine, call: Call) -> Value | None:
    """[rows, queries, width], by one head."""

    def one_head(x: Value | None) -> Any:
        return None if x is None else engine.apply(aten.unsqueeze.default, x, -3)

    mask = call.args["attn_mask"]
    if mask is not None and len(engine.shape(mask)) != 3:
        return None
    names = ("query", "key", "value")
    if any(len(engine.shape(call.args[name])) != 3 for name in names):
        return None
    args = {name: one_head(call.args[name]) for name in (*names, "attn_mask")}
    out = engine.like(args["query"])
    found = target_attention(engine, replace(call, args={**call.args, **args}, out=out))
    if found is None:
        return None
    done = engine.done
    found = engine.apply(aten.select.int, found, 1, 0)
    engine.done = done
    return found  # type: ignore[no-any-return]


def _rows_first(value: Value) -> bool:
    if isinstance(value, Lazy) and (value.dim, value.merged) != (0, ALONE):
        return False
    return isinstance(value, (Dense, Lazy)) and len(shape(value.node)) == 4


def _parts(engine: Engine, k: Value, v: Value, mask: Value | None) -> list[tuple[Any, Any, Any]]:
    """Keys, values and mask of each level; none where they do not fit."""
    if not isinstance(k, Cat):
        return [(k, v, mask)]
    if not isinstance(v, Cat) or (k.dim, v.dim) != (2, 2) or k.widths != v.widths:
        return []
    found, at = [], 0
    for key, own, width in zip(k.parts, v.parts, k.widths, strict=True):
        part = mask
        if mask is not None and engine.shape(mask)[-1] != 1:
            part = engine.apply(aten.slice.Tensor, mask, -1, at, at + width)
        found.append((key, own, part))
        at += width
    return found


def _part(
    engine: Engine, k: Value, v: Value, mask: Value | None, near: Path, heads: Any
) -> _Part | None:
    if not (_rows_first(k) and _rows_first(v)):
        return None
    assert isinstance(k, (Dense, Lazy))
    assert isinstance(v, (Dense, Lazy))
    path = k.path if isinstance(k, Lazy) else ()
    if path != (v.path if isinstance(v, Lazy) else ()) or path[: len(near)] != near:
        return None
    row: fx.Node | None = None
    if mask is not None:
        row = _mask_row(engine, mask, path, shape(k.node)[2], heads)
        if row is None:
            return None
    return _Part(k.node, v.node, path, row)


def _mask_row(engine: Engine, mask: Value, path: Path, keys: Any, heads: Any) -> fx.Node | None:
    """The mask on the rows of a path, as memories have it: [rows, keys(, heads)]."""
    plain = engine.plain(mask)
    sizes = engine.shape(plain)
    if isinstance(plain, Cat) or len(sizes) != 4 or sizes[2] != 1 or sizes[3] != keys:
        return None
    if isinstance(plain, Lazy):
        if plain.dim != 0 or plain.merged != ALONE:
            return None
        if plain.path[: len(path)] != path:
            return None
        node = engine.at(plain, len(path)).node if path else engine.dense(plain)
    elif path:
        return None
    else:
        node = plain.node
    call: Callable[..., fx.Node] = engine.build.call
    row = call(aten.select.int, node, 2, 0)
    if sizes[1] == 1:
        return call(aten.select.int, row, 1, 0)
    if sizes[1] == heads and row.meta["val"].dtype != torch.bool:
        return call(aten.transpose.int, row, 1, 2)
    return None


def _emit(
    engine: Engine, q: fx.Node, parts: list[_Part], near: Path, scale: float | None
) -> fx.Node:
    call = engine.build.call
    steps = []
    for part in parts:
        far = part.path[len(near) :]
        steps.append(engine.merged(far, engine.build.size(part.k, 0)) if far else None)
    masks = [p.mask for p in parts]
    boolean = [m is not None and m.meta["val"].dtype == torch.bool for m in masks]
    biases = [i for i, m in enumerate(masks) if m is not None and not boolean[i]]
    live = next((s.live for s in steps if s is not None and s.live is not None), None)
    o = call(
        torch.ops.ikbo_tree.target_attention.default,
        call(aten.transpose.int, q, 1, 2),
        [call(aten.transpose.int, p.k, 1, 2) for p in parts],
        [call(aten.transpose.int, p.v, 1, 2) for p in parts],
        [masks[i] for i in biases],
        biases,
        [None] * len(parts),
        [m if b else None for m, b in zip(masks, boolean, strict=True)],
        [None if s is None else engine.build.int32(s.index) for s in steps],
        [None if s is None else s.offsets for s in steps],
        [None if s is None else s.order for s in steps],
        live[0] if live else None,
        float(shape(q)[3]) ** -0.5 if scale is None else scale,
        "auto",
    )
    outputs = engine.build.outputs(o)
    assert isinstance(outputs, tuple)
    return call(aten.transpose.int, outputs[0], 1, 2)
