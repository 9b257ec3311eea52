"""Rules, continued: matrix products, normalisation, attention, look-ups (see `rowwise`)."""

from __future__ import annotations

import torch
from torch import fx

from ikbo_tree.rewriting.rowwise import Operand, RowCall, Rows, front, is_one, rank, rule
from ikbo_tree.rewriting.values import shape


@rule("linear")
def linear(call: RowCall) -> Rows | None:
    """X [..., K]: all but the last dim are rows."""
    x = call.only("input")
    return None if x is None or x.dim == rank(x) - 1 else Rows(x.dim, x.merged)


@rule("mm", "addmm")
def two_matrices(call: RowCall) -> Rows | None:
    """Rows of the first are rows of the result, columns of the second its columns."""
    left, right = ("mat1", "mat2") if "mat1" in call.args else ("self", "mat2")
    for name, dim in ((left, 0), (right, 1)):
        x = call.only(name)
        if x is not None and x.dim == dim:
            added = call.args.get("self") if name != "self" and left == "mat1" else None
            if isinstance(added, fx.Node):
                own = dim - (2 - rank(added))
                if own >= 0 and not is_one(shape(added)[own]):
                    return None
            return Rows(dim, x.merged)
    return None


@rule("matmul", "mv", "dot")
def matmul(call: RowCall) -> Rows | None:
    """numpy's: leading dims broadcast, the last two multiply."""
    a, b = call.args["self"], call.args.get("other", call.args.get("vec"))
    if b is None:
        return None
    ndim = len(call.out.shape)
    left, right = rank(a), rank(b)
    if isinstance(a, Operand) and not isinstance(b, Operand):
        if left >= 2 and a.dim == left - 2:
            return Rows(ndim - 1 if right == 1 else ndim - 2, a.merged)
    elif isinstance(b, Operand) and not isinstance(a, Operand) and b.dim == right - 1 > 0:
        return Rows(ndim - 1, b.merged)
    # Among the leading dims, which broadcast as in elementwise ops.
    leading = ndim - (left >= 2) - (right >= 2)
    places = set()
    for x, own in ((a, left), (b, right)):
        batch = max(own - 2, 0)
        if isinstance(x, Operand):
            if x.dim >= batch:
                return None
            places.add((leading - batch + x.dim, x.merged))
    if len(places) != 1:
        return None
    ((dim, merged),) = places
    for x, own in ((a, left), (b, right)):
        batch = max(own - 2, 0)
        at = dim - (leading - batch)
        if not isinstance(x, Operand) and at >= 0 and not is_one(shape(x)[at]):
            return None
    return Rows(dim, merged)


@rule("bmm", "baddbmm")
def batched(call: RowCall) -> Rows | None:
    """Dim 0 of all; or rows of the first and columns of the second, as in `mm`."""
    added = call.args["self"] if "batch1" in call.args else None
    names = ("self", "mat2") if added is None else ("batch1", "batch2")
    a, b = (call.args[n] for n in names)
    if any(isinstance(x, Operand) and rank(x) != 3 for x in (a, b, added)):
        return None
    if call.operands() in ([a], [b]) and added is None:
        alone = call.operands()[0]
        if alone.dim == (1 if alone is a else 2):
            return Rows(alone.dim, alone.merged)
    if not isinstance(a, Operand) or not isinstance(b, Operand) or a.dim or b.dim:
        return None
    if len({x.merged for x in call.operands()}) != 1:
        return None
    if isinstance(added, Operand) and added.dim:
        return None
    if isinstance(added, fx.Node) and rank(added) == 3 and not is_one(shape(added)[0]):
        return None
    return Rows(0, a.merged)


@rule("einsum")
def einsum(call: RowCall) -> Rows | None:
    """The rows' label is in the result, and nowhere but at the operands' rows."""
    equation = call.args["equation"].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.split("->")
    labels = left.split(",")
    tensors = call.args["tensors"]
    found = {
        (label[x.dim], x.merged)
        for label, x in zip(labels, tensors, strict=True)
        if isinstance(x, Operand)
    }
    if len(found) != 1:
        return None
    ((batch, merged),) = found
    for label, x in zip(labels, tensors, strict=True):
        expected = 1 if isinstance(x, Operand) else 0
        if label.count(batch) != expected:
            return None
    return Rows(result.index(batch), merged) if batch in result else None


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def normalised(call: RowCall) -> Rows | None:
    """Over the last dims."""
    x = call.only("input")
    if x is None or x.dim >= rank(x) - len(call.args["normalized_shape"]):
        return None
    many = isinstance(call.out, (tuple, list))
    return Rows((x.dim,) * len(call.out) if many else x.dim, x.merged)


@rule("batch_norm", "_native_batch_norm_legit_no_training")
def channels(call: RowCall) -> Rows | None:
    """In evaluation, by statistics of the channels, dim 1. Other outputs are empty then."""
    x = call.only("input")
    if x is None or x.dim == 1 or call.args.get("training", False):
        return None
    if isinstance(call.out, (tuple, list)):
        return Rows((x.dim, *(None for _ in call.out[1:])), x.merged)
    return Rows(x.dim, x.merged)


@rule("group_norm")
def groups(call: RowCall) -> Rows | None:
    """Dim 0 of [rows, channels, ...]."""
    x = call.only("input")
    return Rows(0, x.merged) if x is not None and x.dim == 0 else None


@rule("conv1d", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d")
def convolved(call: RowCall) -> Rows | None:
    """Dim 0 of [rows, channels, length]."""
    x = call.only("input" if "input" in call.args else "self")
    return Rows(0, x.merged) if x is not None and x.dim == 0 and rank(x) == 3 else None


@rule("embedding")
def embedding(call: RowCall) -> Rows | None:
    """Ids of any shape."""
    x = call.args["indices"]
    if call.operands() != [x]:
        return None
    return Rows(x.dim, x.merged)


@rule("index")
def indexed(call: RowCall) -> Rows | None:
    """Indices into other dims: those of the result stand where the first one stood, or in front.

    Or rows of one index into a tensor that is the same for all.
    """
    indices = call.args["indices"]
    used = [i for i, index in enumerate(indices) if index is not None]
    alone = indices[used[0]] if len(used) == 1 else None
    if isinstance(alone, Operand) and call.operands() == [alone]:
        return None if _is_bool(alone.node) else Rows(used[0] + alone.dim, alone.merged)
    x = call.only("self")
    if x is None:
        return None
    if not used or x.dim in used or any(_is_bool(indices[i]) for i in used):
        return None
    ndim = len(call.out.shape)
    inserted = ndim - (rank(x) - len(used))
    together = used == list(range(used[0], used[-1] + 1))
    start = used[0] if together else 0
    before = sum(1 for d in range(x.dim) if d not in used)
    return Rows(before if before < start else before + inserted, x.merged)


def _is_bool(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.bool, torch.uint8)


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "index_select")
def along(call: RowCall) -> Rows | None:
    """Along another dim, all operands' rows in the same one; or rows of an index alone."""
    operands = call.operands()
    alone = call.args.get("index")
    if operands == [alone] and set(call.args) == {"self", "dim", "index"}:
        # index_select; `gather` has a fourth argument.
        assert isinstance(alone, Operand)
        return Rows(front(call.args["dim"], rank(call.args["self"])), alone.merged)
    if any(rank(x) == 1 for x in operands):
        return None
    places = {(x.dim, x.merged) for x in operands}
    if len(places) != 1 or call.args.get("dim") is None:
        return None
    ((dim, merged),) = places
    if front(call.args["dim"], rank(operands[0])) == dim:
        return None
    if "src" in call.args and isinstance(call.args["src"], fx.Node):
        return None
    index = call.args.get("index", call.args.get("indices"))
    if isinstance(index, fx.Node) and rank(index) > 1:
        return None
    return Rows(dim, merged) if isinstance(call.args["self"], Operand) else None


@rule("scaled_dot_product_attention")
def attention(call: RowCall) -> Rows | None:
    """[..., length, width]: all dims but the last two, where other tensors have size 1."""
    ndim = len(call.out.shape)
    places = {(ndim - rank(x) + x.dim, x.merged) for x in call.operands()}
    if len(places) != 1 or call.args.get("dropout_p", 0.0) != 0.0:
        return None
    ((dim, merged),) = places
    if dim >= ndim - 2:
        return None
    for other in call.others():
        own = dim - (ndim - rank(other))
        if own >= 0 and not is_one(shape(other)[own]):
            return None
    return Rows(dim, merged)
