"""Gradients of attention's keys, values and bias: a tile of keys against all query rows below it.

An *item* is a tile of keys of one row of a memory, and one of the keys' heads. Its sums run over
the heads that share it, and over the query rows of its segment in order. The rows of a long segment
are cut into pieces, by the segment's own length alone; sums over a piece start from zero and are
then added in order. One program may take all pieces of an item, or several may share them and a
second launch adds: the same additions in the same order, so how many programs there are makes no
difference to any bits. Programs take items from a counter, since segments differ in length.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.target_attention.triton_device import (
    COUNTS,
    LOG2E,
    MAPS,
    key_bias,
    load_rows,
    locate,
    seen_keys,
)
from ikbo_tree.kernels.target_attention.triton_keys import (
    add_part,
    find_keys,
    find_queries,
    finish_part,
    over_rows,
    piece_rows,
    store_keys,
    store_part,
)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def key_gradients(
    queries,
    q_desc,
    do_desc,
    stats_desc,
    own_queries,
    dk_ptr,
    dv_ptr,
    db_ptr,
    part_ptr,
    counter_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    owners_live_ptr,
    memory,
    extent_ptr,
    size,
    rows,
    owners,
    n_seed,
    heads,
    kv_heads,
    items,
    splits,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SELF: tl.constexpr,
    CAUSAL: tl.constexpr,
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Items 0 ... `items - 1`, or with `splits` > 1 the items * splits pairs of them and pieces.

    With `splits` = 0, adds what such a launch has left.

    queries: (q, q_seed, q_head, dO, do_seed, do_head, lse2, delta, pitch); q and dO have one stride
    for folded rows; lse2, the log-sum-exp in units of log2 with inf for -inf, and delta lie `pitch`
    apart for each head. q_desc, do_desc, stats_desc: see `over_rows`. own_queries: with SELF, the
    same of queries that the memory's rows have, one a key; CAUSAL: they see no later key.
    dk_ptr, dv_ptr: contiguous, like k and v. Of a packed memory, only keys that have an owner are
    written. db_ptr: float32 [entries, heads], zeros where nothing is written.
    part_ptr: slots of N * (DP + DVP + heads that share keys) floats, two for each program, or with
    `splits` = PIECES or 0 one for each item and piece. counter_ptr: [1] int32, zero.
    order_ptr, offsets_ptr, live_ptr: as in `forward_rows`, of the memory's route; owners_live_ptr:
    [1] its live rows or None, with SELF. memory, size: see triton_device. rows, owners: of the
    queries and of the memory. scale: of the scores. DK, DV_, DB: which gradients are wanted.
    """
    shared = heads // kv_heads
    pitch = N * (DP + DVP + shared)
    item = tl.atomic_add(counter_ptr, 1)
    while item < items:
        turn = item % tl.maximum(splits, 1)
        number = item // tl.maximum(splits, 1)
        kv_head = number % kv_heads
        owner, low = find_keys(
            extent_ptr,
            offsets_ptr,
            live_ptr,
            owners_live_ptr,
            size,
            rows,
            owners,
            number // kv_heads,
            memory[4] is None,
            SELF,
            N,
        )
        if owner < owners:
            begin, count = find_queries(offsets_ptr, live_ptr, rows, owner, n_seed)
            each = piece_rows(count, PIECE, PIECES, M)
            pieces = tl.maximum(tl.cdiv(count, each), 1)
            k_ptr, v_ptr, length, start = locate(memory, extent_ptr, size, owner, kv_head)
            if SELF:
                length = tl.where(owner < live_rows(owners_live_ptr, owners), length, 0)
            elif count == 0:
                length = 0
            keys = low + tl.arange(0, N)
            end = size
            if memory[4] is None:
                end = length
            seen = seen_keys(memory, start, keys, keys < length)
            k = load_rows(k_ptr, memory[5], keys, seen, D, DP)
            v = load_rows(v_ptr, memory[8], keys, seen, DV, DVP)
            if splits == 0 and pieces > 1:
                total = part_ptr + number.to(tl.int64) * PIECES * pitch
                for piece in range(1, pieces):
                    _add(total, total + piece * pitch, shared, DP, DVP, N, DK, DV_, DB)
                tl.debug_barrier()
                _finish(
                    total,
                    dk_ptr,
                    dv_ptr,
                    db_ptr,
                    start,
                    low,
                    end,
                    length,
                    memory,
                    heads,
                    kv_heads,
                    kv_head,
                    scale,
                    D,
                    DV,
                    DP,
                    DVP,
                    N,
                    DK,
                    DV_,
                    DB,
                )
            last = tl.where(splits == 0, 0, pieces)
            for piece in range(turn, last, tl.maximum(splits, 1)):
                slot = 2 * tl.program_id(0) if splits == 1 else number * PIECES + piece
                part = part_ptr + slot.to(tl.int64) * pitch
                if splits == 1 and piece == 0:
                    part += pitch
                dk = tl.zeros((N, DP), tl.float32)
                dv = tl.zeros((N, DVP), tl.float32)
                for g in range(shared):
                    head = kv_head * shared + g
                    bias = key_bias(memory, start, head, keys, seen)
                    sums = (dk, dv, tl.zeros((N,), tl.float32))
                    if SELF and piece == 0:
                        first = low if CAUSAL else 0
                        clear = low + N if CAUSAL else 0
                        sums = over_rows(
                            sums,
                            k,
                            v,
                            bias,
                            _at_head(own_queries, head),
                            None,
                            None,
                            None,
                            None,
                            start,
                            tl.minimum(first, length),
                            clear,
                            length,
                            1,
                            heads,
                            head,
                            scale * LOG2E,
                            keys,
                            D,
                            DV,
                            DP,
                            DVP,
                            M,
                            DK,
                            DV_,
                            DB,
                            PRECISION,
                            STAGES,
                        )
                    sums = over_rows(
                        sums,
                        k,
                        v,
                        bias,
                        _at_head(queries, head),
                        q_desc,
                        do_desc,
                        stats_desc,
                        order_ptr,
                        begin,
                        piece * each,
                        piece * each,
                        tl.minimum((piece + 1) * each, count),
                        n_seed,
                        heads,
                        head,
                        scale * LOG2E,
                        keys,
                        D,
                        DV,
                        DP,
                        DVP,
                        M,
                        DK,
                        DV_,
                        DB,
                        PRECISION,
                        STAGES,
                    )
                    dk, dv, db = sums
                    if DB:
                        if pieces == 1:
                            tl.store(db_ptr + (start + keys) * heads + head, db, mask=seen)
                        else:
                            tl.store(part + N * (DP + DVP + g) + tl.arange(0, N), db)
                if pieces == 1:
                    if DK:
                        store_keys(
                            dk_ptr, start, keys, end, seen, kv_heads, kv_head, dk * scale, D, DP
                        )
                    if DV_:
                        store_keys(dv_ptr, start, keys, end, seen, kv_heads, kv_head, dv, DV, DVP)
                else:
                    if DK:
                        store_part(part, dk, DP)
                    if DV_:
                        store_part(part + N * DP, dv, DVP)
                    if splits == 1:
                        # Other threads of this program read what this one wrote, and the reverse.
                        tl.debug_barrier()
                        if piece > 0:
                            _add(part + pitch, part, shared, DP, DVP, N, DK, DV_, DB)
                            tl.debug_barrier()
                        if piece == pieces - 1:
                            _finish(
                                part + pitch,
                                dk_ptr,
                                dv_ptr,
                                db_ptr,
                                start,
                                low,
                                end,
                                length,
                                memory,
                                heads,
                                kv_heads,
                                kv_head,
                                scale,
                                D,
                                DV,
                                DP,
                                DVP,
                                N,
                                DK,
                                DV_,
                                DB,
                            )
                            tl.debug_barrier()
        item = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _add(
    total,
    part,
    shared,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
):
    """Adds a slot's sums to another's."""
    if DK:
        add_part(total, part, N * DP, 16 * DP)
    if DV_:
        add_part(total + N * DP, part + N * DP, N * DVP, 16 * DVP)
    if DB:
        for g in range(shared):
            at = N * (DP + DVP + g)
            add_part(total + at, part + at, N, N)


@triton.jit
def _finish(
    total,
    dk_ptr,
    dv_ptr,
    db_ptr,
    start,
    low,
    end,
    length,
    memory,
    heads,
    kv_heads,
    kv_head,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
):
    """Writes the gradients that a slot's sums come to."""
    if DK:
        finish_part(
            total, dk_ptr, start, low, end, length, memory, kv_heads, kv_head, scale, D, DP, N
        )
    if DV_:
        finish_part(
            total + N * DP,
            dv_ptr,
            start,
            low,
            end,
            length,
            memory,
            kv_heads,
            kv_head,
            1.0,
            DV,
            DVP,
            N,
        )
    if DB:
        keys = low + tl.arange(0, N)
        seen = seen_keys(memory, start, keys, keys < length)
        shared = heads // kv_heads
        for g in range(shared):
            db = tl.load(total + N * (DP + DVP + g) + tl.arange(0, N))
            tl.store(db_ptr + (start + keys) * heads + kv_head * shared + g, db, mask=seen)


@triton.jit
def _at_head(queries, head):
    """Query rows as `over_rows` takes them."""
    head = head.to(tl.int64)
    return (
        queries[0] + head * queries[2],
        queries[1],
        queries[3] + head * queries[5],
        queries[4],
        queries[6] + head * queries[8],
        queries[7] + head * queries[8],
        (head * queries[2]).to(tl.int32),
        (head * queries[5]).to(tl.int32),
    )


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def sum_heads(x_ptr, out_ptr, entries, heads, BLOCK: tl.constexpr):
    """Writes out [entries] = sum over heads of x [entries, heads], first to last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for head in range(heads):
        total += tl.load(x_ptr + at * heads + head, mask=at < entries, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < entries)
