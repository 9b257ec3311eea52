"""One launch of the stages of `linear` on Hopper: up to four levels of a tree.

    P[l] = x[l] W[l]^T + sum of P[p][parents]        for all rows of level l, as `common/stages.py`

A program an SM, with three roles: a warp that loads (`gluon_producer`) and two warpgroups that
multiply (`gluon_consumer`). Tiles come by ticket, levels one after the other (`gluon_schedule`).
A tile's rows may point to any rows of a coarser level, so it waits until that level is finished,
not before its product is done if it is not: a counter a level of finished row blocks. Partial
results are in an order of their own (`gluon_rows`).

Barriers of a stage of the ring:

    full[s]    loading warp -> consumers. One arrival and the bytes of the stage.
    empty[s]   consumers -> loading warp, one arrival each, when its product over the stage is
               complete and, where it stages output in its x slot, the copy engine has read that.

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
from ikbo_tree.kernels.linear.gluon_config import BK
from ikbo_tree.kernels.linear.gluon_consumer import consume
from ikbo_tree.kernels.linear.gluon_mail import SLOTS, open_mail
from ikbo_tree.kernels.linear.gluon_producer import produce
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
    do_not_specialize=["units", *SIZES],
    do_not_specialize_on_alignment=["work_ptr", *INDEXES, *LIVES],
)
def stages_kernel(  # noqa: D417 - numbered arguments are described once
    x_0,
    w_0,
    x_1,
    w_1,
    x_2,
    w_2,
    x_3,
    w_3,
    out,
    bias_ptr,
    partial_ptr,
    work_ptr,
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
    units,
    FORM: gl.constexpr,
):
    """Grid: any number of programs, at most one an SM.

    Args:
        x_0: descriptor of x of the first level [rows, K], tiles of [64, BK]; None for levels that
            there are not. So `x_1` to `x_3`.
        w_0: of W [N, K], tiles of [BN, BK].
        out: the result [rows, N], a descriptor for tiles of [64, 64] or, unless FORM.described, a
            pointer; None where an other launch has it.
        bias_ptr: [N] and zeros up to a multiple of 8, or None.
        partial_ptr: all partial results [rows, column blocks, BN], see `gluon_rows`.
        work_ptr: [2 + levels, 32] int32, zero; left zero. Tickets, consumers that are done, row
            blocks that are finished of each level.
        index_0: map of the first edge [rows of the consumer] int32; None: row to row. And so on.
        live_0: live rows of the first level [1] int32; None: all are. And so on.
        rows_0: allocated rows of the first level; 0 for levels that there are not. And so on.
        steps_0: its steps over K, at least 2. And so on.
        own_0: its first row among all partial results. And so on.
        base_0: first row of the producer of the first edge among all partial results. And so on.
        units: N divided by FORM.unit.
        FORM: `gluon_config.Form`.
    """
    S: gl.constexpr = FORM.stages
    BN: gl.constexpr = FORM.BN
    x_bufs = gl.allocate_shared_memory(x_0.dtype, [S * 2, 64, _BK], x_0.layout)
    w_bufs = gl.allocate_shared_memory(w_0.dtype, [S, BN, _BK], w_0.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = (x_bufs, w_bufs, full, empty)
    gl.static_assert(S < 2 * (SLOTS - 1), "messages would be overwritten, see gluon_mail")
    mail = open_mail()
    output = (out, None, bias_ptr)
    if FORM.result >= 0 and FORM.described:
        PIECES: gl.constexpr = 2 * min(2, BN // 64)
        staging = gl.allocate_shared_memory(out.dtype, [PIECES, 64, 64], out.layout)
        output = (out, staging, bias_ptr)
    operands = (x_0, w_0, x_1, w_1, x_2, w_2, x_3, w_3)
    lives = (
        live_rows(live_0, rows_0),
        live_rows(live_1, rows_1),
        live_rows(live_2, rows_2),
        live_rows(live_3, rows_3),
    )
    tree = (
        lives,
        (steps_0, steps_1, steps_2, steps_3),
        (own_0, own_1, own_2, own_3),
        (index_0, index_1, index_2, index_3, index_4, index_5),
        (base_0, base_1, base_2, base_3, base_4, base_5),
    )
    rows = (rows_0, rows_1, rows_2, rows_3)
    sizes = (rows[FORM.levels - 1], lives[FORM.levels - 1], units)
    gl.warp_specialize(
        [
            (consume, (0, ring, mail, output, partial_ptr, work_ptr, sizes, FORM)),
            (consume, (1, ring, mail, output, partial_ptr, work_ptr, sizes, FORM)),
            (produce, (operands, ring, mail, tree, work_ptr, FORM)),
        ],
        [4, 1],
        [FORM.consumer_registers, FORM.producer_registers],
    )
