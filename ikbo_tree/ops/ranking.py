"""Ranking inside segments: the best rows of each, and losses over the rows of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.kernels.reduce.torch_impl import exponentials
from ikbo_tree.ops import segments
from ikbo_tree.ops.checks import check_float, check_plain, in_force
from ikbo_tree.ops.crossing import on_host, widened
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.ops.pairs import blocks, pairwise_logistic
from ikbo_tree.tree import BroadcastTree

REDUCTIONS = ("mean", "sum", "none")


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
    rows, live = scores.shape[0], tree.live(level)
    if rows and on_host(scores):
        route = segments.checked_route(tree, level, of)
        found, indices = _best_of_blocks(scores.detach(), k, route)
        values = scores.index_select(0, indices.flatten().clamp(min=0)).view(indices.shape)
        values = torch.where(found, values, float("-inf"))
        return zero_dead_rows(values, tree.live(of)), zero_dead_rows(indices, tree.live(of))
    index, offsets = tree.ancestors(level, of=of), tree.offsets(level, of=of)
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
    route = segments.checked_route(tree, level, of)
    losses: Tensor = _Listwise.apply(scores, labels, in_force(impl), *route)  # type: ignore[no-untyped-call]
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    positive = _Lists(route, in_force(impl)).sum((labels != 0).to(scores.dtype))
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
    rows, pairs = pairwise_logistic(scores, labels.detach(), offsets, tree.order(level, of=of))
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


def _best_of_blocks(scores: Tensor, k: int, route: Route) -> tuple[Tensor, Tensor]:
    """Which of [coarse, k] there are, and their rows, -1 where there are none; on a CPU."""
    indices = torch.full((route.coarse_rows, k), -1)
    for block in blocks(route.offsets, route.order, least=1):
        best = torch.sort(block.take(scores, float("-inf")), dim=1, descending=True, stable=True)
        # What is missing comes behind the equal values of what is there.
        at = best.indices[:, :k]
        there = block.there.gather(1, at)
        indices[block.segments, : at.shape[1]] = block.rows.gather(1, at).masked_fill(~there, -1)
    return indices >= 0, indices


class _Listwise(torch.autograd.Function):
    """Each list's loss from scores, labels, impl and the maps from rows to lists."""

    @staticmethod
    def forward(scores: Tensor, labels: Tensor, impl: str, *maps: Any) -> Tensor:
        lists = _Lists(Route(*maps), impl)
        return lists.sum(labels * lists.gaps(scores, labels)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, labels, ctx.impl, *maps = inputs
        ctx.save_for_backward(scores, labels, *maps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels, *maps = ctx.saved_tensors
        lists = _Lists(Route(*maps), ctx.impl)
        gap, left_out = lists.gaps(scores, labels)
        grad = lists.spread(grad)
        weight = grad * labels
        p = gap.neg().exp_().masked_fill_(left_out, 0)
        d_labels = grad * gap if ctx.needs_input_grad[1] else None
        return p.mul_(lists.spread(lists.sum(weight))).sub_(weight), d_labels, *[None] * 6


class _Lists(NamedTuple):
    """Sums over lists and back; on a CPU without the dispatcher, which costs more than they do."""

    route: Route
    impl: str

    def here(self, x: Tensor) -> bool:
        """Whether plain torch is called at once."""
        return on_host(x) and self.impl in ("auto", "torch")

    def sum(self, x: Tensor) -> Tensor:
        """[lists] from [rows]."""
        if self.here(x):
            return segment_sum(x, self.route)
        total: Tensor = _reduce(x, *self.route, "sum", self.impl)
        return total

    def spread(self, x: Tensor) -> Tensor:
        """[rows] from [lists]."""
        if self.here(x):
            return gather_rows(x, self.route)
        rows: Tensor = _broadcast(x, *self.route, self.impl)
        return rows

    def gaps(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """By how much each score lies below its list's log-sum-exp, and which rows are left out.

        Those have 0: 0 times infinity is not what a label of 0 says.
        """
        if self.here(scores):
            peak, _, total = exponentials(scores, self.route)
            total = total.log_().add_(peak)
        else:
            total = _reduce(scores, *self.route, "logsumexp", self.impl)
        left_out = (scores == float("-inf")).logical_and_(labels == 0)
        return self.spread(total).sub_(scores).masked_fill_(left_out, 0), left_out


def _summed(x: Tensor, tree: BroadcastTree, level: str, of: str, impl: str) -> Tensor:
    return segments.reduce(x, tree=tree, level=level, to=of, impl=impl)
