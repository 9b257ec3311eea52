"""Gradients of attention's keys, values and bias: a tile of keys against all query rows below it.

An *item* is a tile of keys of one row of a memory, and one of the keys' heads. Its sums run over
the heads that share it, and over the query rows of its segment in order. The rows of a long segment
are cut into pieces, by the segment's own length alone; sums over a piece start from zero and are
then added in order. One program may take all pieces of an item, or several may share them and
`combine_pieces` adds: the same additions in the same order, so how many programs there are makes no
difference to any bits. Programs take items from a counter, since segments differ in length.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.target_attention.triton_device import (
    LOG2E,
    key_bias,
    load_rows,
    locate,
    seen_keys,
)
from ikbo_tree.kernels.target_attention.triton_keys import (
    find_keys,
    find_queries,
    load_part,
    over_rows,
    piece_rows,
    store_keys,
    store_part,
)

_SIZES = ["size", "rows", "owners", "n_seed", "items", "splits"]


@triton.jit(do_not_specialize=_SIZES)
def key_gradients(
    queries,
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
    """Items `counter_ptr` ... `items - 1`, each of them `splits` times.

    queries: (q, q_seed, q_head, dO, do_seed, do_head, lse, delta); q and dO have one stride for
    folded rows, lse and delta [rows, n_seed, heads] are contiguous. own_queries: with SELF, the
    same of queries that the memory's rows have, one a key; CAUSAL: they see no later key.
    dk_ptr, dv_ptr: contiguous, like k and v. Of a packed memory, only keys that have an owner are
    written. db_ptr: float32 [entries, heads], zeros where nothing is written.
    part_ptr: slots of N * (DP + DVP + heads that share keys) floats, one for each program, or with
    `splits` = PIECES for each item and piece. counter_ptr: [1] int32, zero.
    order_ptr, offsets_ptr, live_ptr: as in `forward_rows`, of the memory's route; owners_live_ptr:
    [1] its live rows or None, with SELF. memory, size: see triton_device. rows, owners: of the
    queries and of the memory. scale: of the scores. DK, DV_, DB: which gradients are wanted.
    """
    shared = heads // kv_heads
    item = tl.atomic_add(counter_ptr, 1)
    while item < items:
        number = item // splits
        kv_head = number % kv_heads
        owner, low = find_keys(
            memory[4],
            offsets_ptr,
            live_ptr,
            owners_live_ptr,
            size,
            rows,
            owners,
            number // kv_heads,
            memory[7] is None,
            SELF,
            N,
        )
        if owner < owners:
            begin, count = find_queries(offsets_ptr, live_ptr, rows, owner, n_seed)
            each = piece_rows(count, PIECE, PIECES, M)
            pieces = tl.maximum(tl.cdiv(count, each), 1)
            k_ptr, v_ptr, length, start = locate(memory, size, owner, kv_head)
            if SELF:
                length = tl.where(owner < live_rows(owners_live_ptr, owners), length, 0)
            elif count == 0:
                length = 0
            keys = low + tl.arange(0, N)
            end = size
            if memory[7] is None:
                end = length
            seen = seen_keys(memory, start, keys, keys < length)
            k = load_rows(k_ptr, memory[8], keys, seen, D, DP)
            v = load_rows(v_ptr, memory[11], keys, seen, DV, DVP)
            for piece in range(item % splits, pieces, splits):
                slot = tl.program_id(0) if splits == 1 else item - item % splits + piece
                part = part_ptr + slot.to(tl.int64) * (N * (DP + DVP + shared))
                carried = (splits == 1) & (piece > 0)
                done = (pieces == 1) | ((splits == 1) & (piece == pieces - 1))
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
                            start,
                            tl.minimum(first, length),
                            clear,
                            length,
                            1,
                            heads,
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
                        order_ptr,
                        begin,
                        piece * each,
                        piece * each,
                        tl.minimum((piece + 1) * each, count),
                        n_seed,
                        heads,
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
                        db_part = part + N * (DP + DVP + g) + tl.arange(0, N)
                        if carried:
                            db += tl.load(db_part)
                        if done:
                            tl.store(db_ptr + (start + keys) * heads + head, db, mask=seen)
                        else:
                            tl.store(db_part, db)
                if carried:
                    # The stores of the piece before are other threads' too.
                    tl.debug_barrier()
                    if DK:
                        dk += load_part(part, N, DP)
                    if DV_:
                        dv += load_part(part + N * DP, N, DVP)
                    tl.debug_barrier()
                if done:
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
        item = tl.atomic_add(counter_ptr, 1)


@triton.jit
def _at_head(queries, head):
    """Query rows as `over_rows` takes them."""
    head = head.to(tl.int64)
    return (
        queries[0] + head * queries[2],
        queries[1],
        queries[3] + head * queries[5],
        queries[4],
        queries[6] + head,
        queries[7] + head,
    )


@triton.jit(do_not_specialize=_SIZES)
def combine_pieces(
    dk_ptr,
    dv_ptr,
    db_ptr,
    part_ptr,
    offsets_ptr,
    live_ptr,
    owners_live_ptr,
    memory,
    size,
    rows,
    owners,
    n_seed,
    heads,
    kv_heads,
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
    DK: tl.constexpr,
    DV_: tl.constexpr,
    DB: tl.constexpr,
):
    """Adds the pieces of item `program_id(0)` as one program of `key_gradients` would."""
    shared = heads // kv_heads
    item = tl.program_id(0)
    kv_head = item % kv_heads
    owner, low = find_keys(
        memory[4],
        offsets_ptr,
        live_ptr,
        owners_live_ptr,
        size,
        rows,
        owners,
        item // kv_heads,
        memory[7] is None,
        SELF,
        N,
    )
    if owner < owners:
        _, count = find_queries(offsets_ptr, live_ptr, rows, owner, n_seed)
        pieces = tl.cdiv(count, piece_rows(count, PIECE, PIECES, M))
        if pieces > 1:
            _, _, length, start = locate(memory, size, owner, kv_head)
            keys = low + tl.arange(0, N)
            end = size
            if memory[7] is None:
                end = length
            seen = seen_keys(memory, start, keys, keys < length)
            pitch = N * (DP + DVP + shared)
            part = part_ptr + item.to(tl.int64) * splits * pitch
            if DK:
                dk = load_part(part, N, DP)
                for piece in range(1, pieces):
                    dk = load_part(part + piece * pitch, N, DP) + dk
                store_keys(dk_ptr, start, keys, end, seen, kv_heads, kv_head, dk * scale, D, DP)
            if DV_:
                dv = load_part(part + N * DP, N, DVP)
                for piece in range(1, pieces):
                    dv = load_part(part + N * DP + piece * pitch, N, DVP) + dv
                store_keys(dv_ptr, start, keys, end, seen, kv_heads, kv_head, dv, DV, DVP)
            if DB:
                for g in range(shared):
                    at = part + N * (DP + DVP + g) + tl.arange(0, N)
                    db = tl.load(at)
                    for piece in range(1, pieces):
                        db = tl.load(at + piece * pitch) + db
                    tl.store(db_ptr + (start + keys) * heads + kv_head * shared + g, db, mask=seen)


@triton.jit(do_not_specialize=["entries"])
def sum_heads(x_ptr, out_ptr, entries, heads, BLOCK: tl.constexpr):
    """Writes out [entries] = sum over heads of x [entries, heads], first to last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for head in range(heads):
        total += tl.load(x_ptr + at * heads + head, mask=at < entries, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < entries)
