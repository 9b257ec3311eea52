"""Launches of the matrix kernels, for operands of any strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import Tile, form_of
from ikbo_tree.kernels.common.triton_gemm import MAPS, gemm_kernel
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import dot_precision, guard
from ikbo_tree.kernels.common.triton_operands import Matrices, storable, store_argument
from ikbo_tree.kernels.common.triton_weight_gradient import add_chunks, weight_gradient_kernel

Producers = Sequence[tuple[Tensor, Tensor | None]]
"""Partial results [rows of the producer, ...], each with its map [rows] int32; None: row to row."""


def multiply(
    a: Matrices,
    b: Matrices,
    out: Tensor,
    tile: Tile,
    *,
    rows_along: str,
    live: Tensor | None,
    zero_dead: bool,
    slots: int,
    bias: Tensor | None = None,
    producers: Producers = (),
) -> None:
    """`out = a @ b + bias + partials`, see `triton_gemm`.

    Args:
        a: [pieces, 1, M, K].
        b: [pieces, batch, K, N].
        out: [batch, M, N] or, with one batch entry, [M, N]; contiguous.
        tile: tile sizes.
        rows_along: `"batch"` or `"m"`: where the rows of the tree lie.
        live: live count of those rows.
        zero_dead: write zeros to dead rows, rather than nothing.
        slots: programs that the device runs at a time.
        bias: [N], contiguous.
        producers: what is added to each row; at most three.
    """
    (_, _, M, K), (_, batch, _, N) = a.data.shape, b.data.shape
    tile = tile if a.wide and b.wide else tile.narrow()
    rows = batch if rows_along == "batch" else M
    if out.numel() == 0:
        return
    maps = [index for _, index in producers] + [None] * (len(MAPS) - len(producers))
    last = tile.last_rows(M) if rows_along == "batch" else tile.BM
    described = a.form.descriptor and b.form.descriptor
    persistent = described and tile.persistent
    out_descriptor = described and tile.described_out and storable(out)
    form = form_of(
        tile, a.form, b.form, last, rows_along, precision=dot_precision(a.data.dtype),
        zero_dead=zero_dead, persistent=persistent, out_descriptor=out_descriptor,
    )  # fmt: skip
    tiles = batch * ceil_div(M, tile.BM) * ceil_div(N, tile.BN)
    programs = min(tiles, slots) if persistent else tiles

    def result(height: int) -> object:
        if not out_descriptor:
            return out
        return store_argument(out.view(batch, M, N), height, tile.BN // tile.parts)

    with guard(out):
        launch(
            gemm_kernel,
            (programs,),
            a.argument(tile.BM, tile.BK),
            a.argument(last, tile.BK) if last != tile.BM else None,
            b.argument(tile.BK, tile.BN),
            result(tile.BM),
            result(last) if last != tile.BM else None,
            bias,
            tuple(partial for partial, _ in producers),
            *maps,
            live,
            rows,
            (0 if rows_along == "m" else M, N, K),
            *a.strides,
            *b.strides,
            FORM=form,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def weight_gradient(
    a: Matrices,
    b: Matrices,
    tile: Tile,
    *,
    rows_along: str,
    live: Tensor | None,
    dtype: torch.dtype,
    slots: int,
) -> Tensor:
    """The sum over all rows of `a @ b`, see `triton_weight_gradient`.

    Args:
        a: [pieces, batch, M, L].
        b: [pieces, batch, L, N].
        tile: tile sizes.
        rows_along: `"batch"`, or `"k"`: the rows are what the product contracts.
        live: live count of the rows.
        dtype: of the result.
        slots: programs that the device runs at a time.

    Returns:
        [M, N].
    """
    (_, batch, M, L), N = a.data.shape, b.data.shape[3]
    tile = tile if a.wide and b.wide else tile.narrow()
    rows = batch if rows_along == "batch" else L
    if rows == 0 or M * N == 0 or L == 0:
        return torch.zeros((M, N), dtype=dtype, device=a.data.device)
    tiles = ceil_div(M, tile.BM) * ceil_div(N, tile.BN)
    chunk = chunk_rows(rows, tiles, slots, 1 if rows_along == "batch" else tile.BK)
    chunks = ceil_div(rows, chunk)
    parts = torch.empty((chunks, M, N), dtype=torch.float32, device=a.data.device)
    last = tile.last_rows(M)
    form = form_of(tile, a.form, b.form, last, rows_along, precision=dot_precision(a.data.dtype))
    with guard(parts):
        launch(
            weight_gradient_kernel,
            (chunks * tiles,),
            a.argument(tile.BM, tile.BK),
            a.argument(last, tile.BK) if last != tile.BM else None,
            b.argument(tile.BK, tile.BN),
            parts,
            live,
            rows,
            chunk,
            (M, N, 0 if rows_along == "k" else L),
            *a.strides,
            *b.strides,
            FORM=form,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return add_chunks(parts, dtype)


_LEAST_ROWS = 16
"""Rows of the shortest chunk: below, writing and adding partial sums costs more than it gives."""


def chunk_rows(rows: int, tiles: int, slots: int, step: int) -> int:
    """Rows a chunk, so that the device's last round of programs is as full as can be.

    Args:
        rows: rows to sum over.
        tiles: programs a chunk.
        slots: programs that run at a time.
        step: the chunk is a multiple of it.
    """
    best, idle = rows, 1.0
    for rounds in (1, 2, 3):
        chunks = max(1, rounds * slots // tiles)
        chunk = -(-max(_LEAST_ROWS, -(-rows // chunks)) // step) * step
        programs = -(-rows // chunk) * tiles
        unused = 1 - programs / (-(-programs // slots) * slots)
        if unused < idle - 0.05:
            best, idle = chunk, unused
    return best
