"""Which tiles a launch has, in which order, and which launches a tree takes.

A level's result [rows, M, N] is cut into row blocks of 64 rows of M and column blocks of BN columns
of N. A tile is a *pair*, row blocks 2 p and 2 p + 1 of one row of the tree, or a *single*, the last
one where their number is odd:

    row blocks of M = 433        0 1 | 2 3 | 4 5 | 6          tiles 0 .. 3; the last is a single

Tiles are numbered level after level, coarse first, within a level row after row, then by column
block, then by tile: all that share an E tile are neighbours. Programs take numbers in this order.
A tile waits for results of lower numbers only, and a program finishes its tiles in order, so the
lowest unfinished number never waits: no deadlock, however many programs run at a time.

The singles of the last `late` rows of the result come at the very end. They are shorter, so that
programs finish at about the same time.

Only live rows have tiles: the numbers follow from the live counts, on the device.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = 64
"""Rows of a row block: what a warpgroup multiplies at a time."""

LEVELS = 4
"""Most levels of a launch: its kernel has so many arguments for them."""

EDGES = 6
"""Most producers of all levels of a launch, for the same reason."""

JOIN = 3
"""Most producers of a level."""


@gluon.jit
def place(
    number,
    live_0,
    live_1,
    live_2,
    live_3,
    late,
    RESULT: gl.constexpr,
    ROW_BLOCKS: gl.constexpr,
    COLUMN_BLOCKS: gl.constexpr,
):
    """Where the tile of that number lies. Plain arithmetic: it is true of Python's integers, too.

    Args:
        number: from 0; any number beyond the last tile is none.
        live_0: live rows of the first level; 0 for levels that there are not.
        live_1: of the second.
        live_2: of the third.
        live_3: of the fourth.
        late: rows of the last level whose singles come at the end; 0 if the launch has no result.
        RESULT: number of the level that is the tree's last; -1 if it is not in this launch.
        ROW_BLOCKS: of a row of the tree.
        COLUMN_BLOCKS: likewise.

    Returns:
        Level (-1: there is no such tile), row, column block, first row block, 1 for a pair.
    """
    TILES = (ROW_BLOCKS + 1) // 2  # of a row and a column block
    PAIRS = ROW_BLOCKS // 2
    rows = live_0 + live_1 + live_2 + live_3
    if RESULT < 0 or TILES == PAIRS or PAIRS == 0:
        late = 0
    else:
        last = live_0
        if RESULT == 1:
            last = live_1
        if RESULT == 2:
            last = live_2
        if RESULT == 3:
            last = live_3
        if last < late:
            late = last
    mixed = (rows - late) * (TILES * COLUMN_BLOCKS)
    pairs = mixed + late * (PAIRS * COLUMN_BLOCKS)
    if number < mixed:
        at = number // (TILES * COLUMN_BLOCKS)
        rest = number % (TILES * COLUMN_BLOCKS)
        column = rest // TILES
        tile = rest % TILES
    else:
        if number < pairs:
            rest = number - mixed
            at = rows - late + rest // (PAIRS * COLUMN_BLOCKS + (PAIRS == 0))
            rest = rest % (PAIRS * COLUMN_BLOCKS + (PAIRS == 0))
            column = rest // (PAIRS + (PAIRS == 0))
            tile = rest % (PAIRS + (PAIRS == 0))
        else:
            at = rows - late + (number - pairs) // COLUMN_BLOCKS
            column = (number - pairs) % COLUMN_BLOCKS
            tile = TILES - 1
    level = 0
    row = at
    if at >= live_0:
        level = 1
        row = at - live_0
    if at >= live_0 + live_1:
        level = 2
        row = at - live_0 - live_1
    if at >= live_0 + live_1 + live_2:
        level = 3
        row = at - live_0 - live_1 - live_2
    if at >= rows:
        level = -1
    pair = 0
    if tile < PAIRS:
        pair = 1
    return level, row, column, tile * 2, pair


class Edge(NamedTuple):
    """That a level hands its result to another.

    Attributes:
        producer: number of the level, in the tree.
        slot: the consumer's number in its launch.
        turn: how many producers of the consumer come before.
    """

    producer: int
    slot: int
    turn: int


class Launch(NamedTuple):
    """The levels of one launch.

    Attributes:
        first: number of its first level, in the tree.
        levels: how many.
        edges: to these levels, from them or earlier ones.
    """

    first: int
    levels: int
    edges: tuple[Edge, ...]


def launches(producers: Sequence[Sequence[int]]) -> list[Launch]:
    """Cuts the levels of a tree, in order, into as few launches as the kernel's arguments allow.

    Args:
        producers: for each level the levels that hand it their result, at most `JOIN`.
    """
    found: list[Launch] = []
    first = 0
    while first < len(producers):
        edges: list[Edge] = []
        levels = 0
        for below in producers[first : first + LEVELS]:
            if len(edges) + len(below) > EDGES:
                break
            edges += [Edge(p, levels, turn) for turn, p in enumerate(below)]
            levels += 1
        found.append(Launch(first, levels, tuple(edges)))
        first += levels
    return found


def tile_count(rows: int, row_blocks: int, column_blocks: int) -> int:
    """Tiles of so many rows of the tree."""
    return rows * ((row_blocks + 1) // 2) * column_blocks
