"""The bodies of `BroadcastTree`'s constructors: check on the host, pack, copy once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.mapping import build, keys, packing
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.layout import Packed
from ikbo_tree.mapping.structure import Structure
from ikbo_tree.tree.host import HostMaps, Integers, NestedLists, host_array, split
from ikbo_tree.tree.schema import Schema, TableSchema

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

Made: TypeAlias = tuple[Schema, tuple[Tensor, ...], HostMaps]
Device: TypeAlias = torch.device | str | None
Capacity: TypeAlias = Mapping[str, int] | None


class Target:
    """Where a tree's buffer goes: host memory, pinned where a device will copy from it."""

    def __init__(self, device: Device) -> None:
        self.device = None if device is None else torch.device(device)
        self._pinned: Tensor | None = None

    @property
    def allocate(self) -> Callable[[int], np.ndarray] | None:
        """What `mapping` calls for memory; None: its own choice."""
        if self.device is None or self.device.type != "cuda":
            return None
        return self._allocate_pinned

    def _allocate_pinned(self, n: int) -> np.ndarray:
        self._pinned = torch.empty(n, dtype=torch.int32, pin_memory=True)
        return self._pinned.numpy()

    def fields(self, buffer: np.ndarray, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The buffer on the device, by one copy, as one tensor a field."""
        tensor = torch.from_numpy(buffer)
        if self.device is not None and self.device.type != "cpu":
            # The caching host allocator keeps pinned memory until the copy is done, and so does
            # the tree: it holds the buffer.
            pinned = self._pinned is not None and self._pinned.data_ptr() == tensor.data_ptr()
            tensor = (self._pinned if pinned else tensor).to(self.device, non_blocking=pinned)  # type: ignore[union-attr]
        return split(tensor, sizes)


def finish(packed: Packed, target: Target, *, padded: bool = False, **extra: Any) -> Made:
    """A tree without tables from its packed maps.

    `padded` holds for every tree built with `capacity=`, a full one too: what is traced or captured
    with it must read live counts.
    """
    schema = Schema(packed.structure, packed.sorted, padded)
    rows = dict(zip(packed.structure.levels, packed.rows, strict=True))
    host = HostMaps(packed.buffer, packed.sizes, rows, **extra)
    return schema, target.fields(packed.buffer, packed.sizes), host


def capacities(structure: Structure, capacity: Capacity) -> list[int | None] | None:
    """Capacity of each level, None where none is given (then it is the level's rows)."""
    if not capacity:
        return None
    for level in capacity:
        structure.at("capacity", level)
    return [capacity.get(level) for level in structure.levels]


def from_counts(
    counts: Mapping[str, Integers],
    root: str,
    root_rows: int | None,
    under: Mapping[str, str] | None,
    capacity: Capacity,
    device: Device,
) -> Made:
    """See `BroadcastTree.from_counts`."""
    structure = Structure.build(root, tuple(counts), under)
    arrays = [
        build.as_integers(f'counts["{level}"]', host_array(f'counts["{level}"]', value))
        for level, value in counts.items()
    ]
    return _from_count_arrays(structure, arrays, root_rows, capacity, device)


def _from_count_arrays(
    structure: Structure,
    arrays: list[np.ndarray],
    root_rows: int | None,
    capacity: Capacity,
    device: Device,
    **extra: Any,
) -> Made:
    target = Target(device)
    packed = build.pack_counts(
        structure,
        arrays,
        root_rows,
        capacity=capacities(structure, capacity),
        allocate=target.allocate,
    )
    return finish(packed, target, padded=bool(capacity), **extra)


def from_offsets(
    offsets: Mapping[str, Integers],
    root: str,
    under: Mapping[str, str] | None,
    capacity: Capacity,
    device: Device,
) -> Made:
    """See `BroadcastTree.from_offsets`."""
    if not offsets:
        raise TreeError("offsets", "must name a level below the root", "none")
    structure = Structure.build(root, tuple(offsets), under)
    arrays, starts = [], {}
    for level, value in offsets.items():
        argument = f'offsets["{level}"]'
        counts, start = build.counts_from_offsets(argument, host_array(argument, value))
        arrays.append(counts)
        if start:
            starts[level] = start
    return _from_count_arrays(structure, arrays, None, capacity, device, starts=starts)


def from_parents(
    parents: Mapping[str, Integers],
    root: str,
    root_rows: int,
    under: Mapping[str, str] | None,
    capacity: Capacity,
    device: Device,
) -> Made:
    """See `BroadcastTree.from_parents`."""
    structure = Structure.build(root, tuple(parents), under)
    arrays = [
        build.as_integers(f'parents["{level}"]', host_array(f'parents["{level}"]', value))
        for level, value in parents.items()
    ]
    target = Target(device)
    packed = build.pack_parents(
        structure,
        arrays,
        root_rows,
        capacity=capacities(structure, capacity),
        allocate=target.allocate,
    )
    return finish(packed, target, padded=bool(capacity))


def from_padded(
    mask_or_lengths: Any, levels: tuple[str, str], width: int | None, device: Device
) -> Made:
    """See `BroadcastTree.from_padded`."""
    argument = "mask_or_lengths"
    if len(levels) != 2:
        raise TreeError("levels", "must name two levels", repr(levels))
    given = host_array(argument, mask_or_lengths)
    array = np.asarray(given)
    if array.dtype == np.bool_:
        lengths, positions = packing.from_mask(array, argument=argument)
        if width is not None and width != array.shape[1]:
            raise TreeError("width", f"must be the mask's {array.shape[1]}", str(width))
        width = array.shape[1]
    else:
        lengths = build.as_integers(argument, given)
        if width is None:
            width = int(lengths.max(initial=0))
        positions = packing.from_lengths(lengths, width, argument=argument)
    if positions.dtype != np.int32:
        raise TreeError(argument, "must have at most 2^31 entries in B * N_max", f"width {width}")
    structure = Structure.build(levels[0], (levels[1],), None)
    target = Target(device)
    schema, _, host = finish(
        build.pack_counts(structure, [lengths], None), Target(None), width=width
    )
    return with_fields(schema, host, positions, (len(positions),), target, positions=True)


def from_nested(nested: NestedLists, levels: Sequence[str], device: Device) -> Made:
    """See `BroadcastTree.from_nested`."""
    if not levels:
        raise TreeError("levels", "must name at least one level", "none")
    structure = Structure.build(levels[0], tuple(levels[1:]), None)
    counts = packing.counts_from_nested(nested, structure.levels)
    return _from_count_arrays(structure, counts, len(nested), None, device)


def with_fields(
    schema: Schema,
    host: HostMaps,
    buffer: np.ndarray,
    sizes: tuple[int, ...],
    target: Target,
    **changes: Any,
) -> Made:
    """The tree with more fields behind those that it has."""
    whole = np.concatenate([host.buffer, buffer.astype(np.int32, copy=False)])
    if target.allocate is not None:
        pinned = target.allocate(len(whole))
        pinned[:] = whole
        whole = pinned
    host = replace(host, buffer=whole, sizes=(*host.sizes, *sizes))
    return replace(schema, **changes), target.fields(whole, host.sizes), host


def with_table(
    tree: BroadcastTree,
    name: str,
    of: str,
    index: Integers,
    rows: int | None,
    capacity: int | None,
) -> Made:
    """See `BroadcastTree.with_table`."""
    return add_table(
        tree._schema, tree._host_maps(), Target(tree.device), name, of, index, rows, capacity
    )


def add_table(
    schema: Schema,
    host: HostMaps,
    target: Target,
    name: str,
    of: str,
    index: Integers,
    rows: int | None,
    capacity: int | None,
    table_keys: np.ndarray | None = None,
) -> Made:
    """A tree with one more side table."""
    level = schema.structure.at("of", of)
    if not isinstance(name, str) or not name or name in host.rows:
        raise TreeError("name", f"must be a new name, none of {list(host.rows)}", repr(name))
    if schema.positions:
        raise TreeError("tree", "must not come from padded requests to get tables", "one that does")
    if capacity is not None and not schema.padded:
        raise TreeError("capacity", "needs a tree built with capacity=", str(capacity))
    array = build.as_integers("index", host_array("index", index))
    if rows is None:
        rows = int(array.max(initial=-1)) + 1
    maps = build.table_maps(host.packed(schema), name, level, array, rows, capacity=capacity)
    host = replace(host, rows={**host.rows, name: rows})
    if table_keys is not None:
        host.keys = {**host.keys, name: table_keys}
    tables = (*schema.tables, TableSchema(name, level))
    return with_fields(schema, host, maps.buffer, maps.sizes, target, tables=tables)


def from_keys(
    columns: Mapping[str, Any],
    rows: Mapping[str, Any] | None,
    shared: Sequence[str] | Mapping[str, str],
    device: Device,
) -> Made:
    """See `BroadcastTree.from_keys`."""
    names = (
        shared if isinstance(shared, Mapping) else {level: f"{level}_shared" for level in shared}
    )
    grouped = keys.group_keys(
        {level: host_array(f'keys["{level}"]', column) for level, column in columns.items()},
        rows={level: host_array("rows", known) for level, known in (rows or {}).items()},
        shared=names,
    )
    structure = Structure.build(grouped.levels[0], grouped.levels[1:], None)
    on_host, target = Target(None), Target(device)
    last = target if not names else on_host
    packed = build.pack_parents(
        structure, grouped.parents, grouped.root_rows, allocate=last.allocate
    )
    made = finish(packed, last, keys=grouped.keys)
    for i, (level, name) in enumerate(names.items(), start=1):
        ids, index = grouped.shared[level]
        last = target if i == len(names) else on_host
        schema, _, host = made
        made = add_table(schema, host, last, name, level, index, len(ids), None, ids)
    return made
