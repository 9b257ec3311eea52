"""Adds what blocks have left that shared the pieces of long segments."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import COUNTS, MAPS, key_span
from ikbo_tree.kernels.target_attention.triton_keys import (
    add_part,
    find_keys,
    find_queries,
    finish_part,
    piece_rows,
)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def add_pieces(
    dk_ptr,
    dv_ptr,
    part_ptr,
    offsets_ptr,
    live_ptr,
    extent_ptr,
    size,
    rows,
    owners,
    n_seed,
    kv_heads,
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PACKED: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """One item: its pieces first to last, and the gradients that they come to.

    part_ptr: [items, PIECES, 2, N, DP], sums of dK / scale and dV. Others as in the kernel that
    leaves them.
    """
    number = tl.program_id(0)
    kv_head = number % kv_heads
    owner, low = find_keys(
        extent_ptr,
        offsets_ptr,
        live_ptr,
        None,
        size,
        rows,
        owners,
        number // kv_heads,
        PACKED,
        False,
        N,
    )
    if owner < owners:
        _, count = find_queries(offsets_ptr, live_ptr, rows, owner, n_seed)
        each = piece_rows(count, PIECE, PIECES, M)
        pieces = tl.cdiv(count, each)
        start, length = key_span(extent_ptr, size, owner, PACKED)
        if (pieces > 1) & (low < length):
            total = part_ptr + number.to(tl.int64) * (PIECES * 2 * N * DP)
            for piece in range(1, pieces):
                add_part(total, total + piece * (2 * N * DP), 2 * N * DP, 16 * DP)
            tl.debug_barrier()
            end = size
            if PACKED:
                end = length
            unmasked = (None, None, None, None)
            finish_part(
                total,
                dk_ptr,
                start,
                low,
                end,
                length,
                unmasked,
                kv_heads,
                kv_head,
                scale,
                D,
                DP,
                N,
            )
            finish_part(
                total + N * DP,
                dv_ptr,
                start,
                low,
                end,
                length,
                unmasked,
                kv_heads,
                kv_head,
                1.0,
                D,
                DP,
                N,
            )
