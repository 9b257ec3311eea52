"""What a call needs before its launches, in one launch: counters and flags zero, W on aligned rows.

The copy engine wants rows of a multiple of 16 bytes, which 866 or 1178 columns are not. A launch a
weight and one to clear the flags would take 2 % of the time of a usual call.
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.triton_launch import ceil_div, launch

_WEIGHTS = 4
"""Weights that a launch copies: its kernel has so many arguments for them."""

_WORDS, _ROWS, _COLUMNS = 4096, 8, 256
"""Words that a program clears; rows and columns that it copies."""

_TENSORS = [f"{name}_{i}" for name in ("from", "to") for i in range(_WEIGHTS)]
_SIZES = [f"{name}_{i}" for name in ("K", "row", "column") for i in range(_WEIGHTS)]


def prepare(work: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Clears `work` and copies weights to aligned rows.

    Args:
        work: [words] int32.
        weights: [M, K] each, any strides, none empty.

    Returns:
        Copies [M, K], in rows of a multiple of 8 elements, contiguous but for that.
    """
    copies = [w.new_empty((w.shape[0], -(-w.shape[1] // 8) * 8))[:, : w.shape[1]] for w in weights]
    words = work.numel()
    for first in range(0, max(1, len(weights)), _WEIGHTS):
        given, to = weights[first : first + _WEIGHTS], copies[first : first + _WEIGHTS]
        missing = _WEIGHTS - len(given)
        programs = ceil_div(words, _WORDS) + sum(
            ceil_div(w.shape[0], _ROWS) * ceil_div(w.shape[1], _COLUMNS) for w in given
        )
        launch(
            prepare_kernel,
            (programs,),
            work,
            words,
            *given,
            *[None] * missing,
            *to,
            *[None] * missing,
            weights[0].shape[0] if weights else 0,
            *(w.shape[1] for w in given),
            *[0] * missing,
            *(w.stride(0) for w in given),
            *[0] * missing,
            *(w.stride(1) for w in given),
            *[0] * missing,
            WORDS=_WORDS,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
        words = 0
    return copies


@triton.jit(
    do_not_specialize=["words", "M", *_SIZES],
    do_not_specialize_on_alignment=["work_ptr", *_TENSORS],
)
def prepare_kernel(  # noqa: D417 - numbered arguments are described once
    work_ptr,
    words,
    from_0,
    from_1,
    from_2,
    from_3,
    to_0,
    to_1,
    to_2,
    to_3,
    M,
    K_0,
    K_1,
    K_2,
    K_3,
    row_0,
    row_1,
    row_2,
    row_3,
    column_0,
    column_1,
    column_2,
    column_3,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: the programs that clear, then those of each weight.

    Args:
        work_ptr: [words] int32.
        words: how many.
        from_0: first weight [M, K_0], or None. And so on.
        to_0: its copy. And so on.
        M: rows of all weights.
        K_0: its columns. And so on.
        row_0: its stride from row to row. And so on.
        column_0: its stride from column to column. And so on.
        WORDS: that a program clears.
        ROWS: that a program copies.
        COLUMNS: likewise.
    """
    clearing = tl.cdiv(words, WORDS)
    at = tl.program_id(0)
    if at < clearing:
        offs = tl.cast(at, tl.int64) * WORDS + tl.arange(0, WORDS)
        tl.store(work_ptr + offs, tl.zeros((WORDS,), tl.int32), mask=offs < words)
    else:
        at -= clearing
        at = _copy(from_0, to_0, at, M, K_0, row_0, column_0, ROWS, COLUMNS)
        at = _copy(from_1, to_1, at, M, K_1, row_1, column_1, ROWS, COLUMNS)
        at = _copy(from_2, to_2, at, M, K_2, row_2, column_2, ROWS, COLUMNS)
        at = _copy(from_3, to_3, at, M, K_3, row_3, column_3, ROWS, COLUMNS)


@triton.jit
def _copy(from_ptr, to_ptr, at, M, K, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies tile `at` of a weight, if it has one; returns the number for the next weight."""
    if from_ptr is not None:
        across = tl.cdiv(K, COLUMNS)
        tiles = tl.cdiv(M, ROWS) * across
        if (at >= 0) & (at < tiles):
            m = (at // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            k = (at % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
            inside = (m < M) & (k < K)
            value = tl.load(from_ptr + m * row + k * column, mask=inside)
            tl.store(to_ptr + m * ((K + 7) // 8 * 8) + k, value, mask=inside)
        at -= tiles
    return at
