"""One int32 buffer that holds every map of a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.structure import Structure

Int32: TypeAlias = NDArray[np.int32]

Allocate: TypeAlias = Callable[[int], Int32]
"""Gives an uninitialised, contiguous, writable int32 array of so many entries."""


class Maps(NamedTuple):
    """How rows of a fine level find their coarse rows, and back.

    Three coarse rows with 3, 0 and 2 rows below them:

        index   = [0, 0, 0, 2, 2]     coarse row of each fine row
        offsets = [0, 3, 3, 5]        fine rows order[offsets[c]:offsets[c+1]] lie below c
        order   = None                they lie in that order already

    Attributes:
        index: int32 [fine].
        offsets: int32 [coarse + 1].
        order: int32 [fine], ascending inside a group, or None for 0, 1, 2, ...
    """

    index: Int32  # type: ignore[assignment]  # hides tuple.index
    offsets: Int32
    order: Int32 | None


class Packed(NamedTuple):
    """A tree's maps, one after the other in one buffer.

    The fields: `live` [levels], the live rows of each level; then for each (fine, coarse) of
    `structure.pairs` `index` [capacity of fine], `offsets` [capacity of coarse + 1] and, unless the
    tree is sorted, `order` [capacity of fine] (see `Maps`). A tree of one level has `index` [root],
    0, 1, 2, ..., instead. For `Structure(("user", "item"), (-1, 0))` and counts `[2, 1]`

        buffer = [2, 3,  0, 0, 1,  0, 2, 3]
        sizes  = (2,     3,        3)

    Beyond the live rows (`capacity` > `rows`) `index` and `order` are 0 and `offsets` repeats its
    last live value.

    Attributes:
        structure: the levels.
        buffer: int32 [sum(sizes)].
        sizes: lengths of the fields.
        rows: live rows a level.
        capacity: allocated rows a level, at least `rows`.
        sorted: no field is an `order`; every parents map is non-decreasing.
    """

    structure: Structure
    buffer: Int32
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    capacity: tuple[int, ...]
    sorted: bool

    def fields(self) -> dict[str, Int32]:
        """Views of the buffer by name: `live`, `index[item, user]`, `offsets[item, user]`, ..."""
        names = field_names(self.structure, self.sorted)
        return dict(zip(names, self.views(), strict=True))

    def views(self) -> list[Int32]:
        """Views of the buffer, one a field, in order."""
        ends = accumulate(self.sizes)
        return [self.buffer[end - n : end] for n, end in zip(self.sizes, ends, strict=True)]

    def maps(self, fine: int, coarse: int) -> Maps:
        """Views of the maps of a pair in `structure.pairs`, as long as the capacities.

        Args:
            fine: position of the finer level.
            coarse: position of its ancestor.

        Raises:
            KeyError: the tree is too deep to carry that pair; `build.compose` makes its maps.
        """
        per_pair = 2 if self.sorted else 3
        first = 1 + per_pair * self.structure.pair_at[fine, coarse]
        sizes = self.sizes[first : first + per_pair]
        at = sum(self.sizes[:first])
        index = self.buffer[at : (at := at + sizes[0])]
        offsets = self.buffer[at : (at := at + sizes[1])]
        return Maps(index, offsets, None if self.sorted else self.buffer[at : at + sizes[2]])


def field_sizes(structure: Structure, capacity: Sequence[int], sorted: bool) -> tuple[int, ...]:
    """Lengths of the fields of a `Packed` with these capacities."""
    sizes = [len(capacity)]
    for fine, coarse in structure.pairs:
        n = capacity[fine]
        sizes.append(n)
        sizes.append(capacity[coarse] + 1)
        if not sorted:
            sizes.append(n)
    if len(capacity) == 1:
        sizes.append(capacity[0])
    return tuple(sizes)


def field_names(structure: Structure, sorted: bool) -> tuple[str, ...]:
    """Names of the fields of a `Packed`."""
    levels = structure.levels
    names = ["live"]
    for fine, coarse in structure.pairs:
        pair = f"[{levels[fine]}, {levels[coarse]}]"
        names += ["index" + pair, "offsets" + pair]
        if not sorted:
            names.append("order" + pair)
    if len(levels) == 1:
        names.append(f"index[{levels[0]}, {levels[0]}]")
    return tuple(names)


def allocate_array(n: int) -> Int32:
    """An uninitialised int32 array: the default `Allocate`."""
    return np.empty(n, dtype=np.int32)
