"""Trees as inputs of torch.compile and torch.export: a pytree of their int32 tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ikbo_tree.tree import pickling
from ikbo_tree.tree.broadcast_tree import BroadcastTree
from ikbo_tree.tree.schema import Schema

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


def register() -> None:
    """Tells torch how a tree is taken apart and put together."""
    pytree.register_pytree_node(
        BroadcastTree,
        _flatten,
        _unflatten,
        serialized_type_name=SERIALIZED_NAME,
        to_dumpable_context=pickling.schema_to_json,
        from_dumpable_context=pickling.schema_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    # An exported program keeps its example inputs, trees among them; torch.export.load reads them
    # with weights_only=True.
    torch.serialization.add_safe_globals([pickling.rebuild])
