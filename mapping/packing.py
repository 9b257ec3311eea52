"""Padded batches and nested lists: how they say how many rows there are, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.integers import LIMIT, Integers, as_integers, as_rows, first


def from_mask(mask: Any, *, argument: str = "mask") -> tuple[Integers, Integers]:
    """Rows of a padded batch by a mask, which need not be a prefix of each request.

    `[[1, 0, 1], [0, 0, 0]]` gives lengths `[2, 0]` and positions `[0, 2]`.

    Args:
        mask: bool [B, N_max], true where there is a row.
        argument: its name in the caller's words.

    Returns:
        lengths: int64 [B].
        positions: [rows], place of each row in the flattened batch [B * N_max], ascending; int32,
            or int64 where B * N_max passes 2^31 - 1.

    Raises:
        TreeError: another dtype or rank.
    """
    array = np.asarray(mask)
    if array.ndim != 2:
        raise TreeError(argument, "must be [B, N_max]", f"shape {list(array.shape)}")
    if array.dtype != np.bool_:
        raise TreeError(argument, "must be bool", f"dtype {array.dtype}")
    lengths = np.count_nonzero(array, axis=1).astype(np.int64, copy=False)
    return lengths, _narrow(np.flatnonzero(array), array.size)


def from_lengths(lengths: Any, width: int, *, argument: str = "lengths") -> Integers:
    """Positions of the rows of a padded batch whose real rows come first.

    `[2, 0, 1]` with width 3 gives `[0, 1, 6]`.

    Args:
        lengths: [B], rows of each request, any integer dtype.
        width: N_max.
        argument: the lengths' name in the caller's words.

    Returns:
        Positions as `from_mask` has them.

    Raises:
        TreeError: a wrong dtype or rank, a length that is negative or above `width`.
    """
    array = as_integers(argument, lengths).astype(np.int64, copy=False)
    width = as_rows("width", width)
    at = first((array < 0) | (array > width))
    if at >= 0:
        raise TreeError(
            argument, f"must be from 0 to the width {width}", f"{array[at]} at position {at}"
        )
    ends = np.cumsum(array)
    skipped = np.arange(array.size) * width - (ends - array)
    positions = np.repeat(skipped, array)
    positions += np.arange(positions.size)
    return _narrow(positions, array.size * width)


def _narrow(positions: NDArray[np.int64], size: int) -> Integers:
    return positions.astype(np.int32) if size <= LIMIT + 1 else positions


def counts_from_nested(
    nested: Any, levels: Sequence[str], *, argument: str = "nested"
) -> list[NDArray[np.int64]]:
    """Counts of the levels below the root, from lists in lists.

    The entries of the outer list are the root's rows, their entries the rows of the next level, and
    so on; the entries of the innermost lists are the leaf rows, whatever they are. For three levels
    `[[["a", "b"], []], [["c"]]]` gives `[[2, 1], [2, 0, 1]]`.

    Args:
        nested: lists, tuples or arrays, as deep as there are levels.
        levels: names of the levels, root first.
        argument: the name of `nested` in the caller's words.

    Returns:
        For each of `levels[1:]` int64 [rows of the level above].

    Raises:
        TreeError: no list where a level needs one, or lists among leaf rows that are none.
    """
    if not _is_list(nested):
        raise TreeError(argument, f"must be a list of {levels[0]!r} rows", type(nested).__name__)
    counts: list[NDArray[np.int64]] = []
    rows = nested
    for level in levels[1:]:
        for at, row in enumerate(rows):
            if not _is_list(row):
                got = f"{type(row).__name__} at {_place(nested, len(counts), at)}"
                raise TreeError(argument, f"must hold a list of {level!r} rows here", got)
        counts.append(np.array([len(row) for row in rows], dtype=np.int64))
        rows = [entry for row in rows for entry in row]
    lists = [_is_list(row) for row in rows]
    if any(lists) and not all(lists):
        at = lists.index(not lists[0])
        got = f"{type(rows[at]).__name__} at {_place(nested, len(counts), at)}"
        raise TreeError(argument, "must be nested to the same depth everywhere", got)
    return counts


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _place(nested: Any, depth: int, at: int) -> str:
    """Where the entry number `at` of that depth is, as `[1][0]`."""
    entries = [(f"[{i}]", entry) for i, entry in enumerate(nested)]
    for _ in range(depth):
        entries = [
            (f"{place}[{i}]", entry) for place, row in entries for i, entry in enumerate(row)
        ]
    return entries[at][0]
