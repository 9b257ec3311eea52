"""Which tiles a launch has, and in which order.

A level's result [rows, N] is cut into tiles of 128 rows and BN columns. They are numbered level
after level, coarse first; within a level the column blocks of the same rows are neighbours, so that
x is read from memory once. Programs take numbers in this order and finish their tiles in order. A
tile waits for tiles of lower numbers only, those of coarser levels, so the lowest unfinished number
never waits: no deadlock, however many programs run at a time.

Only live rows have tiles: the numbers follow from the live counts, on the device.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon

ROWS = 64
"""Rows of a row block: what a warpgroup multiplies at a time. A tile has two."""


@gluon.jit
def place(number, live_0, live_1, live_2, live_3, COLUMN_BLOCKS):
    """Where the tile of that number lies. Plain arithmetic: it is true of Python's integers, too.

    Args:
        number: from 0; any number beyond the last tile is none.
        live_0: live rows of the first level; 0 for levels that there are not.
        live_1: of the second.
        live_2: of the third.
        live_3: of the fourth.
        COLUMN_BLOCKS: of a level's result.

    Returns:
        Level (-1: there is no such tile), first row, column block.
    """
    end_0 = (live_0 + 127) // 128 * COLUMN_BLOCKS
    end_1 = end_0 + (live_1 + 127) // 128 * COLUMN_BLOCKS
    end_2 = end_1 + (live_2 + 127) // 128 * COLUMN_BLOCKS
    end_3 = end_2 + (live_3 + 127) // 128 * COLUMN_BLOCKS
    level = 0
    at = number
    if number >= end_0:
        level = 1
        at = number - end_0
    if number >= end_1:
        level = 2
        at = number - end_1
    if number >= end_2:
        level = 3
        at = number - end_2
    if number >= end_3:
        level = -1
        at = number - number
    return level, at // COLUMN_BLOCKS * 128, at % COLUMN_BLOCKS


def tile_count(rows: int, column_blocks: int) -> int:
    """Tiles of a level of so many rows."""
    return -(-rows // (2 * ROWS)) * column_blocks
