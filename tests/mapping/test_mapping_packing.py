"""Padded batches and nested lists, against naive loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.packing import counts_from_nested, from_lengths, from_mask


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**36 - 1), st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_mask(batch, width, bits, transposed):
    rows = [[bool(bits >> (r * 6 + c) & 1) for c in range(width)] for r in range(batch)]
    mask = np.array(rows, dtype=bool).reshape(batch, width)
    if transposed:
        mask = np.asfortranarray(mask)
    lengths, positions = from_mask(mask)
    assert lengths.tolist() == [sum(row) for row in rows]
    expected = [r * width + c for r in range(batch) for c in range(width) if rows[r][c]]
    assert positions.tolist() == expected
    assert positions.dtype == np.int32


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(5, 7))
@settings(max_examples=60, deadline=None)
def test_lengths_are_a_mask_of_prefixes(lengths, width):
    positions = from_lengths(np.array(lengths, dtype=np.uint8), width)
    mask = np.arange(width) < np.array(lengths).reshape(-1, 1)
    expected_lengths, expected = from_mask(mask.reshape(len(lengths), width))
    assert positions.tolist() == expected.tolist()
    assert positions.dtype == np.int32
    assert expected_lengths.tolist() == lengths


def test_positions_past_int32_are_int64():
    width = 2**31 - 1
    assert from_lengths([0, 0, 2], width).tolist() == [2 * width, 2 * width + 1]
    assert from_lengths([0, 0, 2], width).dtype == np.int64
    assert from_lengths([3], width).dtype == np.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_mask(np.ones((2, 2))), r"mask must be bool; got dtype float64"),
        (lambda: from_mask(np.ones(2, dtype=bool)), r"mask must be \[B, N_max\]; got shape \[2\]"),
        (lambda: from_lengths([1, 4], 3), r"lengths .* the width 3; got 4 at position 1"),
        (lambda: from_lengths([-1], 3), r"lengths .* got -1 at position 0"),
        (lambda: from_lengths([1], -1), r"width must be from 0 to"),
        (lambda: from_lengths([0.5], 3), r"lengths must be a 1-D array of integers"),
    ],
)
def test_what_is_no_padding(call, message):
    with pytest.raises(TreeError, match=message):
        call()


NAMES = ("user", "vendor", "item", "part")


@given(st.integers(1, 4), st.data())
@settings(max_examples=80, deadline=None)
def test_nested_lists_of_any_depth(depth, data):
    rows = data.draw(st.integers(0, 4))
    counts = []
    for _ in range(depth - 1):
        counts.append(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
        rows = sum(counts[-1])
    nested = list(range(rows))
    for i, level in enumerate(reversed(counts)):
        whole = iter(nested)
        kind = tuple if i % 2 else list
        nested = [kind(next(whole) for _ in range(n)) for n in level]
    found = counts_from_nested(nested, NAMES[:depth])
    assert [level.tolist() for level in found] == counts
    assert all(level.dtype == np.int64 for level in found)


def test_leaves_may_be_anything_even_vectors():
    assert [c.tolist() for c in counts_from_nested([[[0.5, 1.0], [2.0]], []], NAMES[::2])] == [
        [2, 0]
    ]
    assert [c.tolist() for c in counts_from_nested(np.ones((2, 3, 4)), NAMES[::2])] == [[3, 3]]
    assert counts_from_nested([["ab", None, 3]], NAMES[::2])[0].tolist() == [3]


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ([[[1]], 2], r"must hold a list of 'vendor' rows here; got int at \[1\]"),
        ([[[1], []], [[], 7]], r"must hold a list of 'item' rows here; got int at \[1\]\[1\]"),
        ([["ab"]], r"must hold a list of 'item' rows here; got str at \[0\]\[0\]"),
        ([[[1, 2], [[3]]]], r"to the same depth everywhere; got list at \[0\]\[1\]\[0\]"),
        ([[[[1]], [2]]], r"to the same depth everywhere; got int at \[0\]\[1\]\[0\]"),
        (3, r"nested must be a list of 'user' rows; got int"),
    ],
)
def test_uneven_nesting_says_where(nested, message):
    with pytest.raises(TreeError, match=message):
        counts_from_nested(nested, NAMES[:3])
