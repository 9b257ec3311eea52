"""The forward kernel of attention: a tile of query rows against everything its ancestors own.

One softmax state walks over the keys of all memories, in the caller's order. Which tile a query row
is in makes no difference to its bits.

It does not return early: Triton pipelines no loop of a kernel that does.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import (
    attend,
    find_rows,
    first_state,
    flat_rows,
    load_queries,
    load_state,
    locate,
    store_nothing,
    store_result,
)


@triton.jit(do_not_specialize=["size0", "size1", "size2", "size3", "rows", "segments", "n_seed"])
def forward_rows(
    q_ptr,
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memories,
    k_desc0,
    v_desc0,
    k_desc1,
    v_desc1,
    k_desc2,
    v_desc2,
    k_desc3,
    v_desc3,
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
    scale2,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RUNS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of query rows and one head, over the keys of up to four memories.

    Program p has head p % heads of tile p // heads.

    Args:
        q_ptr: [rows, n_seed, heads, D].
        o_ptr: [rows, n_seed, heads, DV], contiguous.
        lse_ptr: [rows, n_seed, heads], likewise.
        part_ptr: float32, like o: what an earlier launch leaves for a later one.
        part_lse_ptr: likewise, in units of log2.
        order_ptr: rows by position, or None.
        offsets_ptr: [segments + 1] first position of each segment; None: each row is one.
        live_ptr: [1] live rows, or None.
        memories: COUNT tuples, see triton_device.
        k_desc0 ... v_desc3: descriptors of their keys and values, [entries, columns] with boxes
            [N, DP] and [N, DVP], or None.
        size0 ... size3: beside them.
        q_row, q_seed, q_head: strides.
        rows, segments, n_seed, heads: sizes.
        scale2: magnitude of the scores' factor, times log2(e).
        COUNT: memories.
        D, DV, DP, DVP: widths of keys and values, and powers of two that hold them.
        M, N: query rows a tile, keys a block.
        FIRST: nothing to continue from. Otherwise the state comes from `part`.
        LAST: writes o and lse. Otherwise `part`.
        RUNS: memories have routes of their own, so a tile may have to be cut where one of them
            passes on to its next row.
        NEGATIVE: the factor of the scores is negative.
        PRECISION: of float32 products.
        STAGES: blocks in flight.
    """
    sizes = (size0, size1, size2, size3)
    k_descs = (k_desc0, k_desc1, k_desc2, k_desc3)
    v_descs = (v_desc0, v_desc1, v_desc2, v_desc3)
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    segment, begin, first, end = find_rows(offsets_ptr, live_ptr, segments, rows, tile, n_seed, M)
    end = tl.minimum(end, first + M)
    if segment == segments:
        if LAST:
            store_nothing(o_ptr, lse_ptr, begin, first, end, n_seed, heads, head, DV, DVP, M)
        first = end
    while first < end:
        row = begin + first // n_seed
        stop = end
        if RUNS:
            for i in tl.static_range(COUNT):
                if memories[i][5] is not None:
                    border = tl.load(memories[i][6] + tl.load(memories[i][5] + row) + 1)
                    left = (border - begin).to(tl.int64) * n_seed
                    stop = tl.minimum(stop.to(tl.int64), left).to(tl.int32)
        steps = first + tl.arange(0, M)
        valid = steps < stop
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q = load_queries(
            q_ptr + head.to(tl.int64) * q_head, flat, valid, n_seed, q_row, q_seed, NEGATIVE, D, DP
        )
        state = first_state(M, DVP)
        if not FIRST:
            state = load_state(part_ptr, part_lse_ptr, flat * heads + head, valid, DV, DVP)
        for i in tl.static_range(COUNT):
            owner = segment
            if memories[i][5] is not None:
                owner = tl.load(memories[i][5] + row)
            k_ptr, v_ptr, length, start = locate(
                memories[i], sizes[i], owner, head // memories[i][15]
            )
            state = attend(
                q,
                state,
                memories[i],
                k_descs[i],
                v_descs[i],
                k_ptr,
                v_ptr,
                start,
                head,
                head // memories[i][15],
                0,
                length,
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
        at = flat * heads + head
        store_result(o_ptr, lse_ptr, part_ptr, part_lse_ptr, at, valid, state, DV, DVP, LAST)
        first = stop
