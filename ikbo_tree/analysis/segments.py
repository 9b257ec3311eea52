"""What the ops cost that move rows, look them up, pool histories or rank segments."""

from __future__ import annotations

import torch

from ikbo_tree.analysis.call import INDEX, Call, Lengths, entries, seen
from ikbo_tree.analysis.cost import Comparison, Cost, Step, Work
from ikbo_tree.tree import BroadcastTree

IDS = 8
"""Bytes of an id or of a row's number in torch."""


def broadcast(
    tree: BroadcastTree, width: int, *, level: str, to: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.broadcast` costs: it is the copy, in both forms.

    Args:
        tree: the tree.
        width: elements of a row.
        level: the level or table of the rows.
        to: the finer level.
        dtype: of the rows.

    Raises:
        TreeError: `to` not below `level`.
    """
    call = Call(tree, (level, to), to, dtype, "level, to")
    return _both([call.copy(level, width)])


def reduce(
    tree: BroadcastTree, width: int, *, level: str, to: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.reduce` costs: nothing in it is a copy, so both forms are one.

    Args:
        tree: the tree.
        width: elements of a row.
        level: the level of the rows.
        to: the coarser level or table.
        dtype: of the rows.

    Raises:
        TreeError: `to` not above `level`.
    """
    call = Call(tree, (level, to), level, dtype, "level, to")
    elements, rows = call.rows(level) * width, call.rows(to)
    moved = (elements + rows * width) * call.size + _offsets(call, to)
    return _both([Step("reduce", level, Cost(elements, moved))])


def segment_softmax(
    tree: BroadcastTree, width: int, *, level: str, of: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.segment_softmax` costs, in both forms; an operation an element.

    Args:
        tree: the tree.
        width: elements of a row.
        level: the level of the rows.
        of: the coarser level or table.
        dtype: of the rows.

    Raises:
        TreeError: `of` not above `level`.
    """
    call = Call(tree, (level, of), level, dtype, "level, of")
    elements = call.rows(level) * width
    moved = 2 * elements * call.size + _offsets(call, of)
    return _both([Step("segment_softmax", level, Cost(elements, moved))])


def segment_topk(
    tree: BroadcastTree, k: int, *, level: str, of: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.segment_topk` costs, in both forms: each score is looked at once.

    Args:
        tree: the tree.
        k: how many are wanted.
        level: the level of the scores.
        of: the coarser level or table.
        dtype: of the scores.

    Raises:
        TreeError: `of` not above `level`.
    """
    call = Call(tree, (level, of), level, dtype, "level, of")
    rows = call.rows(level)
    moved = rows * call.size + call.rows(of) * k * (call.size + IDS) + _offsets(call, of)
    return _both([Step("segment_topk", level, Cost(rows, moved))])


def listwise_softmax_loss(
    tree: BroadcastTree, *, level: str, of: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.listwise_softmax_loss` costs, in both forms; an operation a score.

    Args:
        tree: the tree.
        level: the level of scores and labels.
        of: the level or table of the lists.
        dtype: of scores and labels.

    Raises:
        TreeError: `of` not above `level`.
    """
    call = Call(tree, (level, of), level, dtype, "level, of")
    rows, moved = call.rows(level), _lists(call, of)
    return _both([Step("listwise_softmax_loss", level, Cost(rows, moved))])


def pairwise_logistic_loss(
    tree: BroadcastTree, *, level: str, of: str, dtype: torch.dtype = torch.float32
) -> Comparison:
    """What `ikbo_tree.pairwise_logistic_loss` costs, in both forms; an operation a pair of scores.

    Args:
        tree: the tree.
        level: the level of scores and labels.
        of: the level or table of the lists.
        dtype: of scores and labels.

    Raises:
        TreeError: `of` not above `level`.
    """
    call = Call(tree, (level, of), level, dtype, "level, of")
    counts = tree.offsets(level, of=of)[: call.rows(of) + 1].long().diff()
    pairs, moved = int((counts * (counts - 1) // 2).sum()), _lists(call, of)
    return _both([Step("pairwise_logistic_loss", level, Cost(pairs, moved))])


def embedding(
    tree: BroadcastTree,
    dim: int,
    *,
    level: str,
    to: str | None = None,
    ids: int = 1,
    vocabulary: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.embedding` costs; the flat form looks up once a row of `to`.

    Args:
        tree: the tree.
        dim: D, elements of a table's row.
        level: the level or table of the ids.
        to: the level that a flat model copies ids to; default `level` itself.
        ids: ids of a row, int64.
        vocabulary: V, rows of the table: no more are read. Default no bound.
        dtype: of the table.

    Raises:
        TreeError: `to` not below `level`.
    """
    call = Call(tree, (level, to or level), to, dtype, "level, to")
    flat = []
    if call.last != level:
        written = call.rows() * ids * IDS
        cost = Cost(0, call.gathered(level, call.last, ids, IDS) + written)
        flat.append(Step("broadcast", level, cost))

    def looked_up(name: str) -> Step:
        found = call.rows(name) * ids
        read = found if vocabulary is None else min(found, vocabulary)
        moved = found * IDS + (found + read) * dim * call.size
        return Step("embedding", name, Cost(0, moved))

    return Comparison(Work((looked_up(level),)), Work((*flat, looked_up(call.last))))


def pool(
    tree: BroadcastTree,
    lengths: Lengths,
    width: int,
    *,
    level: str,
    to: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.pool` costs; the flat form copies histories to `to` first.

    Args:
        tree: the tree.
        lengths: entries of a history, or a number for each row of `level`.
        width: elements of an entry.
        level: the level or table of the histories.
        to: the level that a flat model copies to; default `level` itself.
        dtype: of the entries.

    Raises:
        TreeError: `to` not below `level`, lengths that do not fit.
    """
    return _pooled("pool", tree, lengths, (width, width, 1), level, to, dtype)


def attention_pool(
    tree: BroadcastTree,
    lengths: Lengths,
    width: int,
    *,
    level: str,
    to: str | None = None,
    heads: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.attention_pool` costs; two operations an element of an entry.

    Args:
        tree: the tree.
        lengths: as in `pool`.
        width: D, elements of an entry and head.
        level: as in `pool`.
        to: as in `pool`.
        heads: H, scores of an entry.
        dtype: of entries and scores.

    Raises:
        TreeError: as in `pool`.
    """
    sizes = (heads * width, heads * (width + 1), 2)
    return _pooled("attention_pool", tree, lengths, sizes, level, to, dtype)


def _pooled(
    op: str,
    tree: BroadcastTree,
    lengths: Lengths,
    sizes: tuple[int, int, int],
    level: str,
    to: str | None,
    dtype: torch.dtype,
) -> Comparison:
    """`sizes`: elements of a result and of an entry, operations an element of the result."""
    call = Call(tree, (level, to or level), to, dtype, "level, to")
    width, entry, each = sizes
    found = entries("lengths", lengths, tree, level)

    def pooled(name: str, total: int) -> Step:
        moved = (total * entry + call.rows(name) * width) * call.size
        return Step(op, name, Cost(each * total * width, moved))

    own = int(found.sum())
    if call.last == level:
        return _both([pooled(level, own)])
    copied = int(seen(found, tree, call.last, level).sum())
    moved = (min(own, copied) + copied) * entry * call.size + INDEX * call.rows()
    copy = Step("broadcast", level, Cost(0, moved))
    return Comparison(Work((pooled(level, own),)), Work((copy, pooled(call.last, copied))))


def _offsets(call: Call, of: str) -> int:
    return INDEX * (call.rows(of) + 1)


def _lists(call: Call, of: str) -> int:
    """Bytes of scores, labels, offsets and a loss a list."""
    return (2 * call.rows() + call.rows(of)) * call.size + _offsets(call, of)


def _both(steps: list[Step]) -> Comparison:
    work = Work(tuple(steps))
    return Comparison(work, work)
