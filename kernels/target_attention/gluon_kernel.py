"""The Hopper attention kernel: memory, barriers and roles of a persistent block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.target_attention.gluon_boards import FLAT, WORDS
from ikbo_tree.kernels.target_attention.gluon_consumer import consumer
from ikbo_tree.kernels.target_attention.gluon_producer import producer
from ikbo_tree.kernels.target_attention.gluon_scheduler import scheduler
from ikbo_tree.kernels.target_attention.triton_device import COUNTS, MAPS


@gluon.jit
def run_roles(
    q_descs,
    k_descs,
    v_descs,
    results,
    counter_ptr,
    tree,
    own_tree,
    maps,
    sizes,
    n_items,
    scale2,
    H: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    FEW: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEGATIVE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    LATE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Everything that a block of the grid does; any number of blocks does all.

    q_descs, results: of target rows, and of own rows if there are any: q_desc and (o_desc, o_ptr,
    lse_ptr). q_desc, o_desc: [folded rows, H, D], boxes [64, 1, DP], DP the power of two from D on;
    o_ptr, lse_ptr: contiguous.
    k_descs, v_descs: of each memory, [rows, S, Hkv, D] of a padded one, [1, total, Hkv, D] of a
    packed one, boxes [1, BN, 1, DP]; with own rows and CAUSAL the one memory's, TILE // BN times.
    counter_ptr: [2] int32 zeros, which are zeros again at the end.
    tree: (offsets, live, rows, segments, n_seed); own_tree: None, or (live owners, owners, tiles of
    target rows); maps: (extents, indices, borders), and sizes: see `forward_tile` of the Triton
    path.
    n_items: tiles * H. scale2: factor of the scores, times log2(e), not 0; NEGATIVE: it is
    negative. GROUPS: query heads a key head, of each memory. PACKED: bit i for memory i. SLOTS:
    blocks of keys or values in shared memory. RUNS: a tile may have to be cut where an ancestor
    passes on to its next row. FEW: if not 0, dead rows and segments of up to so many folded rows
    are left to others. CAUSAL: own rows see no later key. DYNAMIC: items are drawn from the
    counter; else every grid-size-th is a block's. LATE: see `consumer`.
    """
    q_desc = q_descs[0]
    SEVERAL: gl.constexpr = len(k_descs) > 1
    DP: gl.constexpr = q_desc.block_type.shape[2]
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [4, 64, 1, DP], q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, BN, 1, DP], k_descs[0].layout)
    board = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], FLAT)
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    ring = (kv_bufs, kv_full, kv_empty)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    0,
                    board,
                    q_bufs,
                    q_full,
                    q_empty,
                    ring,
                    results,
                    scale2,
                    H,
                    D,
                    SEVERAL,
                    CAUSAL,
                    NEGATIVE,
                    LATE,
                ),
            ),
            (
                consumer,
                (
                    1,
                    board,
                    q_bufs,
                    q_full,
                    q_empty,
                    ring,
                    results,
                    scale2,
                    H,
                    D,
                    SEVERAL,
                    CAUSAL,
                    NEGATIVE,
                    LATE,
                ),
            ),
            (
                producer,
                (
                    board,
                    told,
                    q_full,
                    ring,
                    q_bufs,
                    q_descs,
                    k_descs,
                    v_descs,
                    BN,
                    GROUPS,
                ),
            ),
            (
                scheduler,
                (
                    board,
                    told,
                    q_empty,
                    results,
                    counter_ptr,
                    tree,
                    own_tree,
                    maps,
                    sizes,
                    n_items,
                    H,
                    D,
                    DP,
                    BN,
                    PACKED,
                    RUNS,
                    FEW,
                    CAUSAL,
                    DYNAMIC,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit(
    do_not_specialize=[*COUNTS, "n_items"], do_not_specialize_on_alignment=[*MAPS, "counter_ptr"]
)
def attention_forward(
    q_desc,
    o_desc,
    k_desc0,
    v_desc0,
    k_desc1,
    v_desc1,
    k_desc2,
    v_desc2,
    k_desc3,
    v_desc3,
    o_ptr,
    lse_ptr,
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
    scale2,
    COUNT: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUPS: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    FEW: gl.constexpr,
    NEGATIVE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    LATE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Attention of target rows, the only ones there are; arguments as in `run_roles`."""
    run_roles(
        (q_desc,),
        (k_desc0, k_desc1, k_desc2, k_desc3)[:COUNT],
        (v_desc0, v_desc1, v_desc2, v_desc3)[:COUNT],
        ((o_desc, o_ptr, lse_ptr),),
        counter_ptr,
        (offsets_ptr, live_ptr, rows, segments, n_seed),
        None,
        (
            (extent0, extent1, extent2, extent3),
            (index0, index1, index2, index3),
            (border0, border1, border2, border3),
        ),
        (size0, size1, size2, size3)[:COUNT],
        n_items,
        scale2,
        H,
        D,
        BN,
        SLOTS,
        GROUPS,
        PACKED,
        RUNS,
        FEW,
        False,
        NEGATIVE,
        DYNAMIC,
        LATE,
        CONSUMER_REGISTERS,
        PRODUCER_REGISTERS,
    )
