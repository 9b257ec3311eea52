"""Tiles by number, launches by tree: arithmetic that the Hopper kernel and this file share."""

import itertools

import pytest

from ikbo_tree.kernels.linear_compression.gluon_schedule import (
    EDGES,
    JOIN,
    LEVELS,
    launches,
    place,
    tile_count,
)


def tiles(lives, late, row_blocks, column_blocks, *, result=True):
    """(level, row, column block, first row block, pair) of every number, from the kernel's code."""
    padded = [*lives, *[0] * (LEVELS - len(lives))]
    last = len(lives) - 1 if result else -1
    count = tile_count(sum(lives), row_blocks, column_blocks)
    found = [place.fn(n, *padded, late, last, row_blocks, column_blocks) for n in range(count)]
    for beyond in (count, count + 1, count + 1000):
        assert place.fn(beyond, *padded, late, last, row_blocks, column_blocks)[0] == -1
    return found


def every_tile(lives, row_blocks, column_blocks):
    """The same by loops, in no order."""
    for level, rows in enumerate(lives):
        for row, column in itertools.product(range(rows), range(column_blocks)):
            for block in range(0, row_blocks, 2):
                yield level, row, column, block, int(block + 1 < row_blocks)


LIVES = [
    [1],
    [5],
    [0, 0],
    [2, 7],
    [3, 0],
    [0, 3],
    [1, 4, 9],
    [2, 0, 0, 5],
    [1, 2, 3, 40],
    [4, 3, 2, 1],
]


@pytest.mark.parametrize("lives", LIVES, ids=str)
@pytest.mark.parametrize("row_blocks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("column_blocks", [1, 2, 3])
@pytest.mark.parametrize("result", [True, False])
def test_every_tile_has_one_number(lives, row_blocks, column_blocks, result):
    for late in (0, 1, 3, 33):
        found = tiles(lives, late, row_blocks, column_blocks, result=result)
        assert sorted(found) == sorted(every_tile(lives, row_blocks, column_blocks))
        levels = [tile[0] for tile in found]
        assert levels == sorted(levels), "a parent's number is lower than its children's"


@pytest.mark.parametrize("row_blocks", [2, 7])
def test_tiles_of_a_row_are_neighbours(row_blocks):
    found = tiles([2, 6], 0, row_blocks, 2)
    seen = [tile[:3] for tile in found]
    runs = [key for key, _ in itertools.groupby(seen)]
    assert len(runs) == len(set(runs))


def test_late_singles_come_last():
    found = tiles([1, 5], 2, 7, 1)
    singles = [number for number, tile in enumerate(found) if tile[4] == 0]
    assert singles[-2:] == [len(found) - 2, len(found) - 1]
    assert [found[n][1] for n in singles] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("producers", "sizes"),
    [
        ([[]], [1]),
        ([[], [0]], [2]),
        ([[], [0], [1], [2]], [4]),
        ([[], [0], [1], [2], [3], [4]], [4, 2]),
        ([[], [], [], [0, 1, 2], [3]], [4, 1]),
        ([[], [0], [0, 1], [0, 1, 2], [1, 2, 3]], [4, 1]),
        ([[], [], [], [], [1, 2, 3], [0, 3, 4], [0, 1, 5]], [4, 2, 1]),
    ],
)
def test_launches_take_levels_in_order(producers, sizes):
    plan = launches(producers)
    assert [launch.levels for launch in plan] == sizes
    edges = []
    for launch in plan:
        assert launch.levels <= LEVELS
        assert len(launch.edges) <= EDGES
        for edge in launch.edges:
            assert edge.turn < JOIN
            edges.append((launch.first + edge.slot, edge.turn, edge.producer))
    expected = [(s, t, p) for s, below in enumerate(producers) for t, p in enumerate(below)]
    assert edges == expected
    assert [launch.first for launch in plan] == list(itertools.accumulate([0, *sizes[:-1]]))
