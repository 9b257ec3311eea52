"""What a call should give: the exact results, and how far float32 evaluations are from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.testing.budget import Spent, assert_within_budget
from ikbo_tree.testing.cases import Call
from ikbo_tree.tree import BroadcastTree

EVALUATIONS = 5


@dataclass
class Results:
    """Outputs of one run, and the gradients of the inputs that asked for one."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Tensor]:
        """All of them: `output 0`, ..., `gradient of x`, ..."""
        outputs = {f"output {i}": x for i, x in enumerate(self.outputs)}
        return outputs | {f"gradient of {name}": x for name, x in self.gradients.items()}


def run(
    call: Call,
    tree: BroadcastTree,
    tensors: Mapping[str, Tensor],
    grads: Sequence[Tensor],
    impl: str | None,
    *,
    wanted: Iterable[str] | None = None,
) -> Results:
    """Runs a call forward and backward.

    Args:
        call: the call.
        tree: the tree, on the tensors' device.
        tensors: its inputs.
        grads: gradient of each output.
        impl: the implementation; None: what should come out.
        wanted: inputs that ask for a gradient; default all.
    """
    names = list(tensors) if wanted is None else list(wanted)
    leaves = {
        name: x.detach().requires_grad_(name in names) if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    outputs = call.truth(tree, leaves) if impl is None else call.run(tree, leaves, impl)
    results = Results(tuple(x.detach() for x in outputs))
    pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    if names and pairs:
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [leaves[name] for name in names],
            [g.to(y.dtype) for y, g in pairs],
            allow_unused=True,
        )
        for name, gradient in zip(names, found, strict=True):
            if gradient is None:
                raise AssertionError(f"the gradient of {name} was dropped")
            results.gradients[name] = gradient
    elif names:
        raise AssertionError("no output is differentiable")
    return results


@dataclass
class Expected:
    """What a call should give.

    Attributes:
        exact: outputs by the NumPy oracle, gradients by the float64 reference.
        evaluations: the reference in float32, on the inputs and on inputs moved by up to one unit
            in the last place, which is what any evaluation in float32 may do to them. One alone
            may be exact by luck in a row where others, as good, are not.
        terms: for results whose terms may cancel, what the terms add up to without their signs.
    """

    exact: Results
    evaluations: list[Results]
    terms: dict[str, Tensor] = field(default_factory=dict)

    def check(
        self, got: Results, call: Call, *, skip: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, Spent]:
        """Raises a BudgetError unless every result of `got` is within budget.

        Args:
            got: outputs and any of the gradients.
            call: the call.
            skip: for some results, bool of their shape: elements that may be anything.
        """
        exact = self.exact.named()
        evaluations = [evaluation.named() for evaluation in self.evaluations]
        spent = {}
        for name, value in got.named().items():
            others = [evaluation[name] for evaluation in evaluations]
            weight = name.removeprefix("gradient of ")
            rows = weight not in call.inputs or call.inputs[weight].level is not None
            spent[name] = assert_within_budget(
                value,
                exact[name],
                others,
                name=name,
                roundings=call.roundings,
                rows=rows,
                ignore=None if skip is None else skip.get(name),
                terms=self.terms.get(name),
            )
        return spent


def expect(
    call: Call, tree: BroadcastTree, tensors: Mapping[str, Tensor], grads: Sequence[Tensor]
) -> Expected:
    """The exact results for (rounded) inputs, and float32 evaluations of them. On the CPU."""
    wide = {name: x.double() for name, x in tensors.items()}
    grads64 = [g.double() for g in grads]
    exact = run(call, tree, wide, grads64, None)
    oracle = call.oracle(tree, {name: x.numpy() for name, x in wide.items()})
    exact.outputs = tuple(torch.from_numpy(np.asarray(y, np.float64)) for y in oracle)
    evaluations = []
    for k in range(EVALUATIONS if call.continuous else 1):
        at = {name: _moved(x, k, i) for i, (name, x) in enumerate(wide.items())}
        along = [_moved(g, k, 100 + i) for i, g in enumerate(grads64)]
        evaluations.append(run(call, tree, at, along, None))
    terms: dict[str, Tensor] = {}
    if call.terms is not None:
        with call.terms():
            terms = run(call, tree, wide, grads64, None).named()
    elif call.multilinear:
        sizes = {name: x.abs() for name, x in wide.items()}
        terms = run(call, tree, sizes, [g.abs() for g in grads64], None).named()
    return Expected(exact, evaluations, terms)


def _moved(x: Tensor, k: int, salt: int) -> Tensor:
    """`x` in float32; for k > 0 moved by up to one unit in the last place, every k another way."""
    if k == 0:
        return x.float()
    generator = torch.Generator().manual_seed(1000 * k + salt)
    by = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (x + x * by * torch.finfo(torch.float32).eps).float()
