"""The compiled loops. Importing this module imports numba; go through `build.loops()`.

All serial, `nogil` and cached on disk. Each takes arrays of one dtype and layout, so that it is
compiled once; what they are given has been checked, so they index without bounds checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ikbo_tree.mapping.integers import LIMIT

SORTED = -1
UNSORTED = -2


def compiled(function: Any) -> Any:
    """Compiles at the first call, with a cache on disk if there is a folder for one."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # Neither this folder nor a user's cache folder can be written to (a locked-down container):
        # every process compiles anew.
        return njit(nogil=True)(function)


@compiled
def count_rows(parent: Any, counts: Any, root_rows: int, rows: Any) -> int:
    """Writes the rows of each level into `rows`; 0, or the first level whose counts are wrong.

    `counts` holds the counts of levels 1, 2, ... one after the other, each as long as the rows of
    its parent level ask for.
    """
    rows[0] = root_rows
    at = 0
    for level in range(1, parent.size):
        n = rows[parent[level]]
        if n > counts.size - at:
            return level
        # The union of the bits is negative if one count is, and past LIMIT if one count is; if not,
        # the sum of fewer than 2^31 counts cannot wrap.
        total = 0
        bits = 0
        for i in range(at, at + n):
            total += counts[i]
            bits |= counts[i]
        if bits < 0 or bits > LIMIT or total > LIMIT:
            return level
        rows[level] = total
        at += n
    return 0


@compiled
def _fill_runs(offsets: Any, rows: int, index: Any) -> None:
    """Fills index[offsets[c]:offsets[c+1]] with c, from left to right.

    Writes past the end of a run: what lies there belongs to later runs, or is dead. Runs of a few
    rows are what trees have, and then mispredicted branches are the cost: a million rows in runs of
    8 take 0.3 ms by 32 at a time, 1.4 ms by a loop that stops where each run does. In runs of 1 or
    2 they take 0.9 ms by 8 at a time, 1.6 ms by 32.
    """
    width = 8 if index.size < 4 * rows else 32
    wide = rows
    while wide > 0 and offsets[wide - 1] > index.size - width:
        wide -= 1
    if width == 8:
        _fill_short(offsets, wide, index)
    else:
        _fill_long(offsets, wide, index)
    for c in range(wide, rows):
        index[offsets[c] : offsets[c + 1]] = c


@compiled
def _fill_short(offsets: Any, rows: int, index: Any) -> None:
    """Runs whose starts leave room for 8 entries each."""
    for c in range(rows):
        # Unsigned, since signed positions are tested for counting from the end.
        i = np.uint64(offsets[c])
        end = np.uint64(offsets[c + 1])
        row = np.int32(c)
        for j in (0, 1, 2, 3, 4, 5, 6, 7):
            index[i + np.uint64(j)] = row
        if end > i + np.uint64(8):
            index[i + np.uint64(8) : end] = row


@compiled
def _fill_long(offsets: Any, rows: int, index: Any) -> None:
    """Runs whose starts leave room for 32 entries each."""
    width = np.uint64(32)
    last = index.size - 32
    for c in range(rows):
        i = np.uint64(offsets[c])
        end = np.uint64(offsets[c + 1])
        index[i : i + width] = c
        i += width
        while i < end and i <= last:
            index[i : i + width] = c
            i += width
        while i < end:
            index[i] = c
            i += np.uint64(1)


@compiled
def fill_counts(table: Any, rows: Any, capacity: Any, counts: Any, buffer: Any) -> None:
    """Fills the buffer of a sorted tree from the counts of its levels (see `count_rows`)."""
    levels = rows.size
    for level in range(levels):
        buffer[level] = rows[level]
    at = levels
    if levels == 1:
        for i in range(rows[0]):
            buffer[at + i] = i
        buffer[at + rows[0] :] = 0
    read = 0
    starts = np.empty(len(table), np.int64)
    for p in range(len(table)):
        fine, coarse, above = table[p, 0], table[p, 1], table[p, 2]
        starts[p] = at
        index = buffer[at : at + capacity[fine]]
        at += capacity[fine]
        offsets = buffer[at : at + capacity[coarse] + 1]
        at += capacity[coarse] + 1
        n = rows[coarse]
        if table[p, 4] < 0:
            total = 0
            for c in range(n):
                offsets[c] = total
                total += counts[read + c]
            read += n
        else:
            near = buffer[starts[table[p, 3]] + capacity[fine] :]
            far = buffer[starts[table[p, 4]] + capacity[above] :]
            for c in range(n):
                offsets[c] = near[far[c]]
        offsets[n:] = rows[fine]
        _fill_runs(offsets, n, index)
        index[rows[fine] :] = 0


@compiled
def tally(parents: Any, counts: Any) -> int:
    """Adds up the rows of each parent; SORTED, UNSORTED, or the first position out of range."""
    n = counts.size
    counts[:] = 0
    state = SORTED
    before = 0
    for i in range(parents.size):
        p = parents[i]
        if p < 0 or p >= n:
            return i
        if p < before:
            state = UNSORTED
        before = p
        counts[p] += 1
    return state


@compiled
def group(index: Any, rows: int, coarse_rows: int, offsets: Any, order: Any) -> None:
    """Stable counting sort of the first `rows` entries of `index`, with dead tails (see `Packed`).

    `offsets` may be longer than `coarse_rows + 1`, `order` longer than `rows`.
    """
    offsets[: coarse_rows + 1] = 0
    for i in range(rows):
        offsets[index[i] + 1] += 1
    # offsets[c] runs from the start of group c to its end, which is the start of c + 1.
    for c in range(1, coarse_rows + 1):
        offsets[c] += offsets[c - 1]
    for i in range(rows):
        c = index[i]
        order[offsets[c]] = i
        offsets[c] += 1
    for c in range(coarse_rows, 0, -1):
        offsets[c] = offsets[c - 1]
    offsets[0] = 0
    offsets[coarse_rows:] = rows
    order[rows:] = 0


@compiled
def fill_unsorted(table: Any, rows: Any, capacity: Any, buffer: Any) -> None:
    """Fills the buffer of an unsorted tree whose index to each parent level is there already."""
    levels = rows.size
    for level in range(levels):
        buffer[level] = rows[level]
    at = levels
    starts = np.empty(len(table), np.int64)
    for p in range(len(table)):
        fine, coarse = table[p, 0], table[p, 1]
        n = rows[fine]
        starts[p] = at
        index = buffer[at : at + capacity[fine]]
        at += capacity[fine]
        offsets = buffer[at : at + capacity[coarse] + 1]
        at += capacity[coarse] + 1
        order = buffer[at : at + capacity[fine]]
        at += capacity[fine]
        if table[p, 4] >= 0:
            near = buffer[starts[table[p, 3]] :]
            far = buffer[starts[table[p, 4]] :]
            for i in range(n):
                index[i] = far[near[i]]
        index[n:] = 0
        group(index, n, rows[coarse], offsets, order)


@compiled
def cut(offsets: Any, tile_rows: int, tiles: Any) -> int:
    """Writes segment, start and rows of each tile; how many there are, or -1 if offsets decrease.

    `tiles` [3, bound] has room for a tile a segment and one for each `tile_rows` rows in all, which
    the tiles of offsets that turn out to decrease may pass: hence the test against `bound`.
    """
    bound = tiles.shape[1]
    count = 0
    for s in range(offsets.size - 1):
        at = np.int64(offsets[s])
        end = np.int64(offsets[s + 1])
        if end < at:
            return -1
        while at < end:
            if count == bound:
                return -1
            n = min(end - at, np.int64(tile_rows))
            tiles[0, count] = s
            tiles[1, count] = at
            tiles[2, count] = n
            at += n
            count += 1
    return count


@compiled
def merge_parents(
    table: Any, levels: int, fields: Any, rows: Any, capacity: Any, buffers: Any, parents: Any
) -> None:
    """Parents of each level of several trees, one tree's rows after the other's.

    Args:
        table: `Structure.pair_table`.
        levels: how many there are.
        fields: [trees], 2 fields a pair if the tree is sorted, else 3.
        rows: [trees, levels].
        capacity: [trees, levels].
        buffers: the trees' buffers, one after the other.
        parents: written, levels 1, 2, ... one after the other.
    """
    begin = np.zeros(levels + 1, np.int64)
    for level in range(1, levels):
        begin[level + 1] = begin[level] + rows[:, level].sum()
    first_row = np.zeros(levels, np.int64)
    at = 0
    for t in range(len(fields)):
        at += levels
        for p in range(len(table)):
            fine, coarse = table[p, 0], table[p, 1]
            if table[p, 4] < 0:
                to = begin[fine] + first_row[fine]
                for i in range(rows[t, fine]):
                    parents[to + i] = buffers[at + i] + first_row[coarse]
            at += capacity[t, fine] * (fields[t] - 1) + capacity[t, coarse] + 1
        first_row += rows[t]


@njit(inline="always")
def _slot(key: Any, parent: Any, bits: Any) -> Any:
    """The place of a (parent, key) in a table of 2^bits entries: multiply, fold, multiply."""
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    h ^= np.uint64(parent) * np.uint64(0xC2B2AE3D27D4EB4F)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    return h >> (np.uint64(64) - bits)


@compiled
def number_keys(keys: Any, parents: Any, codes: Any, first: Any) -> int:
    """Numbers the distinct (parent, key) in order of first appearance; how many there are.

    A hash table with linear probing, at most three quarters full: four entries share a cache line,
    so that a fuller table costs less than one that outgrows the cache. An entry is the key and, in
    one word, the parent and the number + 1; 0 is free.

    Args:
        keys: int64 [n].
        parents: int32 [n], not negative; empty: all the same.
        codes: int32 [n], written: each row's number.
        first: int32 [n], written as far as there are numbers: the row where each first appears.
    """
    one = np.uint64(1)
    zero = np.uint64(0)
    bits = np.uint64(10)
    table = np.zeros((one << bits, 2), np.int64)
    many = parents.size > 0
    # Rows are taken in blocks, whose entries are all asked for before one is looked at: misses of
    # the cache then overlap (a third off the time for a million rows with 700,000 numbers).
    block = 256
    slots = np.empty(block, np.uint64)
    seen = np.empty(block, np.int64)
    count = 0
    for start in range(0, keys.size, block):
        n = min(block, keys.size - start)
        if count + n > len(table) * 3 // 4:
            bits += np.uint64(2) if bits < 16 else one
            table = _moved(table, bits)
        mask = (one << bits) - one
        for j in range(n):
            parent = np.int64(parents[start + j]) if many else 0
            s = _slot(keys[start + j], parent, bits)
            slots[j] = s
            seen[j] = table[s, one]
        for j in range(n):
            i = start + j
            key = keys[i]
            parent = np.int64(parents[i]) if many else 0
            s = slots[j]
            # An entry that was taken stays as it is; a free one may have been taken meanwhile.
            entry = seen[j] if seen[j] != 0 else table[s, one]
            while entry != 0 and (table[s, zero] != key or entry >> 32 != parent):
                s = (s + one) & mask
                entry = table[s, one]
            if entry == 0:
                first[count] = i
                count += 1
                entry = (parent << 32) | count
                table[s, zero] = key
                table[s, one] = entry
            codes[i] = (entry & 0xFFFFFFFF) - 1
    return count


@compiled
def _moved(old: Any, bits: Any) -> Any:
    """The entries of a table in one of 2^bits entries."""
    one = np.uint64(1)
    zero = np.uint64(0)
    mask = (one << bits) - one
    table = np.zeros((one << bits, 2), np.int64)
    for j in range(len(old)):
        entry = old[j, 1]
        if entry != 0:
            s = _slot(old[j, 0], entry >> 32, bits)
            while table[s, one] != 0:
                s = (s + one) & mask
            table[s, zero] = old[j, 0]
            table[s, one] = entry
    return table
