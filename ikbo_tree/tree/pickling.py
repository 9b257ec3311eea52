"""A tree as plain data: for pickle, and for what `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ikbo_tree.mapping.structure import Structure
from ikbo_tree.tree.host import HostMaps
from ikbo_tree.tree.schema import Schema, TableSchema

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree


def schema_to_json(schema: Schema) -> str:
    """The static part of a tree as text."""
    return json.dumps(
        {
            "levels": schema.structure.levels,
            "parent": schema.structure.parent,
            "sorted": schema.sorted,
            "padded": schema.padded,
            "tables": [[table.name, table.of] for table in schema.tables],
            "positions": schema.positions,
        }
    )


def schema_from_json(text: str) -> Schema:
    """The inverse of `schema_to_json`."""
    value = json.loads(text)
    return Schema(
        Structure(tuple(value["levels"]), tuple(value["parent"])),
        value["sorted"],
        value["padded"],
        tuple(TableSchema(name, of) for name, of in value["tables"]),
        value["positions"],
    )


def reduce(tree: BroadcastTree) -> tuple[Any, tuple[Any, ...]]:
    """What `BroadcastTree.__reduce__` returns: tensors, strings, numbers and containers of them."""
    host = tree._host_maps()
    extra = {
        "keys": {name: _plain(array) for name, array in host.keys.items()},
        "origins": {name: _plain(array) for name, array in host.origins.items()},
        "starts": host.starts,
        "width": host.width,
        "parts": host.parts,
    }
    buffer = torch.from_numpy(host.buffer)
    return rebuild, (schema_to_json(tree._schema), buffer, host.sizes, host.rows, extra)


def rebuild(
    schema: str,
    buffer: torch.Tensor,
    sizes: tuple[int, ...],
    rows: dict[str, int],
    extra: dict[str, Any],
) -> BroadcastTree:
    """The inverse of `reduce`; the tree is on the CPU."""
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

    arrays = {
        field: {name: _array(plain) for name, plain in extra[field].items()}
        for field in ("keys", "origins")
    }
    host = HostMaps(
        buffer.numpy(),
        tuple(sizes),
        rows,
        starts=extra["starts"],
        width=extra["width"],
        parts=tuple(extra["parts"]),
        **arrays,
    )
    return BroadcastTree._from_fields(schema_from_json(schema), host.to_fields(), host)


def _plain(array: np.ndarray) -> tuple[str, Any]:
    """An array as its dtype's name and a tensor, or a list where torch has no such dtype."""
    if array.dtype in (np.int32, np.int64):
        return array.dtype.str, torch.from_numpy(array)
    return array.dtype.str, array.tolist()


def _array(plain: tuple[str, Any]) -> np.ndarray:
    dtype, values = plain
    return np.asarray(values, dtype=dtype)
