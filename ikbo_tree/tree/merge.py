"""Trees from trees: another device, sub-trees, merged requests, padded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.mapping import build, compose
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.tree.construct import Made, Target, add_table, capacities, finish
from ikbo_tree.tree.host import HostMaps, Integers, host_array, split
from ikbo_tree.tree.schema import Schema

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree


def moved(tree: BroadcastTree, device: torch.device, non_blocking: bool) -> Made:
    """See `BroadcastTree.to`."""
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    if tree.device == device:
        return tree._schema, tree._fields, tree._host_maps()
    host = tree._host_maps()
    buffer = torch.from_numpy(host.buffer)
    if non_blocking and device.type == "cuda":
        buffer = buffer.pin_memory()
    fields = split(buffer.to(device, non_blocking=non_blocking), host.sizes)
    return tree._schema, fields, host


def select(tree: BroadcastTree, rows: Mapping[str, Integers]) -> Made:
    """See `BroadcastTree.select`."""
    if len(rows) != 1:
        raise TreeError("select()", "takes the rows of exactly one level", f"{sorted(rows)}")
    (level, wanted), *_ = rows.items()
    schema, host = tree._schema, tree._host_maps()
    at = schema.structure.at("select()", level)
    array = build.as_integers(level, host_array(level, wanted))
    packed, origins = compose.select(host.packed(schema), at, array, argument=level)
    levels = schema.structure.levels
    kept = dict(zip(levels, origins, strict=True))
    keys = {name: k[kept[name]] if name in kept else k for name, k in host.keys.items()}
    made = finish(packed, Target(None), keys=keys, origins=kept)
    for i, table in enumerate(schema.tables):
        index = host.table_index(schema, i)[origins[table.of]]
        made = _with_table(made, table.name, levels[table.of], index, host.rows[table.name])
    return _on(made, tree.device)


def concat(trees: Sequence[BroadcastTree], capacity: Mapping[str, int] | None) -> Made:
    """See `ikbo_tree.concat`."""
    if not trees:
        raise TreeError("trees", "must hold at least one tree", "none")
    first = trees[0]
    for i, tree in enumerate(trees):
        if tree.structure != first.structure or tree.tables != first.tables:
            raise TreeError(
                f"trees[{i}]", f"must have the levels and tables of trees[0], {first!r}", repr(tree)
            )
        if tree.device != first.device:
            raise TreeError(f"trees[{i}]", f"must be on {first.device}", str(tree.device))
    hosts = [tree._host_maps() for tree in trees]
    packed = compose.concat(
        [host.packed(tree._schema) for host, tree in zip(hosts, trees, strict=True)],
        capacity=capacities(first.structure, capacity),
    )
    keys = {
        name: np.concatenate([host.keys[name] for host in hosts])
        for name in hosts[0].keys
        if all(name in host.keys for host in hosts)
    }
    made = finish(packed, Target(None), padded=bool(capacity), keys=keys, parts=tuple(trees))
    for i, table in enumerate(first._schema.tables):
        index, rows = _joined_table(trees, hosts, i)
        made = _with_table(made, table.name, first.levels[table.of], index, rows)
    return _on(made, first.device)


def _joined_table(
    trees: Sequence[BroadcastTree], hosts: Sequence[HostMaps], table: int
) -> tuple[np.ndarray, int]:
    """One table of all trees: their rows one after the other."""
    parts, rows = [], 0
    for tree, host in zip(trees, hosts, strict=True):
        parts.append(host.table_index(tree._schema, table).astype(np.int64) + rows)
        rows += host.rows[tree.tables[table]]
    return np.concatenate(parts), rows


def _with_table(made: Made, name: str, of: str, index: np.ndarray, rows: int) -> Made:
    schema, _, host = made
    return add_table(schema, host, Target(None), name, of, index, rows, None)


def _on(made: Made, device: torch.device) -> Made:
    schema, _, host = made
    if device.type == "cpu":
        return made
    buffer = torch.from_numpy(host.buffer)
    return schema, split(buffer.to(device), host.sizes), host


def parts_of(tree: BroadcastTree) -> tuple[BroadcastTree, ...]:
    """The trees that were merged into `tree`."""
    parts = () if tree._host is None else tree._host.parts
    if not parts:
        raise TreeError("tree", "must come from concat()", repr(tree))
    return parts


def _padding(tree: BroadcastTree) -> tuple[Tensor, int, int]:
    """Positions of the packed rows in the padding, B and N_max."""
    schema: Schema = tree._schema
    width = None if tree._host is None else tree._host.width
    if not schema.positions or width is None:
        raise TreeError("tree", "must come from from_padded()", repr(tree))
    return tree._fields[-1], tree.capacity(tree.levels[0]), width


def pack(tree: BroadcastTree, padded: Tensor) -> Tensor:
    """See `BroadcastTree.pack`."""
    positions, batch, width = _padding(tree)
    if padded.dim() < 2 or padded.shape[0] != batch or padded.shape[1] != width:
        raise TreeError(
            "padded", f"must be [{batch}, {width}, ...]", f"shape {tuple(padded.shape)}"
        )
    return padded.flatten(0, 1).index_select(0, positions)


def unpack(tree: BroadcastTree, packed: Tensor, fill: float) -> Tensor:
    """See `BroadcastTree.unpack`."""
    positions, batch, width = _padding(tree)
    tree.check("packed", packed, tree.levels[1])
    out = packed.new_full((batch * width, *packed.shape[1:]), fill)
    filled = out.index_copy(0, positions.long(), packed)
    return filled.reshape(batch, width, *packed.shape[1:])
