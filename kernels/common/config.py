"""Tiles of the segment kernels: frozen, chosen by row width and dtype, never by row counts."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentTile:
    """How a program walks over segments of rows.

    A program takes `segments` short segments at once, `rows` rows of each a step, or one piece of
    a long segment, `segments * rows` rows a step; in both cases `columns` columns of them.

    Attributes:
        segments: S, short segments a program.
        rows: R, rows of each that are loaded at once.
        columns: C, a row's columns that a program covers.
        short: T, the most rows of a short segment; longer ones are cut into pieces.
        piece: P, rows of a piece. At least 2 T: then a segment of more than T rows has no more
            pieces than rows whose number is a multiple of T, and those rows number the pieces.
        num_warps: warps a program.
    """

    segments: int
    rows: int
    columns: int
    short: int
    piece: int
    num_warps: int

    @property
    def step_rows(self) -> int:
        """Rows of one segment that are loaded at once."""
        return self.segments * self.rows

    def __post_init__(self) -> None:
        for name in ("segments", "rows", "columns"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two; got {size}")
        if self.short % self.rows or self.piece % self.short or self.piece < 2 * self.short:
            raise ValueError(f"short must divide piece at least twice: {self}")


_TILE_BYTES = 8192
"""Loaded a step by a program: with 4 warps 64 bytes (four 16-byte accesses) a thread: eight such
programs fit an SM and keep 64 KiB in flight, more than the 26 KiB that latency times bandwidth asks
for on an H200."""

_COLUMN_BYTES = 256
"""Two cache lines of a row: a full line whatever the row's alignment."""

_ROWS = {1: 1, 2: 2, 4: 2, 8: 4, 16: 4, 32: 4, 64: 8, 128: 8, 256: 16, 512: 16, 1024: 32}
"""R by S * R; 32 beyond. Few enough that segments of a handful of rows leave few lanes idle, enough
that a narrow row's run of R rows is as long as a 32-byte sector."""


@functools.cache
def segment_tile(width: int, itemsize: int) -> SegmentTile:
    """The tile for rows of `width` elements of `itemsize` bytes."""
    columns = min(1 << (width - 1).bit_length(), _COLUMN_BYTES // itemsize)
    block = _TILE_BYTES // itemsize // columns
    rows = _ROWS.get(block, 32)
    # 16 steps at most for a short segment, since its neighbours wait for it; 8 for a piece.
    return SegmentTile(
        segments=block // rows,
        rows=rows,
        columns=columns,
        short=16 * rows,
        piece=max(8 * block, 32 * rows),
        num_warps=_warps(width, itemsize),
    )


def _warps(width: int, itemsize: int) -> int:
    """Twice as many for rows that take an address an element, so that addresses fit registers."""
    return 4 if width * itemsize % 16 == 0 else 8


@dataclass(frozen=True)
class RowTile:
    """Rows and columns that a program of `broadcast` copies.

    Attributes:
        rows: a power of two.
        columns: a power of two.
        num_warps: warps a program.
    """

    rows: int
    columns: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.rows & (self.rows - 1) or self.columns & (self.columns - 1):
            raise ValueError(f"rows and columns must be powers of two: {self}")


@functools.cache
def row_tile(width: int, itemsize: int) -> RowTile:
    """The tile for copying rows of `width` elements of `itemsize` bytes."""
    columns = min(1 << (width - 1).bit_length(), 1024 // itemsize)
    return RowTile(_TILE_BYTES // itemsize // columns, columns, _warps(width, itemsize))
