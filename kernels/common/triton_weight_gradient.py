"""The gradient of a weight: a matrix product summed over all rows, split into chunks of rows.

    out[s, m, n] = sum over the rows t of chunk s and l of A[t, m, l] * B[t, l, n]    (rows: batch)
    out[s, m, n] = sum over the rows l of chunk s of A[m, l] * B[l, n]                (rows: k)

The chunks are added in order afterwards (`add_chunks`), so that the sum has one order for a given
number of rows and no atomics (contract 8). Dead rows are left out.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.triton_gemm import STRIDES, load_described, load_strided, strided
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import guard, live_rows
from ikbo_tree.kernels.common.triton_pieces import pieces_of

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["rows", "chunk", *STRIDES],
    do_not_specialize_on_alignment=["live_ptr"],
)
def weight_gradient_kernel(
    a,
    a_last,
    b,
    out_ptr,
    live_ptr,
    rows,
    chunk,
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
    """One tile of one chunk; grid (chunks * row tiles * column tiles,), columns fastest.

    Args:
        a: A [pieces, batch, M, L], or [.., L, M] where transposed: pointer or descriptor.
        a_last: a descriptor of A with tiles of FORM.last, or None.
        b: B [pieces, batch, L, N], or [.., N, L] where transposed: pointer or descriptor.
        out_ptr: [chunks, M, N], contiguous.
        live_ptr: live count of rows [1] int32; None: all are.
        rows: allocated rows.
        chunk: rows a chunk; a multiple of FORM.BK where the rows lie along k.
        sizes: (M, N, L); where the rows lie along k, L is not looked at.
        a_piece: see `triton_gemm.gemm_kernel`; so for what follows.
        a_batch: A's.
        a_outer: A's.
        a_extent: A's.
        b_piece: B's.
        b_batch: B's.
        b_outer: B's.
        b_extent: B's.
        FORM: `gemm_forms.Form`.
    """
    M, N, _ = sizes
    tiles_n = tl.cdiv(N, FORM.BN)
    tiles_m = tl.cdiv(M, FORM.BM)
    program = tl.program_id(0)
    n0 = (program % tiles_n) * FORM.BN
    m0 = (program // tiles_n) % tiles_m * FORM.BM
    part = program // (tiles_n * tiles_m)
    a_strides = (a_piece, a_batch, a_outer, a_extent)
    b_strides = (b_piece, b_batch, b_outer, b_extent)
    live = live_rows(live_ptr, rows)
    first = part * chunk
    place = (m0, n0, part, first, tl.minimum(first + chunk, live), rows)
    if FORM.last == FORM.BM:
        _tile(a, b, out_ptr, place, sizes, a_strides, b_strides, FORM, FORM.BM)
    else:  # two products in one kernel, where the condition above is known when it is compiled
        if M - m0 > FORM.last:
            _tile(a, b, out_ptr, place, sizes, a_strides, b_strides, FORM, FORM.BM)
        else:
            _tile(a_last, b, out_ptr, place, sizes, a_strides, b_strides, FORM, FORM.last)


@triton.jit
def _tile(a, b, out_ptr, place, sizes, a_strides, b_strides, FORM: tl.constexpr, BM: tl.constexpr):
    m0, n0, part, first, end, rows = place
    M, N, L = sizes
    BN: tl.constexpr = FORM.BN
    BK: tl.constexpr = FORM.BK
    PRODUCTS: tl.constexpr = FORM.a_pieces + FORM.b_pieces - 1
    along_k: tl.constexpr = FORM.rows_along == "k"
    count = tl.maximum(end - first, 0)
    steps = tl.cdiv(count, BK) if along_k else tl.cdiv(L, BK)
    turns = steps if along_k else steps * count
    acc = tl.zeros((BM, BN), tl.float32)
    for turn in range(turns * PRODUCTS):
        step = turn // PRODUCTS
        a_piece, b_piece = pieces_of(turn % PRODUCTS, FORM.a_pieces, FORM.b_pieces)
        if along_k:
            row, l0, stop, entries = 0, first + step * BK, end, 1
        else:
            row, l0, stop, entries = first + step // steps, step % steps * BK, L, rows
        if FORM.a_descriptor:
            x = load_described(a, a_piece * entries + row, m0, l0, BM, BK, FORM.a_transposed)
        else:
            base = strided(a_piece * rows, a_strides[0], FORM.a_unit)
            base += strided(row, a_strides[1], FORM.a_unit)
            x = load_strided(
                a + base, m0, l0, M, stop, a_strides[2], a_strides[3], BM, BK, FORM.a_unit,
                FORM.a_transposed,
            )  # fmt: skip
            if along_k and not FORM.a_transposed:
                x = tl.where((l0 + tl.arange(0, BK) < stop)[None, :], x, 0.0)
        if FORM.b_descriptor:
            y = load_described(b, b_piece * entries + row, l0, n0, BK, BN, FORM.b_transposed)
        else:
            base = strided(b_piece * rows, b_strides[0], FORM.b_unit)
            base += strided(row, b_strides[1], FORM.b_unit)
            y = load_strided(
                b + base, l0, n0, stop, N, b_strides[2], b_strides[3], BK, BN, FORM.b_unit,
                FORM.b_transposed,
            )  # fmt: skip
            if along_k and FORM.b_transposed:
                y = tl.where((l0 + tl.arange(0, BK) < stop)[:, None], y, 0.0)
        acc = tl.dot(x, y, acc, input_precision=FORM.precision)
    offs_m = m0 + tl.arange(0, BM)
    offs_n = n0 + tl.arange(0, BN)
    at = part.to(tl.int64) * M * N + (offs_m * N)[:, None] + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def add_chunks(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] in the dtype, the sum over the chunks of float32 parts [chunks, M, N], in order."""
    chunks, n = parts.shape[0], parts[0].numel()
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    with guard(parts):
        grid = (ceil_div(n, _BLOCK),)
        launch(_add_kernel, grid, parts, out, chunks, n, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize=["chunks"])
def _add_kernel(parts_ptr, out_ptr, chunks, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    total = tl.load(parts_ptr + offs, mask=mask, other=0.0)
    for i in range(1, chunks):
        total += tl.load(parts_ptr + tl.cast(i, tl.int64) * n + offs, mask=mask, other=0.0)
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)
