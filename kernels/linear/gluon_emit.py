"""What a consumer does with a finished part of a tile, and with dead rows of the result."""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ikbo_tree.kernels.common.gluon_fragments import accumulator_layout, halves
from ikbo_tree.kernels.common.gluon_lib import cta_sync, tma_store
from ikbo_tree.kernels.linear.gluon_config import PIECE
from ikbo_tree.kernels.linear.gluon_mail import COLUMN, LIVE, OWN, read
from ikbo_tree.kernels.linear.gluon_rows import store_rows

_PIECE = gl.constexpr(PIECE)


@gluon.jit
def emit(
    output, partial_ptr, mail, number, part, first, second, row, result, sizes,
    FIRST: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Stores a part of a tile, columns FIRST on: of the result through staging, or of a partial.

    Args:
        output: see `gluon_consumer`.
        partial_ptr: the partial results.
        mail: see `gluon_mail`.
        number: of the tile's message.
        part: [64, columns] float32.
        first: a piece of shared memory that nobody reads any more, for the result.
        second: another, for parts of more than one piece.
        row: the part's first row in its level.
        result: whether the level is the tree's last.
        sizes: allocated and live rows of the result, and N in units.
        FIRST: first column of the part in the tile.
        FORM: `gluon_config.Form`.
    """
    column = read(mail, number, COLUMN) * FORM.BN
    if FORM.result == 0:
        _store(output, part, first, second, row, column + FIRST, sizes, FORM)
    elif FORM.result < 0:
        _keep(partial_ptr + column, mail, number, part, row, FIRST, FORM)
    else:
        if result:
            _store(output, part, first, second, row, column + FIRST, sizes, FORM)
        else:
            _keep(partial_ptr + column, mail, number, part, row, FIRST, FORM)


@gluon.jit
def _keep(at, mail, number, part, row, FIRST: gl.constexpr, FORM: gl.constexpr):
    own, live = read(mail, number, OWN), read(mail, number, LIVE)
    store_rows(at, part, own + row, live - row, FIRST, FORM.column_blocks * FORM.BN)


@gluon.jit
def _store(output, part, first, second, row, n, sizes, FORM: gl.constexpr):
    _, live, units = sizes
    PART: gl.constexpr = part.shape[1]
    if row + 64 > live:
        # Rows beyond are dead or do not exist. Whatever they held is not kept, NaN included.
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(PART)))
        part = gl.where((rows < live)[:, None], part, 0.0)
    if FORM.described:
        out = output[0]
        part = part.to(out.dtype)
        if PART == _PIECE:
            first.store(part)
        else:
            left, right = halves(part, PART)
            first.store(left)
            second.store(right)
        fence_async_shared()  # the copy engine sees the stores
        tma_store(out, [row, n], first)
        if PART > _PIECE:
            tma_store(out, [row, n + _PIECE], second)
    else:
        _store_by_threads(output[0], part, row, n, sizes[0], units, FORM)


@gluon.jit
def _store_by_threads(out_ptr, part, row, n, rows, units, FORM: gl.constexpr):
    """Where rows of the result are no multiple of 16 bytes."""
    PART: gl.constexpr = part.shape[1]
    if PART > 32:  # more pointers than registers
        left, right = halves(part, PART)
        _store_by_threads(out_ptr, left, row, n, rows, units, FORM)
        _store_by_threads(out_ptr, right, row, n + PART // 2, rows, units, FORM)
    else:
        L: gl.constexpr = accumulator_layout(PART)
        mine = row + gl.arange(0, 64, gl.SliceLayout(1, L))
        columns = n + gl.arange(0, PART, gl.SliceLayout(0, L))
        N = units * FORM.unit  # so that threads store pairs where they may
        pointers = (out_ptr + mine.to(gl.int64) * N)[:, None] + columns[None, :]
        inside = (mine < rows)[:, None] & (columns < N)[None, :]
        gl.store(pointers, part.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def zero_dead_rows(C: gl.constexpr, output, sizes, FORM: gl.constexpr):
    """Zeros to the row blocks of the result that have no live row, dealt out evenly."""
    rows, live, units = sizes
    out, staging, _ = output
    L: gl.constexpr = accumulator_layout(_PIECE)
    zeros = gl.zeros((64, _PIECE), gl.float32, L)
    tma.store_wait(0)
    cta_sync()
    if FORM.described:
        PIECES: gl.constexpr = min(2, FORM.BN // 64)
        piece = staging.index(PIECES * C)
        piece.store(zeros.to(out.dtype))
        fence_async_shared()
    first = (live + 63) // 64
    count = (rows + 63) // 64 - first
    for i in range(gl.program_id(0) * 2 + C, count, gl.num_programs(0) * 2):
        row = (first + i) * 64
        for n in range(0, FORM.column_blocks * FORM.BN, _PIECE):
            if FORM.described:
                tma_store(out, [row, n], piece)
            else:
                _store_by_threads(out, zeros, row, n, rows, units, FORM)
    tma.store_wait(0)  # shared memory must outlive the reads
