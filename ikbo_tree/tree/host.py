"""What a tree keeps on the host beside its device maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.layout import Packed
from ikbo_tree.tree.schema import Schema, levels_below

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

Integers: TypeAlias = Sequence[int] | np.ndarray | Tensor
NestedLists: TypeAlias = Sequence[Any]


@dataclass
class HostMaps:
    """Maps, counts and what came with them.

    Attributes:
        buffer: every field of the schema, one after the other, int32.
        sizes: length of each field.
        rows: live rows of every level and table.
        keys: keys of each row, by level or table, where the tree came from keys.
        starts: where a level's values begin in a longer buffer, where not at 0.
        origins: rows of the selected tree, by level, where this tree is a selection.
        width: N_max of padded requests, where the tree came from them.
        parts: the trees that were merged into this one.
    """

    buffer: np.ndarray
    sizes: tuple[int, ...]
    rows: dict[str, int]
    keys: dict[str, np.ndarray] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    origins: dict[str, np.ndarray] = field(default_factory=dict)
    width: int | None = None
    parts: tuple[BroadcastTree, ...] = ()

    @staticmethod
    def from_fields(schema: Schema, fields: tuple[Tensor, ...]) -> HostMaps:
        """Copies a tree's tensors back; keys and the like are not on the device."""
        buffer = torch.cat([f.reshape(-1) for f in fields]).cpu().numpy()
        sizes = tuple(f.shape[0] for f in fields)
        levels = schema.structure.levels
        rows = dict(zip(levels, buffer[: len(levels)].tolist(), strict=True))
        starts = np.cumsum((0, *sizes))
        for table, at in zip(schema.tables, table_fields(schema), strict=True):
            rows[table.name] = int(buffer[starts[at]])
        return HostMaps(buffer, sizes, rows)

    def to_fields(self) -> tuple[Tensor, ...]:
        """The fields as CPU tensors that share this buffer."""
        return split(torch.from_numpy(self.buffer), self.sizes)

    def packed(self, schema: Schema) -> Packed:
        """The levels' part of the buffer, as `mapping` takes it."""
        count = level_fields(schema)
        sizes = self.sizes[:count]
        levels = schema.structure.levels
        rows = tuple(self.rows[level] for level in levels)
        return Packed(
            schema.structure,
            self.buffer[: sum(sizes)],
            sizes,
            rows,
            _capacities(schema, sizes),
            schema.sorted,
        )

    def table_index(self, schema: Schema, table: int) -> np.ndarray:
        """The live part of a table's map from the level that it hangs off."""
        at = table_fields(schema)[table] + 1
        start = sum(self.sizes[:at])
        level = schema.structure.levels[schema.tables[table].of]
        return self.buffer[start : start + self.rows[level]]

    def positions(self) -> np.ndarray:
        """Positions of the packed rows in the padding, the last field."""
        return self.buffer[len(self.buffer) - self.sizes[-1] :]

    def same(self, other: HostMaps) -> bool:
        """Equal maps, counts, keys and padding."""
        return (
            self.sizes == other.sizes
            and self.rows == other.rows
            and self.width == other.width
            and np.array_equal(self.buffer, other.buffer)
            and self.keys.keys() == other.keys.keys()
            and all(np.array_equal(self.keys[k], other.keys[k]) for k in self.keys)
        )


def split(buffer: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views of a tree's buffer, one a field."""
    fields: tuple[Tensor, ...] = buffer.split(sizes)
    return fields


def level_fields(schema: Schema) -> int:
    """How many fields the levels take, before those of tables."""
    single = len(schema.structure.levels) == 1
    return 1 + len(schema.structure.pairs) * (2 if schema.sorted else 3) + single


def table_fields(schema: Schema) -> list[int]:
    """The first field of each table."""
    at = level_fields(schema)
    starts = []
    for table in schema.tables:
        starts.append(at)
        at += 1 + 3 * len(levels_below(schema.structure, table.of))
    return starts


def _capacities(schema: Schema, sizes: tuple[int, ...]) -> tuple[int, ...]:
    structure = schema.structure
    if len(structure.levels) == 1:
        return (sizes[1],)
    capacity = [0] * len(structure.levels)
    step = 2 if schema.sorted else 3
    for i, (fine, coarse) in enumerate(structure.pairs):
        capacity[fine] = sizes[1 + i * step]
        capacity[coarse] = sizes[2 + i * step] - 1
    return tuple(capacity)


def host_array(argument: str, value: Any) -> Any:
    """A tensor as a NumPy array (a CUDA tensor is copied: a sync); anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        raise TreeError(argument, "must hold integers", str(value.dtype))
    return value.detach().cpu().numpy()
