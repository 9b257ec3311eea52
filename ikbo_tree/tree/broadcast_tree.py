"""`BroadcastTree`: which row of each level belongs to which row of the levels above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ikbo_tree.tree import construct, merge, pickling, picture, stats
from ikbo_tree.tree.host import Integers, NestedLists
from ikbo_tree.tree.maps import TreeMaps


class BroadcastTree(TreeMaps):
    """Maps between the levels of a batch of requests; immutable.

    Two users, three vendors, five items (vendor 1 has none):

        user      0           1
        vendor    0      1    2          parents("vendor") = [0, 0, 1]
        item      0 1 2       3 4        parents("item")   = [0, 0, 0, 2, 2]

        ancestors("item", of="user") = [0, 0, 0, 1, 1]
        offsets("item", of="user")   = [0, 3, 5]      items of user u: offsets[u] .. offsets[u + 1]

    Every map is int32 on the tree's device, all of them views of one buffer. A tree is made by the
    `from_*` constructors, checked once there, and never changes: do not write to its maps.

    As an input of a compiled or exported function it is a pytree of those maps.
    """

    __hash__ = None  # type: ignore[assignment]  # equal trees may be large: no hidden hashing

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, Integers],
        *,
        root: str,
        root_rows: int | None = None,
        under: Mapping[str, str] | None = None,
        capacity: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A sorted tree from the number of children of every row.

        Args:
            counts: for each level below the root, coarse first, one count a row of its parent
                level: integers of any width, in a list, array or tensor.
            root: the root level's name.
            root_rows: rows of the root; needed only where no level hangs under the root.
            under: parent of each level that does not hang under the level named before it.
            capacity: allocated rows of some levels, at least their rows; the others get their
                rows. Ops write zeros to the rows beyond (`DESIGN.md`, contract 9).
            device: where the maps go; one copy.

        Raises:
            TreeError: a count is negative, a length does not fit, names clash.

        >>> tree = BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
        >>> tree.ancestors("item", of="user").tolist()
        [0, 0, 0, 1, 1]
        """
        made = construct.from_counts(counts, root, root_rows, under, capacity, device)
        return cls._from_fields(*made)

    @classmethod
    def from_offsets(
        cls,
        offsets: Mapping[str, Integers],
        *,
        root: str,
        under: Mapping[str, str] | None = None,
        capacity: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A sorted tree from exclusive prefix sums of counts, n + 1 entries for n parent rows.

        Offsets that do not start at 0 are a view into a longer buffer: they are rebased, and
        `start(level)` says where the level's values begin in that buffer.

        Args: as `from_counts`, with offsets in place of counts.

        Raises:
            TreeError: offsets decrease, are empty or do not fit the level above.
        """
        return cls._from_fields(*construct.from_offsets(offsets, root, under, capacity, device))

    @classmethod
    def from_parents(
        cls,
        parents: Mapping[str, Integers],
        *,
        root: str,
        root_rows: int,
        under: Mapping[str, str] | None = None,
        capacity: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A tree from the parent row of every row, in any order.

        Args:
            parents: for each level below the root, coarse first, its row in the level above.
            root: the root level's name.
            root_rows: rows of the root (trailing users may have no child).
            under: as in `from_counts`.
            capacity: as in `from_counts`.
            device: as in `from_counts`.

        Raises:
            TreeError: a parent is out of range, or no integer.
        """
        made = construct.from_parents(parents, root, root_rows, under, capacity, device)
        return cls._from_fields(*made)

    @classmethod
    def from_keys(
        cls,
        keys: Mapping[str, Any],
        *,
        rows: Mapping[str, Any] | None = None,
        shared: Sequence[str] | Mapping[str, str] = (),
        device: torch.device | str | None = None,
    ) -> Self:
        """A tree from a flat request log: one row a leaf, in any order, a key column a level.

        The leaf level keeps the log's row order. A coarser level has one row for every distinct
        key below each row of the level above it, in order of first appearance.

        Args:
            keys: columns of equal length, outer to inner: integers, strings (NumPy, Arrow, pandas)
                or categoricals; the first is the root.
            rows: the root's keys in the order that its rows shall have, e.g. the order of a
                feature table; keys that the log does not have become childless rows.
            shared: levels whose own keys recur below several parents, e.g. `["vendor"]`: each
                also becomes a table `"vendor_shared"` with one row a distinct key (a mapping
                `{"vendor": "brands"}` names it).
            device: as in `from_counts`.

        Raises:
            TreeError: float or null keys, unequal lengths, a root key that `rows` lacks.
        """
        return cls._from_fields(*construct.from_keys(keys, rows, shared, device))

    @classmethod
    def from_padded(
        cls,
        mask_or_lengths: Any,
        *,
        levels: tuple[str, str] = ("user", "item"),
        width: int | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A two-level tree from padded requests; `pack` and `unpack` move tensors across.

        Args:
            mask_or_lengths: bool [B, N_max], true for real candidates, in any pattern; or
                integers [B], real candidates come first.
            levels: names of the request level and of the candidate level.
            width: N_max, where lengths are given; default the longest.
            device: as in `from_counts`.

        Raises:
            TreeError: wrong rank or dtype, a length above `width`.
        """
        return cls._from_fields(*construct.from_padded(mask_or_lengths, levels, width, device))

    @classmethod
    def from_nested(
        cls,
        nested: NestedLists,
        *,
        levels: Sequence[str],
        device: torch.device | str | None = None,
    ) -> Self:
        """A tree from lists in lists.

        The outer list's entries are root rows, the innermost entries are leaf rows (whatever they
        hold).

        Args:
            nested: lists or tuples, nested as deep as there are levels.
            levels: names, root first.
            device: as in `from_counts`.

        Raises:
            TreeError: a list is missing where a level needs one.

        >>> nested = [[["a", "b"], []], [["c"]]]
        >>> BroadcastTree.from_nested(nested, levels=("user", "vendor", "item"))
        BroadcastTree(user 2 -> vendor 3 -> item 3, cpu)
        """
        return cls._from_fields(*construct.from_nested(nested, levels, device))

    def with_table(
        self,
        name: str,
        *,
        of: str,
        index: Integers,
        rows: int | None = None,
        capacity: int | None = None,
    ) -> Self:
        """This tree with a side table: rows reached by any map from a level.

        Args:
            name: the table's name, allowed wherever ops take a level's.
            of: the level that the map starts from.
            index: [rows of `of`], a table row each; repeated and unsorted as it comes.
            rows: rows of the table; default the largest index + 1.
            capacity: allocated rows of the table.

        Raises:
            TreeError: the name is taken, an index out of range, a wrong length.
        """
        return self._from_fields(*construct.with_table(self, name, of, index, rows, capacity))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """This tree with its maps on `device`: one copy, from pinned memory if `non_blocking`."""
        return self._from_fields(*merge.moved(self, torch.device(device), non_blocking))

    def select(self, **rows: Integers) -> Self:
        """The sub-tree of some rows of one level: `tree.select(user=[2, 0])`.

        Keeps those rows in the given order, all that lies below them, and of the levels above
        only rows with something kept; branches that hang off rows above stay with those rows.
        Tables keep all their rows. `origin(level)` says where each row came from.

        Args:
            **rows: one level and its rows.

        Raises:
            TreeError: not exactly one level, rows out of range or twice.
        """
        return self._from_fields(*merge.select(self, rows))

    def split(self) -> list[BroadcastTree]:
        """The trees that `concat` merged into this one, on this tree's device.

        Raises:
            TreeError: this tree was not merged.
        """
        return [part.to(self.device) for part in merge.parts_of(self)]

    def split_rows(self, tensor: Tensor, level: str) -> list[Tensor]:
        """`tensor` [capacity(level), ...] cut into views, one for each tree that was merged.

        Raises:
            TreeError: this tree was not merged, or `tensor` has other rows.
        """
        self.check("tensor", tensor, level)
        sizes = [part.rows(level) for part in merge.parts_of(self)]
        return list(tensor[: sum(sizes)].split(sizes))

    def pack(self, padded: Tensor) -> Tensor:
        """[B, N_max, ...] to [rows of the candidate level, ...], for a tree `from_padded`.

        Raises:
            TreeError: another tree, or another shape than the mask's.
        """
        return merge.pack(self, padded)

    def unpack(self, packed: Tensor, *, fill: float = 0.0) -> Tensor:
        """[rows of the candidate level, ...] to [B, N_max, ...], with `fill` where padding was.

        Raises:
            TreeError: another tree, or another number of rows.
        """
        return merge.unpack(self, packed, fill)

    def stats(
        self,
        *,
        widths: Mapping[str, int] | None = None,
        out: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> stats.TreeStats:
        """Fan-outs, and what a flat model would spend more; see `TreeStats`.

        Args:
            widths: elements a row has at each level (default 1 each).
            out: width N of a linear map over all of them, for the FLOP counts.
            dtype: of the elements, for the byte counts.
        """
        return stats.of_tree(self, widths, out, dtype)

    def show(self, *, requests: int = 3) -> None:
        """Prints the first `requests` root rows as a picture (needs the extra `cli`)."""
        picture.show(self, requests)

    def __repr__(self) -> str:
        return picture.describe(self)

    def __eq__(self, other: object) -> bool:
        """Same levels, rows, maps, tables and keys; devices may differ."""
        if not isinstance(other, BroadcastTree):
            return NotImplemented
        if self._schema != other._schema:
            return False
        return self._host_maps().same(other._host_maps())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the maps; the tree comes back on the CPU."""
        return pickling.reduce(self)


def concat(
    trees: Sequence[BroadcastTree], *, capacity: Mapping[str, int] | None = None
) -> BroadcastTree:
    """One tree of all the requests of `trees`, in their order; `split` takes it apart again.

    Args:
        trees: at least one, of the same levels and tables, on one device.
        capacity: as in `BroadcastTree.from_counts`.

    Raises:
        TreeError: no tree, or trees that differ in levels or tables.
    """
    return BroadcastTree._from_fields(*merge.concat(trees, capacity))
