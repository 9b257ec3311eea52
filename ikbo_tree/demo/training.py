"""Both models trained in lockstep, and how far apart rounding may drive them.

Training can multiply rounding errors, so no fixed tolerance fits a loss curve. The bound is
computed instead (contract 2): the flat model is trained in float64 too, on the same batches. How
far the flat model's float32 curve strays from that one is what float32 rounding does to this
training, and the tree model's may stray as much: `ikbo_tree.testing.budget` has the exact words.

That is a bound only where training is smooth. A ReLU that one rounding switches, or AdamW dividing
a gradient that is all rounding by its own size, turned 1e-10 into a jump of up to 1e-3 in 4 of 6
seeds of the demo, in either model. So the models have SiLU, and AdamW an epsilon above that size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.demo.cost import milliseconds
from ikbo_tree.testing.budget import assert_within_budget

FLAT, TREE, EXACT = "flat", "tree", "float64"
"""The contenders, and their oracle: the flat model in float64."""


EPSILON = 1e-6
"""Of AdamW; see above."""


class Batch(Protocol):
    """Requests with inputs as the model takes them, and a label for every candidate."""

    @property
    def tree(self) -> ikbo.BroadcastTree:
        """The requests' tree."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """By level."""

    @property
    def labels(self) -> Tensor:
        """[candidates], 0 or 1."""

    def to(self, dtype: torch.dtype, /) -> Self:
        """The same in another float dtype."""


@dataclass(frozen=True)
class Curve:
    """One model's training: the loss and the milliseconds of every step."""

    losses: list[float]
    step_ms: list[float]


@dataclass(frozen=True)
class Agreement:
    """How close two float32 results are to each other and to their float64 oracle.

    Attributes:
        difference: largest difference between flat and tree.
        flat_error: largest error of the flat model.
        tree_error: largest error of the tree model.
        bound: what the tree model's may be.
    """

    difference: float
    flat_error: float
    tree_error: float
    bound: float


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean logistic loss over the candidates."""
    return F.binary_cross_entropy_with_logits(model(batch.tree, batch.inputs), batch.labels)


def train(
    flat: nn.Module, tree: nn.Module, batches: Sequence[Batch], *, learning_rate: float
) -> tuple[dict[str, Curve], Agreement]:
    """Trains both models, step by step in turns, then the flat one in float64 from the same start.

    Args:
        flat: the flat model; it is changed.
        tree: the tree model, of equal parameters; it is changed.
        batches: one a step.
        learning_rate: of AdamW.

    Returns:
        The curves of `FLAT`, `TREE` and `EXACT`, and how close they are.

    Raises:
        BudgetError: the tree model's losses are further off than rounding explains.
    """
    exact = Trainer(copy.deepcopy(flat).double(), learning_rate)
    trainers = {FLAT: Trainer(flat, learning_rate), TREE: Trainer(tree, learning_rate)}
    for number, batch in enumerate(batches):
        for name in (FLAT, TREE) if number % 2 else (TREE, FLAT):
            trainers[name].step(batch)
    for batch in batches:
        exact.step(batch.to(torch.float64))
    curves = {name: trainer.curve for name, trainer in (trainers | {EXACT: exact}).items()}
    found = agreement(
        torch.tensor(curves[FLAT].losses),
        torch.tensor(curves[TREE].losses),
        torch.tensor(curves[EXACT].losses, dtype=torch.float64),
        name="losses",
    )
    return curves, found


class Trainer:
    """One model, its optimiser and its curve so far."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.curve = Curve([], [])
        self._optimizer = torch.optim.AdamW(model.parameters(), learning_rate, eps=EPSILON)

    def step(self, batch: Batch) -> None:
        """One timed step: forward, backward, update."""
        loss = torch.zeros(())

        def work() -> None:
            nonlocal loss
            self._optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            loss.backward()
            self._optimizer.step()

        self.curve.step_ms.append(milliseconds(work, batch.tree.device))
        self.curve.losses.append(loss.item())


def scores_agree(flat: nn.Module, tree: nn.Module, batches: Sequence[Batch]) -> Agreement:
    """Scores both models on `batches`, in float32, against the flat model in float64.

    Raises:
        BudgetError: the tree model is further off than rounding explains.
    """
    exact_model = copy.deepcopy(flat).double()
    with torch.no_grad():
        flat_scores = torch.cat([flat(b.tree, b.inputs) for b in batches])
        tree_scores = torch.cat([tree(b.tree, b.inputs) for b in batches])
        doubles = (batch.to(torch.float64) for batch in batches)
        exact = torch.cat([exact_model(b.tree, b.inputs) for b in doubles])
    return agreement(flat_scores, tree_scores, exact, name="scores")


def agreement(flat: Tensor, tree: Tensor, exact: Tensor, *, name: str) -> Agreement:
    """`Agreement` of two float32 vectors with their float64 oracle.

    Raises:
        BudgetError: the tree's is further off than rounding explains.
    """
    spent = assert_within_budget(tree, exact, flat, name=name, rows=False)
    error = _largest(tree - exact)
    return Agreement(
        difference=_largest(flat - tree),
        flat_error=_largest(flat - exact),
        tree_error=error,
        bound=error / spent.maximum if error else 0.0,
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def forward_call(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """What scores `batch` without gradients."""

    def call() -> None:
        with torch.no_grad():
            model(batch.tree, batch.inputs)

    return call


def step_call(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """What runs forward and backward on `batch`, without an update; leaves no gradients behind."""
    model.zero_grad()

    def call() -> None:
        loss_of(model, batch).backward()
        model.zero_grad()

    return call
