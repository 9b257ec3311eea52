"""The forward kernel of attention: a tile of query rows against everything its ancestors own.

One softmax state walks over the keys of all memories, in the caller's order. Which tile a query row
is in makes no difference to its bits.

No kernel here returns early: Triton pipelines no loop of a kernel that does.
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
    load_queries,
    locate,
)
from ikbo_tree.kernels.target_attention.triton_keys import own_rows
from ikbo_tree.kernels.target_attention.triton_softmax import (
    attend,
    first_state,
    load_state,
    store_nothing,
    store_result,
)


@triton.jit
def forward_tile(
    q_ptr,
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memories,
    maps,
    descriptors,
    sizes,
    q_row,
    q_seed,
    q_head,
    rows,
    segments,
    n_seed,
    heads,
    number,
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
    OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Head `number % heads` of tile `number // heads`, over the keys of up to four memories.

    q_ptr [rows, n_seed, heads, D]; o_ptr [rows, n_seed, heads, DV] and lse_ptr [rows, n_seed,
    heads], contiguous; part_ptr and part_lse_ptr like them, float32 and in units of log2: what an
    earlier launch leaves for a later one. FIRST: nothing to continue from; otherwise the state
    comes from `part`. LAST: writes o and lse; otherwise `part`.
    order_ptr: rows by position, or None. offsets_ptr: [segments + 1] first position of each
    segment; None: each row is one. live_ptr: [1] live rows, or None.
    memories: COUNT tuples, see triton_device; maps: extents, indices and borders, and sizes, beside
    them; descriptors: (k, v) of each as
    [entries, columns] with boxes [N, DP] and [N, DVP], or None. RUNS: they have routes of their
    own, so a tile may have to be cut where one of them passes on to its next row.
    OWN: the queries are the memory's own, one an entry, in `segments` rows of which `live_ptr` are
    live, and only those that belong to a key are written; CAUSAL: they see no later key.
    q_row, q_seed, q_head: strides. scale2: magnitude of the scores' factor, times log2(e);
    NEGATIVE: it is negative. M, N: query rows a tile, keys a block.
    """
    extents, indices, borders = maps
    head = number % heads
    tile = number // heads
    if OWN:
        segment, begin, first, end = own_rows(
            memories[0], extents[0], sizes[0], live_ptr, segments, tile, M
        )
    else:
        segment, begin, first, end = find_rows(
            offsets_ptr, live_ptr, segments, rows, tile, n_seed, M
        )
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
                if indices[i] is not None:
                    border = tl.load(borders[i] + tl.load(indices[i] + row) + 1)
                    left = (border - begin).to(tl.int64) * n_seed
                    stop = tl.minimum(stop.to(tl.int64), left).to(tl.int32)
        steps = first + tl.arange(0, M)
        valid = steps < stop
        limit = tl.where(valid, steps, first) if CAUSAL else None
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q = load_queries(
            q_ptr + head.to(tl.int64) * q_head, flat, valid, n_seed, q_row, q_seed, NEGATIVE, D, DP
        )
        state = first_state(M, DVP)
        if not FIRST:
            state = load_state(part_ptr, part_lse_ptr, flat * heads + head, valid, DV, DVP)
        for i in tl.static_range(COUNT):
            owner = segment
            if indices[i] is not None:
                owner = tl.load(indices[i] + row)
            k_ptr, v_ptr, length, start = locate(
                memories[i], extents[i], sizes[i], owner, head // memories[i][12]
            )
            state = attend(
                q,
                state,
                memories[i],
                descriptors[2 * i],
                descriptors[2 * i + 1],
                k_ptr,
                v_ptr,
                start,
                head,
                head // memories[i][12],
                0,
                length,
                scale2,
                limit,
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


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
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
    extent0,
    index0,
    border0,
    extent1,
    index1,
    border1,
    extent2,
    index2,
    border2,
    extent3,
    index3,
    border3,
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
    """Program p runs `forward_tile` p; arguments as there."""
    forward_tile(
        q_ptr,
        o_ptr,
        lse_ptr,
        part_ptr,
        part_lse_ptr,
        order_ptr,
        offsets_ptr,
        live_ptr,
        memories,
        (
            (extent0, extent1, extent2, extent3),
            (index0, index1, index2, index3),
            (border0, border1, border2, border3),
        ),
        (k_desc0, v_desc0, k_desc1, v_desc1, k_desc2, v_desc2, k_desc3, v_desc3),
        (size0, size1, size2, size3),
        q_row,
        q_seed,
        q_head,
        rows,
        segments,
        n_seed,
        heads,
        tl.program_id(0),
        scale2,
        COUNT,
        D,
        DV,
        DP,
        DVP,
        M,
        N,
        FIRST,
        LAST,
        RUNS,
        False,
        False,
        NEGATIVE,
        PRECISION,
        STAGES,
    )
