"""Segments cut into tiles, against a naive loop."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.plans import cut_segments


def naive(offsets, tile_rows, longest_first, cost):
    tiles = []
    for segment, (start, end) in enumerate(pairwise(offsets)):
        while start < end:
            rows = min(tile_rows, end - start)
            tiles.append((segment, start, rows))
            start += rows
    if longest_first:
        tiles.sort(key=lambda tile: -tile[2] * (1 if cost is None else cost[tile[0]]))
    return tiles


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_tiles_of_random_segments(data):
    lengths = data.draw(st.lists(st.integers(0, 30), max_size=12))
    start = data.draw(st.sampled_from([0, 10]))
    offsets = [start + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tile_rows = data.draw(st.integers(1, 40))
    longest_first = data.draw(st.booleans())
    n = len(lengths)
    cost = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=n, max_size=n))
    dtype = data.draw(st.sampled_from([np.int64, np.int32, np.uint16]))
    tiles = cut_segments(
        np.array(offsets, dtype), tile_rows, longest_first=longest_first, cost=cost
    )
    assert all(field.dtype == np.int32 for field in tiles)
    assert all(field.flags.c_contiguous for field in tiles)
    found = list(zip(*(field.tolist() for field in tiles), strict=True))
    assert found == naive(offsets, tile_rows, longest_first, cost)


def test_one_huge_segment_beside_many_small_ones():
    offsets = np.concatenate([[0], np.cumsum([100_000] + [1] * 1000)])
    tiles = cut_segments(offsets, 64, longest_first=True)
    assert len(tiles.rows) == 1563 + 1000
    assert tiles.rows.sum() == 101_000
    assert tiles.segment[:1563].tolist() == [0] * 1563
    assert tiles.segment[1563:].tolist() == list(range(1, 1001))


def test_costs_that_pass_int32():
    tiles = cut_segments([0, 3, 5], 3, longest_first=True, cost=[2**30, 2**31 - 1])
    assert tiles.segment.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("offsets", "tile_rows", "cost", "message"),
    [
        ([0, 5, 3], 2, None, "offsets must not decrease; got 3 after 5 at position 2"),
        ([0, 9, 1, 4], 2, None, "offsets must not decrease; got 1 after 9 at position 2"),
        ([5, 2], 2, None, "offsets must not decrease; got 2 after 5 at position 1"),
        ([], 2, None, "offsets must have at least one entry; got none"),
        ([-1, 2], 2, None, r"offsets must be from 0 to 2\^31 - 1; got -1 to 2"),
        ([0, 2**31], 2**20, None, r"offsets must be from 0 to 2\^31 - 1; got 0 to 2147483648"),
        ([0, 1.5], 2, None, "offsets must be a 1-D array of integers; got dtype float64"),
        ([0, 1], 0, None, "tile_rows must be at least 1; got 0"),
        ([0, 1], 1.5, None, "tile_rows must be an integer; got 1.5"),
        ([0, 1], 2, [1, 2], "cost must have one entry for each of the 1 segments; got 2 entries"),
        ([0, 1], 2, [-1], r"cost must be from 0 to 2\^31 - 1; got -1 at position 0"),
    ],
)
def test_what_cannot_be_cut(offsets, tile_rows, cost, message):
    with pytest.raises(TreeError, match=message):
        cut_segments(offsets, tile_rows, longest_first=True, cost=cost)
