"""Trees as inputs of torch.compile and torch.export: a pytree of their int32 tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from ikbo_tree.mapping.structure import Structure
from ikbo_tree.tree.broadcast_tree import BroadcastTree
from ikbo_tree.tree.schema import Schema, TableSchema

SERIALIZED_NAME = "ikbo_tree.BroadcastTree"


def _flatten(tree: BroadcastTree) -> tuple[list[Tensor], Schema]:
    return list(tree._fields), tree._schema


def _unflatten(fields: Iterable[Any], schema: Schema) -> BroadcastTree:
    return BroadcastTree._from_fields(schema, tuple(fields))


def _flatten_with_keys(
    tree: BroadcastTree,
) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], Schema]:
    fields, schema = _flatten(tree)
    return [(pytree.SequenceKey(i), field) for i, field in enumerate(fields)], schema


def _dump(schema: Schema) -> str:
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


def _load(text: str) -> Schema:
    value = json.loads(text)
    return Schema(
        Structure(tuple(value["levels"]), tuple(value["parent"])),
        value["sorted"],
        value["padded"],
        tuple(TableSchema(name, of) for name, of in value["tables"]),
        value["positions"],
    )


def register() -> None:
    """Tells torch how a tree is taken apart and put together."""
    pytree.register_pytree_node(
        BroadcastTree,
        _flatten,
        _unflatten,
        serialized_type_name=SERIALIZED_NAME,
        to_dumpable_context=_dump,
        from_dumpable_context=_load,
        flatten_with_keys_fn=_flatten_with_keys,
    )
