"""Where lazy values come from: gathers along maps that were declared to be broadcasts."""

from __future__ import annotations

from ikbo_tree.rewriting.engine import Call, Engine, structural
from ikbo_tree.rewriting.rowwise import front
from ikbo_tree.rewriting.values import ALONE, Dense, Index, Lazy, Path, Value


def gathered(engine: Engine, value: Value, path: Path, dim: int) -> Value | None:
    """`value` along a path: longer by it, if it is lazy in that dim already."""
    plain = engine.plain(value)
    if not engine.reduces(path + (plain.path if isinstance(plain, Lazy) else ())):
        engine.done = ("left", path)
        return None
    if isinstance(plain, Dense):
        engine.done = ("gathered", path)
        return Lazy(plain.node, path, dim)
    if isinstance(plain, Lazy) and plain.dim == dim and plain.merged == ALONE:
        engine.done = ("gathered", path)
        return Lazy(plain.node, path + plain.path, dim)
    return None


@structural("index_select")
def index_select(engine: Engine, call: Call) -> Value | None:
    """x.index_select(dim, map)."""
    index = call.args["index"]
    if not isinstance(index, Index):
        return None
    return _gathered_map(engine, call.args["self"], index, call.args["dim"])


@structural("index")
def index(engine: Engine, call: Call) -> Value | None:
    """x[map], x[:, map]."""
    indices = call.args["indices"]
    used = [i for i, x in enumerate(indices) if x is not None]
    if len(used) != 1 or not isinstance(indices[used[0]], Index):
        return None
    return _gathered_map(engine, call.args["self"], indices[used[0]], used[0])


@structural("embedding")
def embedding(engine: Engine, call: Call) -> Value | None:
    """F.embedding(map, x)."""
    if not isinstance(call.args["indices"], Index):
        return None
    return _gathered_map(engine, call.args["weight"], call.args["indices"], 0)


def _gathered_map(engine: Engine, x: Value, index: Index, dim: int) -> Value | None:
    if isinstance(x, Index):
        # A map read through a map is the composed map.
        return Index(index.path + x.path, x.dtype)
    return gathered(engine, x, index.path, front(dim, len(engine.shape(x))))


@structural("to", "_to_copy", "clone", "contiguous", "alias", "detach", "lift_fresh_copy")
def same_map(engine: Engine, call: Call) -> Value | None:
    """A map in another integer dtype is the same map."""
    x = call.args["self"]
    if not isinstance(x, Index) or call.out.is_floating_point():
        return None
    return Index(x.path, call.out.dtype)


@structural("view", "reshape", "flatten", "_unsafe_view")
def flat_map(engine: Engine, call: Call) -> Value | None:
    """A map that is flattened is the same map."""
    x = call.args["self"]
    return x if isinstance(x, Index) and call.out.dim() == 1 and "size" in call.args else None


@structural("repeat_interleave")
def repeat_interleave(engine: Engine, call: Call) -> Value | None:
    """Of a tensor by declared counts, or of the row numbers."""
    counts = call.args["repeats"]
    if not isinstance(counts, Dense) or counts.node not in engine.counts:
        return None
    step = engine.counts[counts.node]
    if "self" not in call.args:
        return Index((step,))
    if call.args["dim"] is None:
        return None
    dim = front(call.args["dim"], len(engine.shape(call.args["self"])))
    return gathered(engine, call.args["self"], (step,), dim)
