"""Device functions that reduce runs of rows, in an order fixed by each run's own rows.

Two reductions: `single` keeps one number for each column (a sum, a maximum, a minimum, how many
rows tie with an extreme), `exponential` a running maximum m, the sum of exp(x - m) and, weighted,
the sum of exp(x - m) g. `PLANES` tells them apart: how many numbers are kept, 1, 2 or 3.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import rows_at

LANES = tl.constexpr(32)
"""Slots that a program looks at together. Few stand for a piece of their own, and finding that out
takes three loads one after another: too long to give every slot a program."""


LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-8)
"""What float32 loses of log2(e)."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(x, FULL: tl.constexpr):
    """exp(x), for `FULL` to about 2 ulp of float32.

    GPUs have a fast exp2; the product x log2(e) that it is given is rounded, which costs |x| ulp:
    nothing to 16-bit values. `FULL` adds the rounding error back, which must not be infinite.
    """
    if FULL:
        x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 200.0, propagate_nan=tl.PropagateNan.ALL)
        high = x * LOG2E
        low = tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -high) + x * LOG2E_LOW
        power = tl.exp2(high)
        y = power + power * (low * LN2)
    else:
        y = tl.exp2(x * LOG2E)
    return y


@triton.jit
def finite(peak):
    """`peak`, and 0 where it is infinite, so that nothing is ever inf - inf."""
    return tl.where(tl.abs(peak) == float("inf"), 0.0, peak)


@triton.jit
def load_rows(ptr, rows, inside, cols, stride, other, WIDTH: tl.constexpr):
    """[S, R, C] float32: columns `cols` of `rows` [S, R]; `other` where not `inside`."""
    mask = inside[:, :, None] & (cols < WIDTH)[None, None, :]
    at = rows[:, :, None] * stride + cols[None, None, :]
    return tl.load(ptr + at, mask=mask, other=other).to(tl.float32)


@triton.jit
def piece_of(slot, index_ptr, offsets_ptr, order_ptr, segments, T: tl.constexpr, P: tl.constexpr):
    """The piece that sorted row `slot * T` stands for; of one slot, or of a tensor of them.

    Returns:
        Its segment, the segment's first sorted row, rows and first slot, and where the piece starts
        in the segment. It is one only if that is below the rows, which are 0 in short segments.
    """
    row = slot * T
    live = row < tl.load(offsets_ptr + segments)
    segment = tl.load(index_ptr + rows_at(order_ptr, row, live), mask=live, other=0)
    begin = tl.load(offsets_ptr + segment)
    length = tl.load(offsets_ptr + segment + 1) - begin
    first_slot = tl.cdiv(begin, T)
    length = tl.where(live & (length > T), length, 0)
    return segment, begin, length, first_slot, (slot - first_slot) * P


@triton.jit
def next_lane(wanted, after):
    """The first lane behind `after` that is wanted; LANES if none is."""
    lanes = tl.arange(0, LANES)
    return tl.min(tl.where(wanted & (lanes > after), lanes, LANES), axis=0)


@triton.jit
def short_segments(block, offsets_ptr, segments, S: tl.constexpr, T: tl.constexpr):
    """[S] segments of a block, their first sorted rows, their rows, and whether each is short.

    Segments that are long, or beyond the last, are given 0 rows.
    """
    segment = block * S + tl.arange(0, S)
    exists = segment < segments
    begin = tl.load(offsets_ptr + segment, mask=exists, other=0)
    length = tl.load(offsets_ptr + segment + 1, mask=exists, other=0) - begin
    mine = exists & (length <= T)
    return segment, begin, tl.where(mine, length, 0), mine


@triton.jit
def load_segments(ptr, segment, mine, cols, step, ALIGN: tl.constexpr, WIDTH: tl.constexpr):
    """[S, C] float32 rows at the coarse level, `step * ALIGN` elements apart; zeros outside."""
    at = segment.to(tl.int64)[:, None] * (step.to(tl.int64) * ALIGN) + cols[None, :]
    mask = mine[:, None] & (cols < WIDTH)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_segments(ptr, segment, mine, cols, value, WIDTH: tl.constexpr):
    """Writes [S, C] rows of a dense result at the coarse level, in its dtype."""
    at = segment.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    mask = mine[:, None] & (cols < WIDTH)[None, :]
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def fold_single(
    x_ptr,
    extreme,
    order_ptr,
    begin,
    length,
    cols,
    stride,
    OP: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[S, C] float32 sum, max, min or ties with `extreme` [S, C] of S runs of rows.

    Rows are spread over R lanes, lane l taking rows l, l + R, ...; the lanes are combined at the
    end. A lane that has no row adds zero to a sum that is never -0, which leaves its bits alone.
    """
    nothing: tl.constexpr = float("-inf") if OP == "max" else (float("inf") if OP == "min" else 0.0)
    total = tl.full([S, R, C], nothing, tl.float32)
    for start in range(0, tl.max(length, axis=0), R):
        at = start + tl.arange(0, R)
        inside = at[None, :] < length[:, None]
        rows = rows_at(order_ptr, begin[:, None] + at[None, :], inside)
        x = load_rows(x_ptr, rows, inside, cols, stride, nothing, WIDTH)
        if OP == "max":
            total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        elif OP == "min":
            total = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
        elif OP == "ties":
            total += (inside[:, :, None] & (x == extreme[:, None, :])).to(tl.float32)
        else:
            total += x
    if OP == "max" or OP == "min":
        # tl.max and tl.min pass NaN over.
        best = tl.max(total, axis=1) if OP == "max" else tl.min(total, axis=1)
        spoiled = tl.max((total != total).to(tl.int32), axis=1) > 0
        result = tl.where(spoiled, float("nan"), best)
    else:
        result = tl.sum(total, axis=1)
    return result


@triton.jit
def fold_exponential(
    x_ptr,
    g_ptr,
    order_ptr,
    begin,
    length,
    cols,
    x_stride,
    g_stride,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[S, C] float32 maximum m of S runs of rows, sum of e = exp(x - m), and sum of e g.

    An infinite m counts as 0 in the exponent, as in torch.logsumexp. Without `g_ptr` the last is 0.
    """
    FULL: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    peak = tl.full([S, C], float("-inf"), tl.float32)
    total = tl.zeros([S, C], tl.float32)
    weighted = tl.zeros([S, C], tl.float32)
    for start in range(0, tl.max(length, axis=0), R):
        at = start + tl.arange(0, R)
        inside = at[None, :] < length[:, None]
        rows = rows_at(order_ptr, begin[:, None] + at[None, :], inside)
        x = load_rows(x_ptr, rows, inside, cols, x_stride, float("-inf"), WIDTH)
        new = tl.maximum(peak, tl.max(x, axis=1))
        shrink = _shrink(peak, new)
        e = exponential(x - finite(new)[:, None, :], FULL)
        total = total * shrink + tl.sum(e, axis=1)
        if g_ptr is not None:
            g = load_rows(g_ptr, rows, inside, cols, g_stride, 0.0, WIDTH)
            weighted = weighted * shrink + tl.sum(e * g, axis=1)
        peak = new
    return peak, total, weighted


@triton.jit
def _shrink(old, new):
    # Nothing was summed under an `old` of -inf: no exp(0 - new), which may overflow, times zero.
    return tl.where(old == float("-inf"), 0.0, exponential(finite(old) - finite(new), True))


@triton.jit
def fold(
    x_ptr,
    g_ptr,
    extreme,
    order_ptr,
    begin,
    length,
    cols,
    x_stride,
    g_stride,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[S, C] float32 results of S runs of rows; those beyond `PLANES` repeat the first, or are 0.

    Args:
        x_ptr: rows, `x_stride` elements apart.
        g_ptr: weights, or None.
        extreme: [S, C] what `OP == "ties"` compares with, or None.
        order_ptr: row numbers of sorted rows, or None.
        begin: [S] first sorted row of each run.
        length: [S] rows of each run.
        cols: [C] columns.
        x_stride: int64.
        g_stride: int64.
        OP: for one plane, `"max"`, `"min"` or `"ties"`; anything else sums.
        PLANES: 1: `single`; 2 or 3: `exponential`.
        WIDTH: columns that exist.
        S: runs.
        R: rows of each that are read at once.
        C: columns.
    """
    if PLANES == 1:
        value = fold_single(
            x_ptr, extreme, order_ptr, begin, length, cols, x_stride, OP, WIDTH, S, R, C
        )
        folded = value, value, value
    else:
        folded = fold_exponential(
            x_ptr, g_ptr, order_ptr, begin, length, cols, x_stride, g_stride, WIDTH, S, R, C
        )
    return folded


@triton.jit
def combine_pieces(
    partial_ptr,
    plane,
    slot,
    pieces,
    cols,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[1, C] results of a segment from those of its pieces, which begin at `slot`."""
    if PLANES == 1:
        one = tl.zeros([1], tl.int32)
        PART: tl.constexpr = "sum" if OP == "ties" else OP
        value = fold_single(
            partial_ptr, None, None, one + slot, one + pieces, cols, WIDTH, PART, WIDTH, 1, R, C
        )
        combined = value, value, value
    else:
        combined = _combine_exponential(
            partial_ptr, plane, slot, pieces, cols, PLANES == 3, WIDTH, R, C
        )
    return combined


@triton.jit
def _combine_exponential(
    partial_ptr,
    plane,
    first,
    count,
    cols,
    WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[1, C] results of `fold_exponential` over a segment, from those over its pieces."""
    peak = tl.full([1, C], float("-inf"), tl.float32)
    total = tl.zeros([1, C], tl.float32)
    weighted = tl.zeros([1, C], tl.float32)
    for start in range(0, count, R):
        at = start + tl.arange(0, R)[None, :]
        inside = at < count
        rows = (first + at).to(tl.int64)
        m = load_rows(partial_ptr, rows, inside, cols, WIDTH, float("-inf"), WIDTH)
        z = load_rows(partial_ptr + plane, rows, inside, cols, WIDTH, 0.0, WIDTH)
        new = tl.maximum(peak, tl.max(m, axis=1))
        shrink = _shrink(peak, new)
        weight = _shrink(m, new[:, None, :])
        total = total * shrink + tl.sum(z * weight, axis=1)
        if WEIGHTED:
            d = load_rows(partial_ptr + 2 * plane, rows, inside, cols, WIDTH, 0.0, WIDTH)
            weighted = weighted * shrink + tl.sum(d * weight, axis=1)
        peak = new
    return peak, total, weighted


@triton.jit
def store_partial(
    partial_ptr, plane, slot, cols, a, b, c, PLANES: tl.constexpr, WIDTH: tl.constexpr
):
    """Writes up to three [1, C] results of a piece to their planes."""
    at = partial_ptr + slot.to(tl.int64) * WIDTH + cols[None, :]
    mask = (cols < WIDTH)[None, :]
    tl.store(at, a, mask=mask)
    if PLANES > 1:
        tl.store(at + plane, b, mask=mask)
    if PLANES > 2:
        tl.store(at + 2 * plane, c, mask=mask)
