"""From counts or parents to the packed maps of a tree.

Callers' data is checked here, once; past this module every map is known to be in range.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping import first_trees
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.integers import Integers, as_integers, as_rows, first
from ikbo_tree.mapping.layout import (
    Allocate,
    Int32,
    Maps,
    Packed,
    allocate_array,
    field_sizes,
)
from ikbo_tree.mapping.structure import Structure

__all__ = [
    "TableMaps",
    "as_integers",
    "compose",
    "counts_from_offsets",
    "loops",
    "pack_counts",
    "pack_parents",
    "table_maps",
]

_NONE = np.empty(0, dtype=np.int64)
_LOADING = threading.Lock()


@cache
def loops() -> ModuleType:
    """The compiled loops; numba is imported, and its registries are filled, at the first call.

    That makes many objects that stay, and beside torch's own the garbage collector looks at them
    all again and again: half of the first tree's time (0.43 s, 0.22 s without).
    """
    with _LOADING:
        collects = gc.isenabled()
        gc.disable()
        try:
            from ikbo_tree.mapping import loops as module

            module.count_rows(np.array([-1]), _NONE, 0, np.empty(1, dtype=np.int64))
        finally:
            if collects:
                gc.enable()
    return module


def _counting(counts: int) -> ModuleType:
    """`loops()`, or `first_trees` while it does and numba is not loaded anyway."""
    if "ikbo_tree.mapping.loops" not in sys.modules and first_trees.suffices(counts):
        return first_trees
    return loops()


class TableMaps(NamedTuple):
    """Maps from a level and its descendants to the rows of a side table, in one buffer.

    Fields: `live` [1], the table's live rows; then for each of `levels` `index` [capacity of the
    level], `offsets` [capacity of the table + 1], `order` [capacity of the level] (see `Maps`).

    Attributes:
        buffer: int32 [sum(sizes)].
        sizes: lengths of the fields.
        levels: positions of the level the table hangs off and of its descendants.
    """

    buffer: Int32
    sizes: tuple[int, ...]
    levels: tuple[int, ...]

    def maps(self, level: int) -> Maps:
        """Views of the maps from `level` (a position among the tree's levels) to the table."""
        at = 1 + 3 * self.levels.index(level)
        ends = list(accumulate(self.sizes))
        index, offsets, order = (self.buffer[ends[i - 1] : ends[i]] for i in range(at, at + 3))
        return Maps(index, offsets, order)


def pack_counts(
    structure: Structure,
    counts: Sequence[Any],
    root_rows: int | None,
    *,
    capacity: Sequence[int | None] | None = None,
    allocate: Allocate | None = None,
) -> Packed:
    """The sorted tree whose rows have so many children.

    Args:
        structure: the levels.
        counts: for each of `structure.levels[1:]` one entry for each row of its parent level, any
            integer dtype.
        root_rows: rows of the root; None: as many as the counts of its first child level.
        capacity: allocated rows of each level; None, for all or for one: as many as there are rows.
        allocate: gives the buffer; None: numpy does.

    Raises:
        TreeError: counts of a wrong dtype, rank or length, negative counts, more than 2^31 - 1 rows
            in a level, a capacity below the rows.
    """
    arrays = [
        as_integers(f'counts["{level}"]', array)
        for level, array in zip(structure.levels[1:], counts, strict=True)
    ]
    if root_rows is None:
        if not arrays:
            raise TreeError("root_rows", "must be given where no level is below the root", "None")
        root_rows = arrays[0].size
    else:
        root_rows = as_rows("root_rows", root_rows)
    flat: NDArray[np.int64]
    if len(arrays) == 1:
        flat = arrays[0].astype(np.int64, copy=False)
    else:
        flat = np.concatenate(arrays or [_NONE], dtype=np.int64)
    live = np.empty(len(structure.levels), dtype=np.int64)
    how = _counting(flat.size)
    wrong = how.count_rows(structure.parent_array, flat, root_rows, live)
    rows = tuple(live.tolist())
    for i, array in enumerate(arrays, start=1):
        if array.size != rows[structure.parent[i]] or i == wrong:
            _explain_counts(structure.levels, structure.parent, i, array, rows)
    return _packed_counts(structure, flat, live, rows, capacity, allocate, how)


def _packed_counts(
    structure: Structure,
    flat: NDArray[np.int64],
    live: NDArray[np.int64],
    rows: tuple[int, ...],
    capacity: Sequence[int | None] | None,
    allocate: Allocate | None,
    how: ModuleType,
) -> Packed:
    allocated, allocated_array = _allocated(structure, rows, live, capacity)
    sizes = field_sizes(structure, allocated, True)
    buffer = (allocate or allocate_array)(sum(sizes))
    how.fill_counts(structure.pair_table, live, allocated_array, flat, buffer)
    return Packed(structure, buffer, sizes, rows, allocated, True)


def _explain_counts(
    levels: tuple[str, ...],
    parent: tuple[int, ...],
    i: int,
    counts: Integers,
    rows: tuple[int, ...],
) -> None:
    """Raises what is wrong with the counts of level `i`, all earlier ones being right."""
    argument = f'counts["{levels[i]}"]'
    above = rows[parent[i]]
    if counts.size != above:
        rule = f"must have one entry for each of the {above} rows of {levels[parent[i]]!r}"
        raise TreeError(argument, rule, f"{counts.size} entries")
    at = first(counts < 0)
    if at >= 0:
        raise TreeError(argument, "must not be negative", f"{counts[at]} at position {at}")
    total = sum(counts.tolist())
    raise TreeError(argument, "must add up to at most 2^31 - 1 rows", str(total))


def _allocated(
    structure: Structure,
    rows: tuple[int, ...],
    live: NDArray[np.int64],
    capacity: Sequence[int | None] | None,
) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    if capacity is None:
        return rows, live
    allocated = tuple(
        needed if n is None else as_rows(f'capacity["{level}"]', n)
        for level, n, needed in zip(structure.levels, capacity, rows, strict=True)
    )
    for level, n, needed in zip(structure.levels, allocated, rows, strict=True):
        if n < needed:
            rule = f"must be at least the level's {needed} rows"
            raise TreeError(f'capacity["{level}"]', rule, str(n))
    return allocated, np.array(allocated, dtype=np.int64)


def pack_parents(
    structure: Structure,
    parents: Sequence[Any],
    root_rows: int,
    *,
    capacity: Sequence[int | None] | None = None,
    allocate: Allocate | None = None,
) -> Packed:
    """The tree whose rows lie below these rows; sorted if all parents are non-decreasing.

    Args:
        structure: the levels.
        parents: for each of `structure.levels[1:]` the parent row of each of its rows, any integer
            dtype.
        root_rows: rows of the root.
        capacity: allocated rows of each level; None, for all or for one: as many as there are rows.
        allocate: gives the buffer; None: numpy does.

    Raises:
        TreeError: parents of a wrong dtype or rank or out of range, more than 2^31 - 1 rows in a
            level, a capacity below the rows.
    """
    rows = [as_rows("root_rows", root_rows)]
    arrays: list[Integers] = []
    for level, array in zip(structure.levels[1:], parents, strict=True):
        arrays.append(as_integers(f'parents["{level}"]', array))
        rows.append(as_rows(f'rows of parents["{level}"]', arrays[-1].size))
    above = [rows[p] for p in structure.parent[1:]]
    flat = np.empty(sum(above), dtype=np.int64)
    read, in_order = 0, True
    for i, (array, n) in enumerate(zip(arrays, above, strict=True), start=1):
        state = loops().tally(array, flat[read : read + n])
        if state >= 0:
            name = structure.levels[structure.parent[i]]
            raise TreeError(
                f'parents["{structure.levels[i]}"]',
                f"must be rows of {name!r}, from 0 to {n - 1}"
                if n
                else f"must be empty: {name!r} has no rows",
                f"{array[state]} at position {state}",
            )
        in_order = in_order and state == loops().SORTED
        read += n
    live = np.array(rows, dtype=np.int64)
    if in_order:
        return _packed_counts(structure, flat, live, tuple(rows), capacity, allocate, loops())
    allocated, allocated_array = _allocated(structure, tuple(rows), live, capacity)
    sizes = field_sizes(structure, allocated, False)
    buffer = (allocate or allocate_array)(sum(sizes))
    packed = Packed(structure, buffer, sizes, tuple(rows), allocated, False)
    for i, array in enumerate(arrays, start=1):
        packed.maps(i, structure.parent[i]).index[: array.size] = array
    loops().fill_unsorted(structure.pair_table, live, allocated_array, buffer)
    return packed


def counts_from_offsets(argument: str, offsets: Any) -> tuple[NDArray[np.int64], int]:
    """Counts of consecutive segments, and where the first one starts.

    `[10, 12, 15, 16]` gives `[2, 3, 1]` and 10: offsets into a longer buffer are a view of it.

    Args:
        argument: the offsets' name in the caller's words.
        offsets: any integer dtype, [segments + 1], non-decreasing.

    Raises:
        TreeError: wrong dtype or rank, no entry, a negative or a decreasing one.
    """
    array = as_integers(argument, offsets).astype(np.int64, copy=False)
    if not array.size:
        raise TreeError(argument, "must have at least one entry", "none")
    start = int(array[0])
    if start < 0:
        raise TreeError(argument, "must not be negative", f"{start} at position 0")
    at = first(array[1:] < array[:-1])
    if at >= 0:
        raise TreeError(
            argument, "must not decrease", f"{array[at + 1]} after {array[at]} at position {at + 1}"
        )
    return np.diff(array), start


def table_maps(
    packed: Packed,
    name: str,
    of: int,
    index: Any,
    rows: int,
    *,
    capacity: int | None = None,
    allocate: Allocate | None = None,
) -> TableMaps:
    """Maps from a level, and all levels below it, to the rows of a side table.

    Args:
        packed: the tree.
        name: the table's name, for messages.
        of: position of the level whose rows `index` maps.
        index: [rows of the level], each one's row in the table, any order, any integer dtype.
        rows: rows of the table.
        capacity: allocated rows of the table; None: `rows`.
        allocate: gives the buffer; None: numpy does.

    Raises:
        TreeError: an index of a wrong dtype, rank or length or out of range, a capacity below the
            rows.
    """
    argument = f'index of table "{name}"'
    structure = packed.structure
    level = structure.levels[of]
    array = as_integers(argument, index)
    rows = as_rows(f'rows of table "{name}"', rows)
    if array.size != packed.rows[of]:
        rule = f"must have one entry for each of the {packed.rows[of]} rows of {level!r}"
        raise TreeError(argument, rule, f"{array.size} entries")
    at = first((array < 0) | (array >= rows))
    if at >= 0:
        rule = (
            f"must be rows of the table, from 0 to {rows - 1}"
            if rows
            else "must be empty: the table has no rows"
        )
        raise TreeError(argument, rule, f"{array[at]} at position {at}")
    allocated = rows if capacity is None else as_rows(f'capacity of table "{name}"', capacity)
    if allocated < rows:
        rule = f"must be at least the table's {rows} rows"
        raise TreeError(f'capacity of table "{name}"', rule, str(allocated))
    levels = tuple(i for i, chain in enumerate(structure.lineage) if i == of or of in chain)
    sizes = [1]
    for i in levels:
        sizes += (packed.capacity[i], allocated + 1, packed.capacity[i])
    buffer = (allocate or allocate_array)(sum(sizes))
    maps = TableMaps(buffer, tuple(sizes), levels)
    buffer[0] = rows
    for i in levels:
        to = maps.maps(i)
        n = packed.rows[i]
        if i == of:
            to.index[:n] = array
        else:
            above = structure.parent[i]
            near = packed.maps(i, above).index[:n]
            np.take(maps.maps(above).index, near, out=to.index[:n], mode="clip")
        to.index[n:] = 0
        loops().group(to.index, n, rows, to.offsets, to.order)
    return maps


def compose(packed: Packed, fine: int, coarse: int) -> Maps:
    """The maps between a level and any of its ancestors, in new arrays where not carried.

    Args:
        packed: the tree.
        fine: position of the finer level.
        coarse: position of one of its ancestors.

    Raises:
        KeyError: `coarse` is no ancestor of `fine`.
    """
    structure = packed.structure
    if (fine, coarse) in structure.pair_at:
        return packed.maps(fine, coarse)
    if coarse not in structure.lineage[fine]:
        raise KeyError((fine, coarse))
    above = structure.parent[fine]
    near = packed.maps(fine, above)
    index, far = near.index, packed.maps(above, structure.parent[above])
    offsets = near.offsets
    while True:
        # Dead entries stay 0: they point at row 0, whose own entry must not be taken for them.
        index = far.index[index]
        index[packed.rows[fine] :] = 0
        if packed.sorted:
            offsets = offsets[far.offsets]
        above = structure.parent[above]
        if above == coarse:
            break
        far = packed.maps(above, structure.parent[above])
    if packed.sorted:
        return Maps(index, offsets, None)
    offsets = np.empty(packed.capacity[coarse] + 1, dtype=np.int32)
    order = np.empty(packed.capacity[fine], dtype=np.int32)
    loops().group(index, packed.rows[fine], packed.rows[coarse], offsets, order)
    return Maps(index, offsets, order)
