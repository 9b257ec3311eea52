"""Pooling of histories: the entries that a row owns, padded or packed, to one value a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.kernels.target_attention.op import target_attention as _target_attention
from ikbo_tree.ops.checks import check_float, in_force
from ikbo_tree.ops.crossing import on_host, widened
from ikbo_tree.ops.histories import Largest, Owned, Sum, Weighed
from ikbo_tree.ops.memories import Memory, checked_lengths, checked_offsets, shape_of
from ikbo_tree.tree import BroadcastTree

OPS = ("mean", "sum", "max")


def pool(
    x: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    op: str = "mean",
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mean, sum or maximum of each row's history, at the history's own level.

    Padded: x [rows, S, ...], of which row c owns `x[c, :lengths[c]]`. Packed: x [total, ...], of
    which it owns `x[offsets[c]:offsets[c + 1]]`; offsets need not begin at 0, nor end where x does.
    Entries that no row owns never count: NaN there is harmless, and their gradient is zero.

    Args:
        x: [rows, S, ...] or [total, ...], a float dtype; elementwise over the trailing dims.
        tree: the tree.
        level: the level or table whose rows own the histories.
        op: `"mean"`, `"sum"` or `"max"`. NaN wins every max; ties share the gradient evenly.
        lengths: [rows], any integer dtype, if padded; None: every row owns S.
        offsets: [rows + 1], any integer dtype, if packed. Checked like those of `Memory`.
        impl: of the tree op inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of `level`, ...] in `x`'s dtype; sums are taken in float32 (float64 for float64), in a
        fixed order, and rounded once. A row that owns nothing gets 0 for mean and sum, -inf for
        max, and no gradient passes there. Dead rows are zero. Mean and sum are differentiable any
        number of times, max once.

    Raises:
        TreeError: an unknown name; shapes, rows, values or devices that do not fit; 2^31 entries.
        TypeError: `x` is of no float dtype, lengths or offsets are no integers.
        ValueError: no such op.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> history = torch.tensor([[1.0, 3.0], [5.0, torch.nan]])
    >>> pool(history, tree=tree, level="user", lengths=torch.tensor([2, 1]))
    tensor([2., 5.])
    """
    checked_name(impl)
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    check_float("x", x)
    packed = _check_history(x, tree, level, lengths, offsets)
    live = tree.live(level)
    if packed:
        bounds = checked_offsets("offsets", Memory(level, x, x, offsets=offsets), tree)
        if _in_place(x, impl) and op != "max":
            owned = Owned.packed(bounds, x.shape[0], tree.rows(level))
            found: Tensor = Sum.apply(x, owned, op == "mean")  # type: ignore[no-untyped-call]
            return found
        # What lies before the first offset is one more segment, of which nothing is kept.
        route = _packed_route(bounds, x.shape[0], live)
    else:
        rows, size = x.shape[:2]
        extent = checked_lengths("lengths", Memory(level, x, x, lengths=lengths), tree)
        if _in_place(x, impl) and size:
            owned = Owned.padded(extent, rows, size, tree.rows(level))
            return zero_dead_rows(_pooled_padded(x, owned, op), live)
        if extent is None:
            extent = torch.full((rows,), size, dtype=torch.int32, device=x.device)
        # Each row has two segments, what it owns and what it does not.
        route = _padded_route(extent, size, live)
        x = x.flatten(0, 1)
    if op == "max":
        mask = route.index > 0 if packed else route.index % 2 == 0
        # The gradient of a segment's NaN is NaN, even where nothing of the segment is kept.
        x = torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, x.new_zeros(()))
    out: Tensor = _reduce(x, *route, op, impl)
    pooled: Tensor = out[1:] if packed else out.unflatten(0, (rows, 2))[:, 0]
    return pooled


def attention_pool(
    x: Tensor,
    scores: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mean of each row's history weighed by a softmax of scores, at the history's own level.

    The scores come from whatever the model scores entries with: a vector (`x @ w`) or a small
    network. Where finer rows do it, as a target item does in DIN, that is `target_attention`.

    Args:
        x: [rows, S, D], or with heads [rows, S, H, D]; packed [total, D] or [total, H, D]. See
            `pool` for who owns what.
        scores: `x`'s shape less D, a float dtype, in units of the natural logarithm; -inf leaves an
            entry out.
        tree: the tree.
        level: the level or table whose rows own the histories.
        lengths: [rows], if padded; None: every row owns S.
        offsets: [rows + 1], if packed.
        impl: of the attention inside, `"auto"`, `"reference"`, `"torch"`, ... An eager program on a
            CPU has plain products in place of it; on CUDA `"torch"` waits for the device, as in
            `target_attention`.

    Returns:
        [rows of `level`, D], or with heads [rows, H, D], in `x`'s dtype, computed in float32
        (float64 for float64). A row that owns nothing gets 0 and zero gradients. Dead rows are
        zero. Differentiable once, by x and scores.

    Raises:
        TreeError: an unknown name; shapes, rows, values or devices that do not fit.
        TypeError: `x` or `scores` is of no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> history = torch.tensor([[[1.0], [3.0]], [[5.0], [torch.nan]]])
    >>> lengths = torch.tensor([2, 1])
    >>> attention_pool(history, torch.zeros(2, 2), tree=tree, level="user", lengths=lengths)
    tensor([[2.],
            [5.]])
    """
    checked_name(impl)
    check_float("x", x)
    check_float("scores", scores)
    packed = _check_history(x, tree, level, lengths, offsets)
    entries = 1 if packed else 2
    if x.dim() - entries not in (1, 2):
        rule = "must have shape [rows, S, D] or [rows, S, H, D], or packed [total, ...]"
        raise TreeError("x", rule, shape_of(x))
    if scores.shape != x.shape[:-1]:
        raise TreeError("scores", f"must have shape {tuple(x.shape[:-1])}", shape_of(scores))
    one_head = x.dim() - entries == 1
    if one_head:
        x, scores = x.unsqueeze(-2), scores.unsqueeze(-1)
    # Attention whose scores are all bias: queries and keys are zeros that take no memory.
    q = x.new_zeros(()).expand(tree.capacity(level), 1, x.shape[-2], 1)
    k = x.new_zeros(()).expand(*x.shape[:-1], 1)
    memory = Memory(level, k, x, lengths, offsets)
    check = checked_offsets if packed else checked_lengths
    extent = check("offsets" if packed else "lengths", memory, tree)
    if _in_place(x, impl):
        live = tree.rows(level)
        if packed:
            assert extent is not None
            owned = Owned.packed(extent, x.shape[0], live)
        else:
            owned = Owned.padded(extent, x.shape[0], x.shape[1], live)
            x, scores = x.flatten(0, 1), scores.flatten(0, 1)
        weighed: Tensor = Weighed.apply(x, scores, owned)[0]  # type: ignore[no-untyped-call]
        return weighed[:, 0] if one_head else weighed
    own = ([None],) * 4  # neither mask nor maps: rows attend to what they own themselves
    arguments = (q, [k], [x], [scores], [0], [extent], *own, tree.live(level), 1.0, impl)
    pooled: Tensor = _target_attention(*arguments)[0][:, 0]
    return pooled[:, 0] if one_head else pooled


def _pooled_padded(x: Tensor, owned: Owned, op: str) -> Tensor:
    if owned.mask is None and op != "max":
        wide = widened(x[:0]).dtype
        return (x.mean(1, dtype=wide) if op == "mean" else x.sum(1, dtype=wide)).to(x.dtype)
    found: Tensor
    if op == "max":
        found = Largest.apply(x, owned)  # type: ignore[no-untyped-call]
        return found
    found = Sum.apply(x.flatten(0, 1), owned, op == "mean")  # type: ignore[no-untyped-call]
    return found


def _in_place(x: Tensor, impl: str) -> bool:
    """Whether the paths of `histories` may be taken."""
    return on_host(x) and in_force(impl) in ("auto", "torch")


def _check_history(
    x: Tensor, tree: BroadcastTree, level: str, lengths: Tensor | None, offsets: Tensor | None
) -> bool:
    """Whether the history is packed; raises where its shape does not fit."""
    packed = offsets is not None
    if lengths is not None and packed:
        raise TreeError("lengths", "must not come with offsets", shape_of(lengths))
    if x.dim() < (1 if packed else 2):
        rule = "must have shape [total, ...]" if packed else "must have shape [rows, S, ...]"
        raise TreeError("x", f"{rule}, {'with' if packed else 'without'} offsets", shape_of(x))
    capacity = tree.capacity(level)
    if not packed:
        tree.check("x", x, level)
    elif x.device != tree.device:
        raise TreeError("x", f"must be on the tree's device {tree.device}", str(x.device))
    entries = x.shape[0] if packed else capacity * x.shape[1]
    if entries >= 2**31:
        raise TreeError("x", "must have less than 2^31 entries", str(entries))
    return packed


def _packed_route(bounds: Tensor, total: int, live: Tensor | None) -> Route:
    """From entries to rows + 1 segments; the first has what lies before the first row's entries."""
    bounds = bounds.clamp(0, total)
    if live is not None:
        dead = torch.arange(bounds.shape[0], device=bounds.device) > live
        bounds = torch.where(dead, bounds.index_select(0, live), bounds)
    # A decreasing pair, which only a CPU refuses, owns nothing.
    bounds = bounds.cummax(0).values.to(torch.int32)
    entries = torch.arange(total, dtype=torch.int32, device=bounds.device)
    end = bounds[-1:]
    index = torch.searchsorted(bounds, entries, right=True, out_int32=True)
    return Route(
        index.masked_fill(entries >= end, 0),
        torch.cat([bounds.new_zeros(1), bounds]),
        None,
        end,
        None if live is None else live + 1,
    )


def _padded_route(lengths: Tensor, size: int, live: Tensor | None) -> Route:
    """From entries, `size` a row, to two segments a row: what it owns and what it does not."""
    rows = lengths.shape[0]
    lengths = lengths.clamp(0, size).to(torch.int32).unsqueeze(1)
    row = torch.arange(rows, dtype=torch.int32, device=lengths.device).unsqueeze(1)
    entry = torch.arange(size, dtype=torch.int32, device=lengths.device)
    index = (2 * row + (entry >= lengths)).flatten()
    ends = torch.cat([row * size + lengths, (row + 1) * size], dim=1).flatten()
    offsets = torch.cat([ends.new_zeros(1), ends])
    if live is None:
        return Route(index, offsets)
    end = live * size
    dead = torch.arange(index.shape[0], device=index.device) >= end
    return Route(index.masked_fill(dead, 0), torch.minimum(offsets, end), None, end, live * 2)
