"""Ranking inside segments: the best rows of each, and losses over the rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops import segments
from ikbo_tree.ops.elementwise import check_float, check_plain, raised, widened
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree

REDUCTIONS = ("mean", "sum", "none")

PAIRS = 1 << 18
"""Pairs that are looked at in one call of torch: on a CPU they stay in its caches."""


def segment_topk(
    scores: Tensor, k: int, *, tree: BroadcastTree, level: str, of: str, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The k best rows of `level` below each row of `of`, best first.

    Ties go to the lower row first; NaN counts as the largest, as in torch.topk.

    Args:
        scores: [rows of `level`], a float dtype.
        k: how many, at least 1.
        tree: the tree.
        level: the scores' level.
        of: a level at or above `level`, or a table reached from it.
        impl: `"auto"`, `"reference"` or `"torch"`: sorting is torch's in all of them.

    Returns:
        (values, indices), both [rows of `of`, k]: the scores in their dtype, and their rows of
        `level`, int64. Where a segment has less than k rows, -inf and -1; in dead rows 0 and 0.
        Values are differentiable any number of times.

    Raises:
        TreeError: unknown names, `of` not above `level`, k < 1; shapes or devices that do not fit.
        TypeError: scores of no float dtype.
        UnsupportedError: `impl` is another one.

    >>> tree = BroadcastTree.from_counts({"item": [3, 1]}, root="user")
    >>> values, rows = segment_topk(
    ...     torch.tensor([1.0, 3.0, 3.0, 2.0]), 2, tree=tree, level="item", of="user"
    ... )
    >>> rows.tolist(), values.tolist()
    ([[1, 2], [3, -1]], [[3.0, 3.0], [2.0, -inf]])
    """
    checked_name(impl)
    check_plain(impl, "segment_topk")
    if k < 1:
        raise TreeError("k", "must be at least 1", str(k))
    _check_scores("scores", scores, tree, level)
    check_float("scores", scores)
    index, offsets = tree.ancestors(level, of=of), tree.offsets(level, of=of)
    rows, live = scores.shape[0], tree.live(level)
    if live is not None:
        dead = torch.arange(rows, device=scores.device) >= live
        index = index.masked_fill(dead, offsets.shape[0])  # behind all segments
        offsets = torch.minimum(offsets, live)
    best = torch.sort(scores.detach(), descending=True, stable=True).indices
    best = best[torch.sort(index[best], stable=True).indices]
    at = offsets[:-1].unsqueeze(1) + torch.arange(k, dtype=offsets.dtype, device=scores.device)
    found = at < offsets[1:].unsqueeze(1)
    # One row more, which stands for none.
    best = torch.cat([best, best.new_full((1,), rows)])
    padded = torch.cat([scores, scores.new_full((1,), float("-inf"))])
    indices = best[torch.where(found, at, rows)]
    values = padded.index_select(0, indices.flatten()).view(indices.shape)
    indices = indices.masked_fill(~found, -1)
    return zero_dead_rows(values, tree.live(of)), zero_dead_rows(indices, tree.live(of))


def listwise_softmax_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Softmax cross-entropy over each segment: minus the sum of `label * log_softmax(score)`.

    A row of `of` is one list of candidates, its loss that of ListNet with the labels as weights. A
    list without a positive label, all of them 0, is left out: it has loss 0, and no part in the
    mean.

    Args:
        scores: [rows of `level`], a float dtype. A -inf leaves a row with label 0 out of its list.
        labels: [rows of `level`], of any dtype: relevance or weight, not negative (unchecked).
        tree: the tree.
        level: the level of the candidates.
        of: the level (or table) of the lists, at or above `level`.
        reduction: `"mean"` over lists that have a positive label, 0 where there are none; `"sum"`;
            `"none"`: one loss a list.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        A scalar, or [rows of `of`] for `"none"`, in float32 (float64 for float64), summed in a
        fixed order; dead rows are zero. Differentiable once, by scores and labels.

    Raises:
        TreeError: unknown names, `of` not above `level`; shapes or devices that do not fit.
        TypeError: scores of no float dtype.
        ValueError: no such reduction.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> scores, labels = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])
    >>> listwise_softmax_loss(scores, labels, tree=tree, level="item", of="user")
    tensor(0.6931)
    """
    scores, labels = _lists(scores, labels, tree, level, reduction, impl)
    total = _summed(scores, tree, level, of, impl, "logsumexp")
    gap = raised(total, tree=tree, level=of, to=level, impl=impl) - scores
    # What has been left out would be 0 times infinity.
    gap = gap.masked_fill((scores == float("-inf")) & (labels == 0), 0)
    losses = _summed(labels * gap, tree, level, of, impl)
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    positive = _summed((labels != 0).to(torch.int32), tree, level, of, impl)
    return losses.sum() / (positive > 0).sum().clamp(min=1)


def pairwise_logistic_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """Logistic loss of each pair of rows below one row of `of` whose labels differ (RankNet).

    The sum over pairs (i, j) with label[i] > label[j] of `log(1 + exp(score[j] - score[i]))`. A
    segment whose labels are all the same has no pairs: it has loss 0, and no part in the mean.

    Args:
        scores: [rows of `level`], a float dtype.
        labels: [rows of `level`], of any dtype, compared with each other only. A NaN is in no pair.
        tree: the tree.
        level: the level of the candidates.
        of: the level (or table) of the segments, at or above `level`.
        reduction: `"mean"` over all pairs of all segments, 0 where there are none; `"sum"`;
            `"none"`: the sum over the pairs of each segment.
        impl: of the tree op that sums rows: `"auto"`, `"reference"`, `"torch"`, ... Pairs are
            always formed in plain torch, in bounded memory; on CUDA that waits for the device,
            since uneven segments have sizes that only the device knows.

    Returns:
        A scalar, or [rows of `of`] for `"none"`, in float32 (float64 for float64), summed in a
        fixed order; dead rows are zero. Differentiable once, by scores.

    Raises:
        TreeError: unknown names, `of` not above `level`; shapes or devices that do not fit.
        TypeError: scores of no float dtype.
        ValueError: no such reduction.

    >>> tree = BroadcastTree.from_counts({"item": [3, 1]}, root="user")
    >>> scores, labels = torch.zeros(4), torch.tensor([2.0, 1.0, 0.0, 1.0])
    >>> pairwise_logistic_loss(
    ...     scores, labels, tree=tree, level="item", of="user", reduction="none"
    ... )
    tensor([2.0794, 0.0000])
    """
    scores, labels = _lists(scores, labels, tree, level, reduction, impl)
    offsets, live = tree.offsets(level, of=of), tree.live(level)
    if live is not None:
        offsets = torch.minimum(offsets, live)
    rows, pairs = _pairs(scores, labels.detach(), offsets, tree.order(level, of=of))
    losses = _summed(rows, tree, level, of, impl)
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    return losses.sum() / _summed(pairs, tree, level, of, impl).sum().clamp(min=1)


def _lists(
    scores: Tensor, labels: Tensor, tree: BroadcastTree, level: str, reduction: str, impl: str
) -> tuple[Tensor, Tensor]:
    """Checked, in the dtype that losses have, zero in dead rows."""
    checked_name(impl)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    _check_scores("scores", scores, tree, level)
    _check_scores("labels", labels, tree, level)
    check_float("scores", scores)
    live = tree.live(level)
    scores = zero_dead_rows(widened(scores), live)
    return scores, zero_dead_rows(labels, live).to(scores.dtype)


def _check_scores(argument: str, x: Tensor, tree: BroadcastTree, level: str) -> None:
    tree.structure.at("level", level)
    if x.dim() != 1:
        raise TreeError(argument, "must have shape [rows]", shape_of(x))
    tree.check(argument, x, level)


def _summed(
    x: Tensor, tree: BroadcastTree, level: str, of: str, impl: str, op: str = "sum"
) -> Tensor:
    return segments.reduce(x, tree=tree, level=level, to=of, op=op, impl=impl)


class _Block(NamedTuple):
    """Some segments of like length: all pairs of `rows[:, anchors]` and `rows` are looked at.

    Attributes:
        rows: [segments, length], any row where a segment is shorter.
        there: bool, likewise: false there.
        anchors: some positions of the length.
    """

    rows: Tensor
    there: Tensor
    anchors: slice

    def take(self, x: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """Values [segments, anchors, 1] and [segments, 1, length], `fill` where none are."""
        found = x[self.rows].masked_fill(~self.there, fill)
        return found[:, self.anchors].unsqueeze(2), found.unsqueeze(1)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Writes values [segments, anchors]."""
        there = self.there[:, self.anchors]
        out[self.rows[:, self.anchors][there]] = values[there]


def _blocks(offsets: Tensor, order: Tensor | None) -> Iterator[_Block]:
    """All segments of two rows or more, by the power of two that their length goes into."""
    starts = offsets.cpu().numpy().astype(np.int64)
    lengths = np.diff(starts)
    sizes = np.where(lengths > 1, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))), 0).astype(np.int64)
    for size in np.unique(sizes[sizes > 0]).tolist():
        some = np.flatnonzero(sizes == size)
        step, anchors = max(1, PAIRS // size**2), max(1, min(size, PAIRS // size))
        for first in range(0, len(some), step):
            segment = some[first : first + step]
            length = int(lengths[segment].max())
            there = np.arange(length) < lengths[segment][:, None]
            at = np.where(there, starts[segment][:, None] + np.arange(length), 0)
            rows = torch.from_numpy(at).to(offsets.device)
            rows = rows if order is None else order[rows]
            mask = torch.from_numpy(there).to(offsets.device)
            for low in range(0, length, anchors):
                yield _Block(rows, mask, slice(low, min(low + anchors, length)))


def _pairs_forward(
    scores: Tensor, labels: Tensor, offsets: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    losses, pairs = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.int64)
    for block in _blocks(offsets, order):
        mine, other = block.take(scores, 0.0)
        label, theirs = block.take(labels, float("nan"))
        wins = label > theirs
        terms = torch.nn.functional.logsigmoid(mine - other).neg_().masked_fill_(~wins, 0)
        block.put(losses, terms.sum(2))
        block.put(pairs, wins.sum(2))
    return losses, pairs


def _pairs_backward(
    grad: Tensor, scores: Tensor, labels: Tensor, offsets: Tensor, order: Tensor | None
) -> Tensor:
    """Row by row what it wins and what it loses, so that nothing is scattered."""
    found = torch.zeros_like(scores)
    for block in _blocks(offsets, order):
        mine, other = block.take(scores, 0.0)
        label, theirs = block.take(labels, float("nan"))
        weight, loser_of = block.take(grad, 0.0)
        wins, loses = label > theirs, label < theirs
        by = torch.where(wins, other - mine, mine - other).sigmoid_()
        terms = by * torch.where(wins, -weight, loser_of)
        block.put(found, terms.masked_fill_(~(wins | loses), 0).sum(2))
    return found


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _pairs_gradient(grad, *ctx.saved_tensors), None, None, None


_pairs_gradient = register(
    "pairwise_logistic_backward",
    "(Tensor grad, Tensor scores, Tensor labels, Tensor offsets, Tensor? order) -> Tensor",
    _pairs_backward,
    lambda grad, scores, *rest: torch.empty_like(scores),
)
_pairs = register(
    "pairwise_logistic",
    "(Tensor scores, Tensor labels, Tensor offsets, Tensor? order) -> (Tensor, Tensor)",
    _pairs_forward,
    lambda scores, *rest: (torch.empty_like(scores), torch.empty_like(scores, dtype=torch.int64)),
    setup_context=_setup_context,
    backward=_backward,
)
"""Of each row, the loss of the pairs that it should win, and their number: an op, since how
segments are cut is decided on the host, which a traced program can't look into."""
