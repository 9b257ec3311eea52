"""The Hopper gradient kernel of queries: memory, barriers and roles of a persistent block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.target_attention.gluon_boards import FLAT, WORDS
from ikbo_tree.kernels.target_attention.gluon_queries_consumer import consumer
from ikbo_tree.kernels.target_attention.gluon_queries_device import HALF
from ikbo_tree.kernels.target_attention.gluon_queries_producer import producer
from ikbo_tree.kernels.target_attention.gluon_queries_scheduler import scheduler
from ikbo_tree.kernels.target_attention.triton_device import COUNTS, MAPS


@gluon.jit(
    do_not_specialize=[*COUNTS, "n_items"], do_not_specialize_on_alignment=[*MAPS, "counter_ptr"]
)
def query_gradients(
    q_desc,
    do_desc,
    o_desc,
    dq_desc,
    k_desc0,
    v_desc0,
    k_desc1,
    v_desc1,
    k_desc2,
    v_desc2,
    k_desc3,
    v_desc3,
    dq_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    far_ptr,
    again_ptr,
    counter_ptr,
    offsets_ptr,
    live_ptr,
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
    size0,
    size1,
    size2,
    size3,
    rows,
    segments,
    n_seed,
    n_items,
    stats_pitch,
    scale,
    scale2,
    COUNT: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    AGAIN: gl.constexpr,
    SHARED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Everything that a block of the grid does; any number of blocks does all.

    q_desc, do_desc, o_desc, dq_desc: [1, rows * n_seed, H, D], boxes [1, 64, 1, DP], DP the power
    of two from D on. k_desc*, v_desc*: [rows, S, Hkv, D] of a padded memory, [1, total, Hkv, D] of
    a packed one, boxes [1, BN, 1, DP]. dq_ptr: the contiguous result. lse_ptr, dlse_ptr: of the
    forward, contiguous; dlse_ptr: None, or its gradient. counter_ptr: [2] int32 zeros, which are
    zeros again at the end. offsets_ptr, live_ptr, extents, indices, borders, sizes: see
    `query_gradients` of the Triton path. n_items: tiles * H. scale: of the scores; scale2: times
    log2(e). GROUPS: query heads a key head, of each memory. PACKED: bit i for memory i. SHARED: see
    `GradientTile`.

    stats_ptr: [2, H, stats_pitch] float32, which gets each folded row's log-sum-exp in units of
    log2, with inf for -inf, and the exact delta. dQ is computed with one from an output rounded to
    16 bits. far_ptr: [H, stats_pitch] int8, which gets where that shows; again_ptr: [n_items]
    int32, zeros, which gets ones for items that have such a row. A second launch with AGAIN reads
    those and stats_ptr and computes dQ of such rows anew. See triton_queries.
    """
    DP: gl.constexpr = q_desc.block_type.shape[3]
    DT: gl.constexpr = q_desc.dtype
    KINDS: gl.constexpr = 2 if AGAIN else 3
    row_bufs = gl.allocate_shared_memory(DT, [2 * KINDS, 1, HALF, 1, DP], q_desc.layout)
    out_bufs = gl.allocate_shared_memory(DT, [2, 1, HALF, 1, DP], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(DT, [STAGES, 1, BN, 1, DP], k_desc0.layout)
    v_bufs = gl.allocate_shared_memory(DT, [STAGES, 1, BN, 1, DP], k_desc0.layout)
    board = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], FLAT)
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(freed.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    rows_of = (row_bufs, q_full, q_empty)
    ring = (k_bufs, v_bufs, full, empty)
    row_descs = (q_desc, do_desc, o_desc)[:KINDS]
    k_descs = (k_desc0, k_desc1, k_desc2, k_desc3)[:COUNT]
    v_descs = (v_desc0, v_desc1, v_desc2, v_desc3)[:COUNT]
    results = (dq_desc, dq_ptr, stats_ptr, far_ptr, again_ptr)
    known = (lse_ptr, dlse_ptr)
    scales = (scale, scale2)
    tree = (offsets_ptr, live_ptr, rows, segments, n_seed)
    extents = (extent0, extent1, extent2, extent3)
    indices = (index0, index1, index2, index3)
    borders = (border0, border1, border2, border3)
    maps = (extents, indices, borders)
    sizes = (size0, size1, size2, size3)[:COUNT]
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    0,
                    board,
                    freed,
                    rows_of,
                    out_bufs,
                    ring,
                    results,
                    known,
                    stats_pitch,
                    scales,
                    H,
                    D,
                    AGAIN,
                    SHARED,
                ),
            ),
            (
                consumer,
                (
                    1,
                    board,
                    freed,
                    rows_of,
                    out_bufs,
                    ring,
                    results,
                    known,
                    stats_pitch,
                    scales,
                    H,
                    D,
                    AGAIN,
                    SHARED,
                ),
            ),
            (producer, (board, told, rows_of, ring, row_descs, k_descs, v_descs, BN, GROUPS)),
            (
                scheduler,
                (
                    board,
                    told,
                    freed,
                    counter_ptr,
                    again_ptr,
                    tree,
                    maps,
                    sizes,
                    n_items,
                    H,
                    BN,
                    PACKED,
                    RUNS,
                    AGAIN,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
