"""The matrix product of a stage, which gathers what other stages hand to it.

    out[b, m, n] = sum over k of A[m, k] * B[b, k, n] + sum over producers of P[index[b], m, n]
    out[m, n]    = sum over k of A[m, k] * B[k, n]    + sum of P[index[m], n] + bias[n]

The rows of a tree are the batch b in the first form (`linear_compression`), the rows m of one
product in the second (`linear`). Programs that share a tile of B run next to each other: the row
tiles of one batch entry, so that its B is read from memory once, while A stays in the L2 cache.

The sum over k has one order whatever the batch, so a row has the same bits in any (contract 4).
"""

# Tuples grow in kernels.
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows, parents_at
from ikbo_tree.kernels.common.triton_pieces import pieces_of

MAPS = ["index_0", "index_1", "index_2"]
"""Arguments for the maps of producers; one by one, since Triton compiles for what is in a tuple."""

STRIDES = [
    f"{operand}_{name}" for operand in "ab" for name in ("piece", "batch", "outer", "extent")
]
"""Arguments for where the operands lie, as `triton_operands.Matrices.strides` has them."""


@triton.jit(
    do_not_specialize=["rows", *STRIDES],
    do_not_specialize_on_alignment=["live_ptr", *MAPS],
)
def gemm_kernel(
    a,
    a_last,
    b,
    out,
    out_last,
    bias_ptr,
    partials,
    index_0,
    index_1,
    index_2,
    live_ptr,
    rows,
    sizes,
    a_piece,
    a_batch,
    a_outer,
    a_extent,
    b_piece,
    b_batch,
    b_outer,
    b_extent,
    FORM: tl.constexpr,
):
    """The tiles of the product, columns fastest, then the row tiles of a batch entry.

    Grid (batch * row tiles * column tiles,); with FORM.persistent any number of programs.

    Args:
        a: A [pieces, M, K], or [pieces, K, M] where transposed: pointer or descriptor.
        a_last: a descriptor of A with tiles of FORM.last; None without descriptors, or where
            all tiles have as many rows.
        b: B [pieces * batch, K, N], or [.., N, K] where transposed: pointer or descriptor.
        out: [batch, M, N], contiguous: pointer or descriptor.
        out_last: as `a_last`, or the same pointer.
        bias_ptr: [N], or None.
        partials: tuple of P [.., M, N] or [.., N], contiguous.
        index_0: map of the first of them [rows] int32; None: each row has its own.
        index_1: likewise, of the second.
        index_2: likewise, of the third.
        live_ptr: live count of rows [1] int32; None: all are.
        rows: allocated rows.
        sizes: (M, N, K); where the rows lie along m, M is not looked at.
        a_piece: A's stride from piece to piece divided by FORM.a_unit and, where the rows lie in
            A, by `rows`. This and what follows are of use where A is a pointer.
        a_batch: from batch entry to entry, divided by FORM.a_unit.
        a_outer: along the dimension that is not contiguous, likewise.
        a_extent: elements that may be read along the contiguous one, likewise.
        b_piece: B's.
        b_batch: B's.
        b_outer: B's.
        b_extent: B's.
        FORM: `gemm_forms.Form`.
    """
    M, N, K = sizes
    if FORM.rows_along == "m":
        M = rows
    sizes = (M, N, K)
    live = live_rows(live_ptr, rows)
    indexes = (index_0, index_1, index_2)
    args = (out, bias_ptr, partials, indexes)
    a_strides = (a_piece, a_batch, a_outer, a_extent)
    b_strides = (b_piece, b_batch, b_outer, b_extent)
    program = tl.program_id(0)
    if FORM.persistent:
        tiles = _tiles(rows, sizes, FORM)
        alive = _tiles(live, sizes, FORM)
        # Flat: the next tile's operands are on their way while this one is finished.
        for turn in tl.range(program, alive, tl.num_programs(0), flatten=True):
            place = _place(turn, live, rows, sizes, FORM)
            _live_tile(a, b, args, place, sizes, a_strides, b_strides, FORM, FORM.BM)
        if FORM.zero_dead:
            for turn in range(alive + program, tiles, tl.num_programs(0)):
                _dead_tile(out, _place(turn, live, rows, sizes, FORM), sizes, FORM, FORM.BM)
    else:
        place = _place(program, live, rows, sizes, FORM)
        if FORM.last == FORM.BM:
            _tile(a, b, args, place, sizes, a_strides, b_strides, FORM, FORM.BM)
        else:  # two products in one kernel, where the condition above is known when it is compiled
            if M - place[1] > FORM.last:
                _tile(a, b, args, place, sizes, a_strides, b_strides, FORM, FORM.BM)
            else:
                args = (out_last, bias_ptr, partials, indexes)
                _tile(a_last, b, args, place, sizes, a_strides, b_strides, FORM, FORM.last)


@triton.jit
def _tiles(rows, sizes, FORM: tl.constexpr):
    """How many tiles so many rows of the tree have."""
    M, N, _ = sizes
    along_m: tl.constexpr = FORM.rows_along == "m"
    height, entries = (rows, 1) if along_m else (M, rows)
    return tl.cdiv(height, FORM.BM) * entries * tl.cdiv(N, FORM.BN)


@triton.jit
def _place(number, live, rows, sizes, FORM: tl.constexpr):
    """Batch entry, first row and first column of the tile of that number; and what is live."""
    M, N, _ = sizes
    tiles_n = tl.cdiv(N, FORM.BN)
    tiles_m = tl.cdiv(M, FORM.BM)
    n0 = (number % tiles_n) * FORM.BN
    m0 = (number // tiles_n) % tiles_m * FORM.BM
    return number // (tiles_n * tiles_m), m0, n0, live, rows


@triton.jit
def _tile(a, b, args, place, sizes, a_strides, b_strides, FORM: tl.constexpr, BM: tl.constexpr):
    batch, m0, _, live, _ = place
    first = m0 if FORM.rows_along == "m" else batch
    if first < live:
        _live_tile(a, b, args, place, sizes, a_strides, b_strides, FORM, BM)
    elif FORM.zero_dead:
        _dead_tile(args[0], place, sizes, FORM, BM)


@triton.jit
def _live_tile(
    a, b, args, place, sizes, a_strides, b_strides, FORM: tl.constexpr, BM: tl.constexpr
):
    out, bias_ptr, partials, indexes = args
    # Asked for ahead of the product, so that nothing waits for it behind.
    parents = _parents(partials, indexes, place, FORM, BM)
    acc = _multiply(a, b, place, sizes, a_strides, b_strides, FORM, BM)
    gathered = (out, bias_ptr, partials, parents)
    _finish(acc, gathered, place, sizes, FORM, BM, FORM.BN, FORM.parts)


@triton.jit
def _dead_tile(out, place, sizes, FORM: tl.constexpr, BM: tl.constexpr):
    batch, m0, n0, live, rows = place
    PARTS: tl.constexpr = FORM.parts
    BN: tl.constexpr = FORM.BN // FORM.parts
    for part in tl.static_range(PARTS):
        beside = (batch, m0, n0 + part * BN, live, rows)
        _store(tl.zeros((BM, BN), tl.float32), out, beside, sizes, FORM, BM, BN)


@triton.jit
def _parents(partials, indexes, place, FORM: tl.constexpr, BM: tl.constexpr):
    """Tuple of the rows of the partials, int64: [BM], or one for the whole tile."""
    batch, m0, _, live, _ = place
    parents = ()
    for i in tl.static_range(len(partials)):
        if FORM.rows_along == "m":
            offs_m = m0 + tl.arange(0, BM)
            found = parents_at(indexes[i], offs_m, offs_m < live)
        else:
            found = parents_at(indexes[i], batch, batch < live)
        parents = parents + (found,)  # noqa: RUF005 - Triton has no unpacking
    return parents


@triton.jit
def _multiply(a, b, place, sizes, a_strides, b_strides, FORM: tl.constexpr, BM: tl.constexpr):
    batch, m0, n0, _, rows = place
    M, N, K = sizes
    BN: tl.constexpr = FORM.BN
    BK: tl.constexpr = FORM.BK
    PRODUCTS: tl.constexpr = FORM.a_pieces + FORM.b_pieces - 1
    rows_of_a = rows if FORM.rows_along == "m" else 1
    rows_of_b = 1 if FORM.rows_along == "m" else rows
    steps = tl.cdiv(K, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps * PRODUCTS):
        a_piece, b_piece = pieces_of(step // steps, FORM.a_pieces, FORM.b_pieces)
        k0 = step % steps * BK
        if FORM.a_descriptor:
            x = load_described(a, a_piece, m0, k0, BM, BK, FORM.a_transposed)
        else:
            base = strided(a_piece * rows_of_a, a_strides[0], FORM.a_unit)
            x = load_strided(
                a + base, m0, k0, M, K, a_strides[2], a_strides[3], BM, BK, FORM.a_unit,
                FORM.a_transposed,
            )  # fmt: skip
        if FORM.b_descriptor:
            entry = b_piece * rows_of_b + batch
            y = load_described(b, entry, k0, n0, BK, BN, FORM.b_transposed)
        else:
            base = strided(b_piece * rows_of_b, b_strides[0], FORM.b_unit)
            base += strided(batch, b_strides[1], FORM.b_unit)
            y = load_strided(
                b + base, k0, n0, K, N, b_strides[2], b_strides[3], BK, BN, FORM.b_unit,
                FORM.b_transposed,
            )  # fmt: skip
        acc = tl.dot(x, y, acc, input_precision=FORM.precision)
    return acc


@triton.jit
def strided(at, stride, UNIT: tl.constexpr):
    """`at * stride * UNIT` in int64."""
    return tl.cast(at, tl.int64) * stride * UNIT


@triton.jit
def load_described(
    descriptor, entry, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr
):
    """A tile [ROWS, COLUMNS] of one entry of a descriptor of rank 3; T: stored [COLUMNS, ROWS].

    What lies outside of the entry is zero, never a neighbour's.
    """
    if T:
        return descriptor.load([entry, column, row]).reshape(COLUMNS, ROWS).trans()
    return descriptor.load([entry, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def load_strided(
    base,
    row,
    column,
    rows,
    columns,
    outer,
    extent,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    T: tl.constexpr,
):
    """A tile [ROWS, COLUMNS] at a pointer; T: stored [COLUMNS, ROWS]; zero outside.

    Args:
        base: pointer to the whole matrix.
        row: first row.
        column: first column.
        rows: rows of the matrix.
        columns: its columns.
        ROWS: rows of the tile.
        COLUMNS: its columns.
        T: whether rows are the contiguous dimension.
        outer: the stride that is not 1, divided by UNIT.
        extent: how many elements may be read along the contiguous dimension, at least its size,
            divided by UNIT.
        UNIT: see `gemm_forms.Operand`.
    """
    offs_row = row + tl.arange(0, ROWS)
    offs_column = column + tl.arange(0, COLUMNS)
    if T:
        at = offs_row[:, None] + (offs_column.to(tl.int64) * outer * UNIT)[None, :]
        mask = (offs_row < extent * UNIT)[:, None] & (offs_column < columns)[None, :]
    else:
        at = (offs_row.to(tl.int64) * outer * UNIT)[:, None] + offs_column[None, :]
        mask = (offs_row < rows)[:, None] & (offs_column < extent * UNIT)[None, :]
    return tl.load(base + at, mask=mask, other=0.0)


@triton.jit
def _finish(
    acc, args, place, sizes, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Adds bias and partials and stores, one group of columns after the other."""
    if PARTS == 1:
        out, bias_ptr, partials, parents = args
        acc = _add(acc, bias_ptr, partials, parents, place, sizes, FORM, BM, BN)
        _store(acc, out, place, sizes, FORM, BM, BN)
    else:
        left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        batch, m0, n0, live, rows = place
        beside = (batch, m0, n0 + BN // 2, live, rows)
        _finish(left, args, place, sizes, FORM, BM, BN // 2, PARTS // 2)
        _finish(right, args, beside, sizes, FORM, BM, BN // 2, PARTS // 2)


@triton.jit
def _add(
    acc, bias_ptr, partials, parents, place, sizes, FORM: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    _, m0, n0, live, _ = place
    M, N, _ = sizes
    offs_m = m0 + tl.arange(0, BM)
    offs_n = n0 + tl.arange(0, BN)
    inside = (offs_n < N)[None, :]
    if FORM.rows_along == "m":
        inside = (offs_m < live)[:, None] & inside
    else:
        inside = (offs_m < M)[:, None] & inside
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(len(partials)):
        if FORM.rows_along == "m":
            at = (parents[i] * N)[:, None] + offs_n[None, :]
        else:
            at = parents[i] * M * N + (offs_m * N)[:, None] + offs_n[None, :]
        acc += tl.load(partials[i] + at, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _store(acc, out, place, sizes, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    batch, m0, n0, live, _ = place
    M, N, _ = sizes
    offs_m = m0 + tl.arange(0, BM)
    if FORM.rows_along == "m" and FORM.zero_dead:
        acc = tl.where((offs_m < live)[:, None], acc, 0.0)
    if FORM.out_descriptor:
        out.store([batch, m0, n0], acc.to(out.dtype).reshape(1, BM, BN))
    else:
        offs_n = n0 + tl.arange(0, BN)
        row = tl.cast(batch, tl.int64) * M + offs_m
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        at = (row * N)[:, None] + offs_n[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
