"""What the gradient kernels of keys and values are made of: items, pieces, sums over query rows."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.common.triton_tiles import find_segment, find_tile
from ikbo_tree.kernels.target_attention.triton_device import (
    flat_rows,
    key_span,
    load_rows,
    seen_keys,
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
        found = (owner < known) & (low >= 0)
        owner = tl.where(found, owner, owners)
        low = tl.where(found, low, 0)
    else:
        each = tl.cdiv(size, N)
        owner = tile // each
        low = (tile - owner * each).to(tl.int64) * N
    return owner, low.to(tl.int32)


@triton.jit
def own_rows(memory, extent_ptr, size, live_ptr, owners, tile, T: tl.constexpr):
    """`find_rows` of queries that belong to a memory's own rows, one an entry."""
    owner, low = find_keys(
        extent_ptr, None, None, live_ptr, size, 0, owners, tile, memory[4] is None, True, T
    )
    live = owner < live_rows(live_ptr, owners)
    start = low.to(tl.int64) * 0
    length = low * 0
    if live:
        start, length = key_span(extent_ptr, size, owner, memory[4] is None)
    return tl.where(live, owner, owners), start, low, length


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
    q_desc,
    do_desc,
    stats_desc,
    order_ptr,
    begin,
    low,
    clear,
    high,
    n_seed,
    heads,
    head,
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

    `rows` is (q, stride, dO, stride, lse2, delta, column of q, of dO): pointers at the head,
    strides of folded rows, the head's first columns. q_desc, do_desc: descriptors of q and dO as
    [folded rows, columns] with boxes of M rows and the padded width, or None; stats_desc: of lse2
    and behind it delta as [2 * heads, folded rows], with boxes of 1 and M, or None.
    Rows before `clear` do not attend to keys of a greater number than their own; `keys` [N] are
    the tile's.
    """
    q_ptr, q_seed, do_ptr, do_seed, lse2_ptr, delta_ptr, q_column, do_column = rows
    block = tl.arange(0, M)
    full = clear + tl.maximum(high - clear, 0) // M * M
    for at in tl.range(clear, full, M, num_stages=STAGES):
        if order_ptr is None:
            line = begin.to(tl.int64) * n_seed + at
            if stats_desc is None:
                lse2 = tl.load(lse2_ptr + line + block)
                delta = tl.load(delta_ptr + line + block)
            else:
                lse2 = stats_desc.load([head, line.to(tl.int32)]).reshape(M)
                delta = stats_desc.load([heads + head, line.to(tl.int32)]).reshape(M)
            if q_desc is None:
                q = load_rows(q_ptr + line * q_seed, q_seed, block, None, D, DP)
            else:
                q = q_desc.load([line.to(tl.int32), q_column])
            if do_desc is None:
                do = load_rows(do_ptr + line * do_seed, do_seed, block, None, DV, DVP)
            else:
                do = do_desc.load([line.to(tl.int32), do_column])
        else:
            flat = flat_rows(order_ptr, begin, at + block, None, n_seed)
            q = load_rows(q_ptr, q_seed, flat, None, D, DP)
            do = load_rows(do_ptr, do_seed, flat, None, DV, DVP)
            lse2 = tl.load(lse2_ptr + flat)
            delta = tl.load(delta_ptr + flat)
        sums = _block(sums, k, v, q, do, lse2, delta, bias, scale2, None, DK, DV_, DB, PRECISION)
    before = tl.cdiv(tl.minimum(clear, high) - low, M)
    for turn in tl.range(0, before + tl.cdiv(tl.maximum(high - full, 0), M), num_stages=1):
        at = tl.where(turn < before, low + turn * M, full + (turn - before) * M)
        steps = at + block
        valid = steps < high
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q = load_rows(q_ptr, q_seed, flat, valid, D, DP)
        do = load_rows(do_ptr, do_seed, flat, valid, DV, DVP)
        lse2 = tl.load(lse2_ptr + flat, mask=valid, other=float("inf"))
        delta = tl.load(delta_ptr + flat, mask=valid, other=0.0)
        seen = (steps >= clear)[None, :] | (keys[:, None] <= steps[None, :])
        sums = _block(sums, k, v, q, do, lse2, delta, bias, scale2, seen, DK, DV_, DB, PRECISION)
    return sums


@triton.jit
def store_part(part_ptr, x, WIDTH: tl.constexpr):
    """Leaves a tile [N, WIDTH] of float32 sums for `add_part` or `finish_part`."""
    at = tl.arange(0, x.shape[0])[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(part_ptr + at, x)


@triton.jit
def add_part(total_ptr, part_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Total [SIZE] = part + total, a little at a time: it runs where registers are full."""
    tl.static_assert(SIZE % BLOCK == 0, "what is left over would not be added")
    for low in range(0, SIZE, BLOCK):
        at = low + tl.arange(0, BLOCK)
        tl.store(total_ptr + at, tl.load(part_ptr + at) + tl.load(total_ptr + at))


@triton.jit
def finish_part(
    total_ptr,
    ptr,
    start,
    low,
    end,
    length,
    memory,
    kv_heads,
    kv_head,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
):
    """Writes total [N, PADDED] * scale to a gradient like k or v; see `store_keys`."""
    ROWS: tl.constexpr = 16
    for row in range(0, N, ROWS):
        at = row + tl.arange(0, ROWS)
        keys = low + at
        seen = seen_keys(memory, start, keys, keys < length)
        x = tl.load(total_ptr + at[:, None] * PADDED + tl.arange(0, PADDED)[None, :])
        store_keys(ptr, start, keys, end, seen, kv_heads, kv_head, x * scale, WIDTH, PADDED)


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
