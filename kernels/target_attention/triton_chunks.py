"""Attention of few query rows a segment: keys in chunks, for memory-bound and single requests.

Keys are cut into chunks of a fixed length, counted from the first key of their row. Each chunk has
a softmax state of its own, and states are merged in order. One program may take all chunks of a
tile, or several may share them and a second launch merges: the same additions in the same order, so
the same bits, and how many programs there are may depend on the batch. Whether a segment's keys
are cut depends on how many query rows it has itself, and on nothing else. So does whether it is
left to another launch.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import (
    COUNTS,
    MAPS,
    find_rows,
    flat_rows,
    key_span,
    load_queries,
    locate,
)
from ikbo_tree.kernels.target_attention.triton_softmax import (
    attend,
    first_state,
    load_state,
    merge_states,
    store_nothing,
    store_result,
)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def forward_chunks(
    q_ptr,
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    chunk_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memories,
    extent0,
    extent1,
    extent2,
    extent3,
    size0,
    size1,
    size2,
    size3,
    q_row,
    q_seed,
    q_head,
    rows,
    segments,
    n_seed,
    heads,
    slots,
    splits,
    scale2,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of query rows and one head over memories of one route, chunk by chunk.

    Program p has head p % heads of tile p // heads. With `splits` > 1, program (p, y) takes the
    chunks y, y + splits, ... of all memories together and leaves their states in `chunk_ptr`, where
    another launch, with `splits` = 0, finds and merges them.

    Arguments as in `forward_tile`; chunk_ptr: float32 [tiles * heads, slots, DVP + 2, M], states,
    the weighted sums of values first; slots: chunks that a tile may have; CHUNK: keys of a chunk;
    FEW: query rows of a segment up to which its keys are cut, others have one chunk a memory; if
    negative, -FEW is meant, and others are left to another launch.
    """
    extents = (extent0, extent1, extent2, extent3)
    sizes = (size0, size1, size2, size3)
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    segment, begin, first, end = find_rows(offsets_ptr, live_ptr, segments, rows, tile, n_seed, M)
    few = end <= (FEW if FEW >= 0 else -FEW)
    end = tl.minimum(end, first + M)
    if segment == segments:
        if LAST and tl.program_id(1) == 0:
            store_nothing(o_ptr, lse_ptr, begin, first, end, n_seed, heads, head, DV, DVP, M)
        first = end
    if FEW < 0:
        first = tl.where(few, first, end)
    if first < end:
        steps = first + tl.arange(0, M)
        valid = steps < end
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q = load_queries(
            q_ptr + head.to(tl.int64) * q_head, flat, valid, n_seed, q_row, q_seed, NEGATIVE, D, DP
        )
        at = flat * heads + head
        whole = first_state(M, DVP)
        if not FIRST and splits <= 1:
            whole = load_state(part_ptr, part_lse_ptr, at, valid, DV, DVP)
        before = 0
        if splits == 0:
            for i in tl.static_range(COUNT):
                _, length = key_span(extents[i], sizes[i], segment, memories[i][4] is None)
                before += tl.cdiv(length, tl.where(few, CHUNK, tl.maximum(length, 1)))
            for chunk in range(before):
                slot = tl.program_id(0).to(tl.int64) * slots + chunk
                whole = merge_states(whole, _load_chunk(chunk_ptr, slot, M, DVP))
        else:
            for i in tl.static_range(COUNT):
                k_ptr, v_ptr, length, start = locate(
                    memories[i], extents[i], sizes[i], segment, head // memories[i][12]
                )
                size = tl.where(few, CHUNK, tl.maximum(length, 1))
                chunks = tl.cdiv(length, size)
                mine = (splits + tl.program_id(1) - before % splits) % splits
                for chunk in tl.range(mine, chunks, splits, num_stages=1):
                    low = chunk * size
                    state = attend(
                        q,
                        first_state(M, DVP),
                        memories[i],
                        None,
                        None,
                        k_ptr,
                        v_ptr,
                        start,
                        head,
                        head // memories[i][12],
                        low,
                        tl.minimum(low + size, length),
                        scale2,
                        None,
                        D,
                        DV,
                        DP,
                        DVP,
                        N,
                        PRECISION,
                        STAGES,
                    )
                    if splits == 1:
                        whole = merge_states(whole, state)
                    else:
                        slot = tl.program_id(0).to(tl.int64) * slots + before + chunk
                        _store_chunk(chunk_ptr, slot, state, M, DVP)
                before += chunks
        if splits <= 1:
            store_result(o_ptr, lse_ptr, part_ptr, part_lse_ptr, at, valid, whole, DV, DVP, LAST)


@triton.jit
def _store_chunk(chunk_ptr, slot, state, M: tl.constexpr, DVP: tl.constexpr):
    peak, total, acc = state
    at = tl.arange(0, M)
    ptr = chunk_ptr + slot * (M * (DVP + 2))
    tl.store(ptr + at[:, None] * DVP + tl.arange(0, DVP)[None, :], acc)
    tl.store(ptr + M * DVP + at, peak)
    tl.store(ptr + M * (DVP + 1) + at, total)


@triton.jit
def _load_chunk(chunk_ptr, slot, M: tl.constexpr, DVP: tl.constexpr):
    at = tl.arange(0, M)
    ptr = chunk_ptr + slot * (M * (DVP + 2))
    acc = tl.load(ptr + at[:, None] * DVP + tl.arange(0, DVP)[None, :])
    return tl.load(ptr + M * DVP + at), tl.load(ptr + M * (DVP + 1) + at), acc
