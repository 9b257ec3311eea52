"""Embedding bags of coarse rows: `F.embedding_bag(ids [rows, length], table)`."""

from __future__ import annotations

import operator

from torch import fx

from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Call, Engine, structural
from ikbo_tree.rewriting.lookups import referenced
from ikbo_tree.rewriting.rowwise import Operand
from ikbo_tree.rewriting.values import Dense, Lazy, Merged, Value, shape


@structural("embedding_bag")
def embedding_bag(engine: Engine, call: Call) -> tuple[Value | None, ...] | None:
    """Torch makes it one bag a run of flat ids, `offsets = arange(0, rows * length, length)`."""
    ids, starts = call.args["indices"], call.args["offsets"]
    if not isinstance(ids, Lazy) or ids.dim != 0 or not isinstance(starts, Dense):
        return None
    length = ids.merged.inner
    weights = call.args["per_sample_weights"]
    if ids.merged != Merged(1, length) or weights is not None or call.args["include_last_offset"]:
        return None
    if not isinstance(call.args["weight"], Dense) or not _every(starts.node, length, engine, ids):
        return None
    build = engine.build
    known = referenced(build, engine.whole(ids.path), Operand(ids.node, 0, ids.merged)).node
    total = build.size(ids.node, 0)
    node = build.call(aten.arange.start_step, 0, total, length, device=ids.node.meta["val"].device)
    args = {
        name: x.node if isinstance(x, Dense) else x
        for name, x in call.args.items()
        if name not in ("indices", "offsets")
    }
    bags = engine.emit(call.target, {**args, "indices": known, "offsets": node})
    found = build.call(operator.getitem, bags, 0)
    engine.done = ("sunk", ids.path)
    return (Lazy(found, ids.path, 0), None, None, None)


def _every(starts: fx.Node, length: int, engine: Engine, ids: Lazy) -> bool:
    """Whether bags start at every `length`-th id."""
    if starts.target is not aten.arange.start_step or starts.args[0] != 0:
        return False
    step = starts.args[2] if len(starts.args) > 2 else 1
    bags = shape(starts)[0]
    rows = engine.shape(ids)[0]
    return bool(step == length) and bool(bags * length == rows)
