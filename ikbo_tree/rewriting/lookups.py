"""Look-ups on coarse rows: ids that the original never reads are made harmless."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ikbo_tree.rewriting.builder import Builder, aten
from ikbo_tree.rewriting.rowwise import Operand
from ikbo_tree.rewriting.values import Map, shape

LOOK_UPS = {
    aten.embedding: "indices",
    aten.index: "indices",
    aten.gather: "index",
    aten.one_hot: "self",
}
"""Ops that raise where an id is out of range, and the argument with the ids."""


def referenced(build: Builder, step: Map, ids: Operand) -> Operand:
    """Ids of rows that the original reads, 0 in others: there they may be out of range."""
    x = ids.node
    known = build.spread(_has_rows_below(build, step, ids), ids.merged, len(shape(x)) - ids.dim - 1)
    return replace(ids, node=build.call(aten.where.ScalarOther, known, x, 0))


def _has_rows_below(build: Builder, step: Map, ids: Operand) -> fx.Node:
    """[coarse rows] bool: some row of the map's refers to it."""
    call, x = build.call, ids.node
    rows = build.divided(build.size(x, ids.dim), ids.merged.outer * ids.merged.inner)
    if step.offsets is not None:
        # As long as there are rows, said in so many words: what is as long as offsets less one
        # would be compared with 1 before it may meet the ids.
        begins = call(aten.slice.Tensor, step.offsets, 0, 0, rows)
        ends = call(aten.slice.Tensor, step.offsets, 0, 1, build.plus(rows, 1))
        return call(aten.ne.Tensor, ends, begins)
    none = call(aten.zeros.default, [rows], dtype=torch.bool, device=x.meta["val"].device)
    index = step.index
    if index.meta["val"].dtype != torch.int64:
        index = call(aten.to.dtype, index, torch.int64)
    return call(aten.index_fill.int_Scalar, none, 0, index, True)
