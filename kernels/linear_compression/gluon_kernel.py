"""One launch of the stages of `linear_compression` on Hopper: up to four levels of a tree.

    P[l] = W[l] E[l] + sum of P[p][parents]        for all rows of level l, as in `common/stages.py`

A program an SM, with three roles: a warp that loads (`gluon_producer`) and two warpgroups that
multiply (`gluon_consumer`). Tiles come by ticket, levels one after the other (`gluon_schedule`); a
tile waits for the flags of the partial results that it adds, not before its product is done if they
are late. The result is written by the copy engine, partial results in fragment order
(`common/gluon_fragments`) by the threads that hold them.

Barriers of a stage of the ring:

    full[s]    loading warp -> consumers. One arrival and the bytes of the stage.
    empty[s]   consumers -> loading warp, one arrival each, when its product over the stage is
               complete and, where it stages output in its W slot, the copy engine has read that.

A stage that is kept for staging is given back after the first product of the next tile was issued.
That tile's first two steps lie in other stages (there are at least four), so it never waits for
itself.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.linear_compression.gluon_config import BK
from ikbo_tree.kernels.linear_compression.gluon_consumer import consume
from ikbo_tree.kernels.linear_compression.gluon_mail import SLOTS, open_mail
from ikbo_tree.kernels.linear_compression.gluon_producer import produce
from ikbo_tree.kernels.linear_compression.gluon_schedule import EDGES, LEVELS

_BK = gl.constexpr(BK)

INDEXES = [f"index_{i}" for i in range(EDGES)]
LIVES = [f"live_{i}" for i in range(LEVELS)]
SIZES = [
    *(f"rows_{i}" for i in range(LEVELS)),
    *(f"steps_{i}" for i in range(LEVELS)),
    *(f"own_{i}" for i in range(LEVELS)),
    *(f"base_{i}" for i in range(EDGES)),
]
"""Arguments that no kernel is compiled for. One by one: Triton compiles for what is in a tuple."""


@gluon.jit(
    do_not_specialize=["M", "late", *SIZES],
    do_not_specialize_on_alignment=["counter_ptr", "flags_ptr", *INDEXES, *LIVES],
)
def stages_kernel(  # noqa: D417 - numbered arguments are described once
    w_0,
    e_0,
    w_1,
    e_1,
    w_2,
    e_2,
    w_3,
    e_3,
    out,
    partial_ptr,
    counter_ptr,
    flags_ptr,
    index_0,
    index_1,
    index_2,
    index_3,
    index_4,
    index_5,
    live_0,
    live_1,
    live_2,
    live_3,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    steps_0,
    steps_1,
    steps_2,
    steps_3,
    own_0,
    own_1,
    own_2,
    own_3,
    base_0,
    base_1,
    base_2,
    base_3,
    base_4,
    base_5,
    M,
    late,
    FORM: gl.constexpr,
):
    """Grid: any number of programs, at most one an SM.

    Args:
        w_0: descriptor of W of the first level [M, K], tiles of [64, BK]; so `w_1` to `w_3`.
        e_0: of E [rows, K, N], tiles of [1, BK, BN]; None, as W, for levels that there are not.
        out: of the result [rows, M, N], tiles of [1, 64, half of BN, at most 64]; or None.
        partial_ptr: all partial results, [rows, column blocks, M in 16s, BN] in fragment order.
        counter_ptr: [1] int32, the next ticket, zero.
        flags_ptr: [rows of all partial results, column blocks, row blocks] int32, zero, or as an
            earlier launch has left them.
        index_0: map of the first edge [rows of the consumer] int32; None: row to row. And so on.
        live_0: live rows of the first level [1] int32; None: all are. And so on.
        rows_0: allocated rows of the first level; 0 for levels that there are not. And so on.
        steps_0: its steps over K, at least 2. And so on.
        own_0: its first row among all partial results. And so on.
        base_0: first row of the producer of the first edge among all partial results. And so on.
        M: rows of W.
        late: rows of the result whose singles come at the end.
        FORM: `gluon_form.Form`.
    """
    S: gl.constexpr = FORM.stages
    BN: gl.constexpr = FORM.BN
    w_bufs = gl.allocate_shared_memory(w_0.dtype, [S * 2, 64, _BK], w_0.layout)
    e_bufs = gl.allocate_shared_memory(e_0.dtype, [S, 1, _BK, BN], e_0.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = (w_bufs, e_bufs, full, empty)
    gl.static_assert(S < 2 * SLOTS, "messages would be overwritten, see gluon_mail")
    mail = open_mail()
    result = (out, out)
    if out is not None:
        shape: gl.constexpr = out.block_type.shape
        pieces: gl.constexpr = [4, shape[0], shape[1], shape[2]]
        staging = gl.allocate_shared_memory(out.dtype, pieces, out.layout)
        result = (out, staging)
    operands = (w_0, e_0, w_1, e_1, w_2, e_2, w_3, e_3)
    lives = (
        live_rows(live_0, rows_0),
        live_rows(live_1, rows_1),
        live_rows(live_2, rows_2),
        live_rows(live_3, rows_3),
        late,
    )
    tree = (
        lives,
        (steps_0, steps_1, steps_2, steps_3),
        (own_0, own_1, own_2, own_3),
        (index_0, index_1, index_2, index_3, index_4, index_5),
        (base_0, base_1, base_2, base_3, base_4, base_5),
    )
    rows = (rows_0, rows_1, rows_2, rows_3)
    sizes = (M, rows[FORM.levels - 1], lives[FORM.levels - 1])
    work = (counter_ptr, flags_ptr)
    gl.warp_specialize(
        [
            (consume, (0, ring, mail, result, partial_ptr, flags_ptr, sizes, FORM)),
            (consume, (1, ring, mail, result, partial_ptr, flags_ptr, sizes, FORM)),
            (produce, (operands, ring, mail, tree, work, FORM)),
        ],
        [4, 1],
        [FORM.consumer_registers, FORM.producer_registers],
    )
