"""Tiles of the norm's kernels: frozen, chosen by the parts' widths, never by row counts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

LIMIT = 8192
"""Columns, each part's rounded up to a power of two, that a program can have in registers: 16 a
thread of 512, beside as many of the gradient and of the sums over rows."""

PROGRAMS = 1024
"""Of backward, at most: each has a row of sums for the weight and one for the bias, which are added
up afterwards. Eight of four warps on each of 132 SMs."""

STEPS = 8
"""Steps that a program of backward takes at least, so that these rows stay few beside its own."""


@dataclass(frozen=True)
class NormTile:
    """Whole rows that a program works on.

    Attributes:
        columns: of each part, a power of two.
        rows: R, rows of a step of backward, a power of two; forward takes twice as many.
        num_warps: warps a program.
    """

    columns: tuple[int, ...]
    rows: int
    num_warps: int

    def __post_init__(self) -> None:
        for size in (*self.columns, self.rows):
            if size < 1 or size & (size - 1):
                raise ValueError(f"columns and rows must be powers of two: {self}")


@functools.cache
def norm_tile(widths: tuple[int, ...]) -> NormTile:
    """The tile for parts of these widths."""
    columns = tuple(1 << max(0, width - 1).bit_length() for width in widths)
    total = sum(columns)
    # 16 elements a thread: with 16 of the gradient and 32 of sums that is half of what it has.
    rows = max(1, 1 << (2048 // total).bit_length() - 1) if total <= 2048 else 1
    warps = min(16, max(4, 1 << ((total - 1) // 512).bit_length()))
    return NormTile(columns, rows, warps)
