"""Random calls of what ranks rows within a segment: the best ones, losses over lists and pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.ops import ranking
from ikbo_tree.testing.cases import Call, Input, Rows, Tensors, op_case, pick, reachable
from ikbo_tree.testing.cases_composed import Outputs, Switch, against_flat, padded, source
from ikbo_tree.tree import BroadcastTree


def _members(tree: BroadcastTree, level: str, of: str) -> list[list[int]]:
    """The live rows of `level` below each live row of `of`."""
    found: list[list[int]] = [[] for _ in range(tree.rows(of))]
    for row, at in enumerate(tree.ancestors(level, of=of)[: tree.rows(level)].tolist()):
        found[at].append(row)
    return found


def _best(scores: Tensor, rows: Sequence[int], k: int) -> list[int]:
    """By a sort in Python: NaN first, then the largest, then the lowest row."""
    values = scores.detach().tolist()
    return sorted(rows, key=lambda r: (values[r] == values[r], -values[r], r))[:k]


@op_case("segment_topk")
def _segment_topk(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    of, k = pick(rng, reachable(tree, level)), pick(rng, [1, 3, 10])
    options = {"level": level, "of": of}

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        values, rows = ranking.segment_topk(x["scores"], k, tree=tree, impl=impl, **options)
        return values, rows.double()

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        scores = x["scores"]
        values, rows = [scores.new_zeros(k)], [[0] * k]  # one in front, for stack
        for segment in _members(tree, level, of):
            taken = _best(scores, segment, k)
            missing = k - len(taken)
            values.append(torch.cat([scores[taken], scores.new_full((missing,), -torch.inf)]))
            rows.append([*taken, *[-1] * missing])
        best = torch.stack(values)[1:] + scores[:0].sum()
        return padded(tree, of, best), padded(tree, of, torch.tensor(rows)[1:]).double()

    return against_flat(
        "segment_topk",
        f"segment_topk(scores, {k}, tree=tree{source(options)})",
        {"scores": Input(level, scale=2.0)},
        [Rows(of), Rows(of)],
        run,
        meaning,
        continuous=False,
        entangled=True,  # a NaN comes first, and the last one falls out
        mixes_requests=of in tree.tables,
    )


def _flat_list(scores: Tensor, labels: Tensor) -> Tensor:
    gap = torch.where((scores == -torch.inf) & (labels == 0), 0, scores.logsumexp(0) - scores)
    return (labels * gap).sum()


def _flat_pairs(scores: Tensor, labels: Tensor) -> Tensor:
    total = scores[:0].sum()
    for i in range(len(scores)):
        below = scores[labels[i] > labels]
        total = total + torch.nn.functional.softplus(below - scores[i], threshold=700).sum()
    return total


class _ListTerms(torch.autograd.Function):
    """A list's loss, its gradients the sums of the absolute values of their terms."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(scores, labels)
        return _flat_list(scores, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        scores, labels = ctx.saved_tensors
        labels = labels.abs()
        size = scores.logsumexp(0).abs() + scores.abs()
        return grad.abs() * (scores.softmax(0) * labels.sum() + labels), grad.abs() * size


class _PairTerms(torch.autograd.Function):
    """A segment's loss over pairs, likewise."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(scores, labels)
        return _flat_pairs(scores, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, labels = ctx.saved_tensors
        wins = labels[:, None] > labels[None, :]
        weight = torch.where(wins, (scores[None, :] - scores[:, None]).sigmoid(), 0)
        return grad.abs() * (weight.sum(0) + weight.sum(1)), None


def _any_positive(labels: Tensor) -> Tensor:
    return (labels != 0).any().to(labels.dtype)


def _pairs(labels: Tensor) -> Tensor:
    return (labels[:, None] > labels[None, :]).sum().to(labels.dtype)


def _loss(
    op: str,
    tree: BroadcastTree,
    rng: np.random.Generator,
    parts: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[[Tensor], Tensor]],
    differentiable_labels: bool,
) -> Call:
    """A loss over segments; `parts`: one segment's, by its terms, and what it counts in a mean."""
    level = pick(rng, tree.levels)
    of, reduction = pick(rng, reachable(tree, level)), pick(rng, ["mean", "sum", "none"])
    inputs = {"scores": Input(level, scale=2.0)}
    drawn = np.floor(rng.uniform(0, pick(rng, [1, 2, 4]), tree.rows(level)))
    if differentiable_labels:
        inputs["labels"] = Input(level)
    options = {"level": level, "of": of, "reduction": reduction}
    loss, by_terms, weight = parts
    terms = Switch()

    def labels(tree: BroadcastTree, x: Tensors) -> Tensor:
        """NaN in dead rows."""
        if differentiable_labels:
            return x["labels"]
        found = torch.full((tree.capacity(level),), torch.nan, dtype=torch.float64)
        found[: len(drawn)] = torch.from_numpy(drawn)
        return found.to(tree.device)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        ours: Callable[..., Tensor] = getattr(ranking, op)
        return (ours(x["scores"], labels(tree, x), tree=tree, impl=impl, **options).reshape(-1),)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        scores = x["scores"]
        given = labels(tree, x).to(scores.dtype)
        none = scores[:0].sum() + given[:0].sum()  # differentiable where there is no segment
        segments = _members(tree, level, of)
        one = by_terms if terms.on else loss
        losses = [none, *(one(scores[s], given[s]) if s else none * 0 for s in segments)]
        if reduction == "none":
            return (padded(tree, of, torch.stack(losses)[1:] + none),)
        total = torch.stack(losses).sum()
        if reduction == "mean":
            sizes = [none.detach(), *(weight(given[s].detach()) for s in segments if s)]
            total = total / torch.stack(sizes).sum().clamp(min=1)
        return (total.reshape(1),)

    out = Rows(of if reduction == "none" else None)
    return against_flat(
        op,
        f"{op}(scores, labels, tree=tree{source(options)})",
        inputs,
        [out],
        run,
        meaning,
        terms=terms.turned_on,
        mixes_requests=of in tree.tables or out.level is None,
    )


@op_case("listwise_softmax_loss")
def _listwise_softmax_loss(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    parts = _flat_list, _ListTerms.apply, _any_positive
    return _loss("listwise_softmax_loss", tree, rng, parts, differentiable_labels=True)


@op_case("pairwise_logistic_loss")
def _pairwise_logistic_loss(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    parts = _flat_pairs, _PairTerms.apply, _pairs
    return _loss("pairwise_logistic_loss", tree, rng, parts, differentiable_labels=False)
