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
    num_warps: int = 4

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


def _tile_bytes(width: int, itemsize: int) -> int:
    """Bytes that a program of four warps loads a step.

    64 a thread, four 16-byte accesses: eight programs fit an SM of an H200 and keep 64 KiB in
    flight, where latency times bandwidth asks for 26. Half of it for rows that are no multiple of
    16 bytes, where every element takes an address of its own: else registers spill.
    """
    return 8192 if width * itemsize % 16 == 0 else 4096


_COLUMN_BYTES = 256
"""Two cache lines of a row: a full line whatever the row's alignment."""

PROGRAMS = 1024
"""That look for pieces of long segments; each takes every 1024th. One wave on 132 SMs that hold
eight or more of them; more would only be more programs that find nothing."""


@functools.cache
def segment_tile(width: int, itemsize: int) -> SegmentTile:
    """The tile for rows of `width` elements of `itemsize` bytes."""
    columns = min(1 << (width - 1).bit_length(), _COLUMN_BYTES // itemsize)
    block = _tile_bytes(width, itemsize) // itemsize // columns
    # R rows are a 32-byte sector at least, and few, so that tiny segments leave few lanes idle.
    rows = min(block, max(4, 32 // (columns * itemsize)))
    # 32 steps at most for a short segment, since its neighbours wait for it; 8 for a piece.
    return SegmentTile(
        segments=block // rows,
        rows=rows,
        columns=columns,
        short=32 * rows,
        piece=max(8 * block, 64 * rows),
    )


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
    num_warps: int = 4

    def __post_init__(self) -> None:
        if self.rows & (self.rows - 1) or self.columns & (self.columns - 1):
            raise ValueError(f"rows and columns must be powers of two: {self}")


@functools.cache
def row_tile(width: int, itemsize: int) -> RowTile:
    """The tile for copying rows of `width` elements of `itemsize` bytes."""
    columns = min(1 << (width - 1).bit_length(), 1024 // itemsize)
    return RowTile(_tile_bytes(width, itemsize) // itemsize // columns, columns)
