"""What the gradient kernels of keys and values are made of: items, pieces, sums over query rows."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.common.triton_tiles import find_segment, find_tile
from ikbo_tree.kernels.target_attention.triton_device import (
    LOG2E,
    NOTHING,
    flat_rows,
    key_span,
    load_rows,
    store_rows,
)


@triton.jit
def find_keys(
    extent_ptr,
    offsets_ptr,
    live_ptr,
    owners_live_ptr,
    size,
    rows,
    owners,
    tile,
    PACKED: tl.constexpr,
    SELF: tl.constexpr,
    N: tl.constexpr,
):
    """Which keys a tile has.

    Extents of dead rows may be anything. SELF: `owners_live_ptr` says which are live. Otherwise the
    last row that has query rows below it does; those behind it have no gradients.

    Returns:
        The row that owns them (`owners`: nobody), and the first one's number there.
    """
    if PACKED:
        if SELF:
            known = live_rows(owners_live_ptr, owners)
        elif offsets_ptr is None:
            known = tl.minimum(live_rows(live_ptr, rows), owners)
        else:
            last = tl.load(offsets_ptr + owners) - 1
            known = tl.where(last < 0, 0, find_segment(offsets_ptr, owners, last) + 1)
        owner, first, _ = find_tile(extent_ptr, known, size, tile, 1, N)
        low = first - tl.load(extent_ptr + owner).to(tl.int64)
        owner = tl.where((owner < known) & (low >= 0), owner, owners)
    else:
        each = tl.cdiv(size, N)
        owner = tile // each
        low = (tile - owner * each).to(tl.int64) * N
    return owner, low.to(tl.int32)


@triton.jit
def own_rows(memory, size, live_ptr, owners, tile, T: tl.constexpr):
    """`find_rows` of queries that belong to a memory's own rows, one an entry."""
    owner, low = find_keys(
        memory[4], None, None, live_ptr, size, 0, owners, tile, memory[7] is None, True, T
    )
    live = owner < live_rows(live_ptr, owners)
    start, length = key_span(memory[4], size, tl.where(live, owner, 0), memory[7] is None)
    return tl.where(live, owner, owners), start, low, tl.where(live, length, 0)


@triton.jit
def find_queries(offsets_ptr, live_ptr, rows, owner, n_seed):
    """First position and number of folded query rows of a segment."""
    if offsets_ptr is None:
        begin = owner
        count = tl.where(owner < live_rows(live_ptr, rows), n_seed, 0)
    else:
        begin = tl.load(offsets_ptr + owner)
        count = (tl.load(offsets_ptr + owner + 1) - begin) * n_seed
    return begin, count


@triton.jit
def piece_rows(count, PIECE: tl.constexpr, PIECES: tl.constexpr, M: tl.constexpr):
    """Query rows of each piece of a segment that has `count`."""
    each = tl.maximum(PIECE, tl.cdiv(tl.cdiv(count, PIECES), M) * M)
    return tl.where(count > PIECE, each, tl.maximum(count, 1))


@triton.jit
def _block(
    sums,
    k,
    v,
    q,
    do,
    lse2,
    delta,
    bias,
    scale2,
    seen,
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds a block of query rows to (dK / scale, dV, dbias)."""
    dk, dv, db = sums
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2
    if bias is not None:
        scores += bias[:, None]
    p = tl.exp2(scores - lse2[None, :])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    if DV_:
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    if DK or DB:
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if DK:
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if DB:
            db += tl.sum(ds, 1)
    return dk, dv, db


@triton.jit
def over_rows(
    sums,
    k,
    v,
    bias,
    rows,
    order_ptr,
    begin,
    low,
    clear,
    high,
    n_seed,
    heads,
    scale2,
    keys,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The query rows `low ... high - 1` of a segment, one head, into the sums of a tile of keys.

    `rows` is (q, stride, dO, stride, lse, delta): pointers at the head, strides of folded rows.
    Rows before `clear` do not attend to keys of a greater number than their own; `keys` [N] are
    the tile's.
    """
    q_ptr, q_seed, do_ptr, do_seed, lse_ptr, delta_ptr = rows
    full = clear + tl.maximum(high - clear, 0) // M * M
    for at in tl.range(clear, full, M, num_stages=STAGES):
        steps = at + tl.arange(0, M)
        flat = flat_rows(order_ptr, begin, steps, None, n_seed)
        q = load_rows(q_ptr, q_seed, flat, None, D, DP)
        do = load_rows(do_ptr, do_seed, flat, None, DV, DVP)
        lse = tl.load(lse_ptr + flat * heads)
        lse2 = tl.where(lse == NOTHING, float("inf"), lse * LOG2E)
        delta = tl.load(delta_ptr + flat * heads)
        sums = _block(sums, k, v, q, do, lse2, delta, bias, scale2, None, DK, DV_, DB, PRECISION)
    before = tl.cdiv(tl.minimum(clear, high) - low, M)
    for turn in tl.range(0, before + tl.cdiv(tl.maximum(high - full, 0), M), num_stages=1):
        at = tl.where(turn < before, low + turn * M, full + (turn - before) * M)
        steps = at + tl.arange(0, M)
        valid = steps < high
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q = load_rows(q_ptr, q_seed, flat, valid, D, DP)
        do = load_rows(do_ptr, do_seed, flat, valid, DV, DVP)
        lse = tl.load(lse_ptr + flat * heads, mask=valid, other=NOTHING)
        lse2 = tl.where(lse == NOTHING, float("inf"), lse * LOG2E)
        delta = tl.load(delta_ptr + flat * heads, mask=valid, other=0.0)
        seen = (steps >= clear)[None, :] | (keys[:, None] <= steps[None, :])
        sums = _block(sums, k, v, q, do, lse2, delta, bias, scale2, seen, DK, DV_, DB, PRECISION)
    return sums


@triton.jit
def store_part(part_ptr, x, WIDTH: tl.constexpr):
    """A tile [N, WIDTH], for a program that goes on with it."""
    at = tl.arange(0, x.shape[0])[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(part_ptr + at, x)


@triton.jit
def load_part(part_ptr, N: tl.constexpr, WIDTH: tl.constexpr):
    """What `store_part` stored."""
    return tl.load(part_ptr + tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def store_keys(
    ptr,
    start,
    keys,
    end,
    seen,
    kv_heads,
    kv_head,
    x,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A tile of a gradient like k or v, up to `end`; zeros for what is no key."""
    at = (start + keys) * kv_heads + kv_head
    store_rows(ptr, WIDTH, at, keys < end, tl.where(seen[:, None], x, 0.0), WIDTH, PADDED)
