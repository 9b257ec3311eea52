"""The Hopper gradient kernel of keys and values: memory, barriers and roles of a block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.target_attention.gluon_boards import FLAT, WORDS
from ikbo_tree.kernels.target_attention.gluon_keys_consumer import consumer
from ikbo_tree.kernels.target_attention.gluon_keys_device import BLOCK, HALF
from ikbo_tree.kernels.target_attention.gluon_keys_producer import producer
from ikbo_tree.kernels.target_attention.gluon_keys_scheduler import scheduler
from ikbo_tree.kernels.target_attention.triton_device import COUNTS, MAPS


@gluon.jit(
    do_not_specialize=[*COUNTS, "n_items"], do_not_specialize_on_alignment=[*MAPS, "counter_ptr"]
)
def key_gradients(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    dk_ptr,
    dv_ptr,
    part_ptr,
    stats_ptr,
    counter_ptr,
    offsets_ptr,
    live_ptr,
    extent_ptr,
    size,
    rows,
    owners,
    n_seed,
    n_items,
    splits,
    stats_pitch,
    scale,
    scale2,
    SHARED: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
    EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Everything that a block of the grid does; any number of blocks does all.

    q_desc, do_desc: [1, rows * n_seed, H, D]; k_desc, v_desc, dk_desc, dv_desc: [rows, S, Hkv, D]
    of a padded memory, [1, total, Hkv, D] of a packed one; all with boxes [1, 64, 1, DP], DP the
    power of two from D on. dk_ptr, dv_ptr: contiguous results; of a packed memory, only keys that
    have an owner are written. part_ptr: [slots, 2, 128, DP] floats, sums of pieces of dK / scale
    and dV, a slot a block or with splits > 1 one for each item and piece. stats_ptr: see
    `producer`. counter_ptr: [2] int32 zeros, which are zeros again at the end. offsets_ptr,
    live_ptr: of the memory's route. extent_ptr, size: see triton_device. n_items: tiles * HKV *
    splits. scale: of the scores; scale2: times log2(e). SHARED: query heads a key head. PIECE,
    PIECES: see the Triton path. EARLY: see `_step` of the consumer.
    """
    DP: gl.constexpr = k_desc.block_type.shape[3]
    DT: gl.constexpr = k_desc.dtype
    k_bufs = gl.allocate_shared_memory(DT, [4, 1, HALF, 1, DP], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(DT, [4, 1, HALF, 1, DP], k_desc.layout)
    q_bufs = gl.allocate_shared_memory(DT, [STAGES, 1, BLOCK, 1, DP], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(DT, [STAGES, 1, BLOCK, 1, DP], q_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK], FLAT)
    board = gl.allocate_shared_memory(gl.int32, [2 * WORDS, 1], FLAT)
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        # Copies by TMA, and what the producer writes itself.
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    kv = (k_bufs, v_bufs, kv_full, kv_empty)
    ring = (q_bufs, do_bufs, stats, full, empty)
    results = (dk_desc, dv_desc, dk_ptr, dv_ptr, part_ptr)
    tree = (offsets_ptr, live_ptr, rows, n_seed)
    memory = (extent_ptr, size, owners)
    scales = (scale, scale2)
    gl.warp_specialize(
        [
            (
                consumer,
                (0, board, kv, ring, results, scales, size, HKV, D, PACKED, EARLY),
            ),
            (
                consumer,
                (1, board, kv, ring, results, scales, size, HKV, D, PACKED, EARLY),
            ),
            (
                producer,
                (
                    board,
                    told,
                    kv,
                    ring,
                    k_desc,
                    v_desc,
                    q_desc,
                    do_desc,
                    stats_ptr,
                    stats_pitch,
                    SHARED,
                    SHARED * HKV,
                ),
            ),
            (
                scheduler,
                (
                    board,
                    told,
                    kv_empty,
                    counter_ptr,
                    tree,
                    memory,
                    n_items,
                    splits,
                    SHARED,
                    HKV,
                    PACKED,
                    PIECE,
                    PIECES,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
