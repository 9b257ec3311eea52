"""`check_model`: a tree model against the flat model that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.testing.budget import BudgetError, Spent, assert_within_budget
from ikbo_tree.tree import BroadcastTree

EVALUATIONS = 4


@dataclass(frozen=True)
class ModelReport:
    """How well the two agree; every share of a budget is at most 1.

    Attributes:
        outputs: budget used by each output, by its position.
        inputs: by the gradient of each differentiable input.
        parameters: by the gradient of each parameter, under the tree model's names.
    """

    outputs: dict[str, Spent] = field(default_factory=dict)
    inputs: dict[str, Spent] = field(default_factory=dict)
    parameters: dict[str, Spent] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest share of a budget that anything used."""
        every = (*self.outputs.values(), *self.inputs.values(), *self.parameters.values())
        return max((max(s.maximum, s.rms) for s in every), default=0.0)


def check_model(
    flat_model: nn.Module,
    tree_model: nn.Module,
    tree: BroadcastTree,
    inputs: Mapping[str, Tensor],
    *,
    levels: Mapping[str, str],
    to: str | None = None,
    output_levels: str | Sequence[str] | None = None,
    parameters: Mapping[str, str] | None = None,
    tree_argument: str = "tree",
    backward: bool = True,
    seed: int = 0,
) -> ModelReport:
    """Runs a flat model on broadcast inputs and a tree model on natural ones, and compares.

    The flat model is the model as it is today: every input has one row a candidate. It is called
    as `flat_model(**inputs)` with each input that has a level gathered to the level `to`. The tree
    model is called as `tree_model(tree=tree, **inputs)` with the inputs as they are. Both must
    have equal weights. Outputs, gradients of the inputs and of the parameters (of the sum of
    outputs times random numbers) must agree within budget: the exact values come from the flat
    model in float64, and the tree model may err as much as the flat model does in float32 and in
    its own dtype, then rounds once (`ikbo_tree.testing.budget`). Neither model is changed.

        flat = Ranker(...)                    # forward(self, user, history, item)
        fast = TreeRanker(...)                # forward(self, user, history, item, tree)
        fast.load_state_dict(flat.state_dict())
        tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
        report = check_model(
            flat,
            fast,
            tree,
            {"user": torch.randn(3, 16), "history": torch.randn(3, 20, 8),
             "item": torch.randn(5, 32)},
            levels={"user": "user", "history": "user", "item": "item"},
        )

    Args:
        flat_model: takes flat inputs; its own `train` or `eval` mode holds (dropout must be off).
        tree_model: takes the tree and natural inputs; outputs in the same order.
        tree: the tree, without dead rows, on the models' device.
        inputs: by the name of the argument. Those with a level have its rows in dim 0.
        levels: the level or table of each input that has one; others are passed as they are.
        to: the level that the flat model works at; default the tree's only leaf.
        output_levels: levels of the outputs of the tree model, one for all or one each; those
            coarser than `to` are broadcast before the comparison. Default `to`.
        parameters: where names differ, the flat model's name of each tree model's parameter.
        tree_argument: the argument that takes the tree.
        backward: also compare gradients.
        seed: of the outputs' random weights.

    Returns:
        The share of its budget that each comparison used.

    Raises:
        BudgetError: they disagree; the message names the output, input or parameter.
        TreeError: an input does not fit its level, the tree has dead rows, or `to` is needed.
        ValueError: the models' weights differ, or a parameter has no counterpart.
    """
    to = _leaf(tree) if to is None else to
    if tree.live(to) is not None:
        raise TreeError("tree", "must have no dead rows: flat models know none", repr(tree))
    for name, level in levels.items():
        if name not in inputs:
            raise TreeError("levels", f"must name inputs: {list(inputs)}", repr(name))
        tree.check(f'inputs["{name}"]', inputs[name], level)
    names = _counterparts(flat_model, tree_model, parameters or {})
    flat = _Side(flat_model, _flat_inputs(tree, levels, to), seed, backward)
    natural = _Side(tree_model, lambda x: {**x, tree_argument: tree}, seed, backward)

    exact = flat.run(inputs, torch.float64)
    evaluations = [flat.run(inputs, torch.float32, k) for k in range(EVALUATIONS)]
    evaluations.append(flat.run(inputs, None))
    got = natural.run(inputs, None, spread=_spread(tree, output_levels, to))
    if len(got.outputs) != len(exact.outputs):
        raise BudgetError(f"{len(got.outputs)} outputs, should be {len(exact.outputs)}")
    return ModelReport(
        _compared("output {}", got.outputs, exact.outputs, [e.outputs for e in evaluations]),
        _compared(
            "gradient of input {}",
            got.inputs,
            exact.inputs,
            [e.inputs for e in evaluations],
            whole=[name for name in inputs if name not in levels],
        ),
        _compared(
            "gradient of parameter {}",
            got.parameters,
            {name: exact.parameters[names[name]] for name in got.parameters},
            [{name: e.parameters[names[name]] for name in got.parameters} for e in evaluations],
            whole=list(got.parameters),
        ),
    )


def _compared(
    title: str,
    got: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    evaluations: Sequence[Mapping[str, Tensor]],
    whole: Sequence[str] = (),
) -> dict[str, Spent]:
    """What each tensor of `got` used of its budget; those of `whole` have no rows."""
    return {
        name: assert_within_budget(
            x,
            exact[name],
            [evaluation[name] for evaluation in evaluations],
            name=title.format(name),
            rows=name not in whole,
        )
        for name, x in got.items()
    }


@dataclass
class _Outcome:
    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Side:
    """One of the two models and how it is called."""

    model: nn.Module
    arrange: Callable[[Mapping[str, Tensor]], dict[str, Any]]
    seed: int
    backward: bool

    def run(
        self,
        inputs: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        moved: int = 0,
        spread: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> _Outcome:
        """Outputs and gradients, in another dtype if given, all floats moved a little if asked."""
        model = copy.deepcopy(self.model)
        if dtype is not None:
            model.to(dtype)
        generator = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.copy_(_moved(x, moved, generator))
        leaves = {}
        for name, x in inputs.items():
            leaf = x.detach()
            if x.is_floating_point():
                leaf = _moved(leaf if dtype is None else leaf.to(dtype), moved, generator)
                leaf.requires_grad_(self.backward)
            leaves[name] = leaf
        with torch.set_grad_enabled(self.backward), _same_randomness():
            found = model(**self.arrange(leaves))
            outputs = spread(list(found) if isinstance(found, tuple | list) else [found])
        outcome = _Outcome({str(i): y.detach() for i, y in enumerate(outputs)})
        if self.backward:
            self._differentiate(model, leaves, outputs, outcome)
        return outcome

    def _differentiate(
        self,
        model: nn.Module,
        leaves: Mapping[str, Tensor],
        outputs: Sequence[Tensor],
        outcome: _Outcome,
    ) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        terms = []
        for y in outputs:
            # A multiple of 1/64 below 4 is the same number in every dtype.
            weight = (torch.randn(y.shape, generator=generator) * 64).round().clamp(-255, 255) / 64
            if y.requires_grad:
                terms.append((y.double() * weight.to(y.device)).sum())
        floats = {name: x for name, x in leaves.items() if x.requires_grad}
        known = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wanted = [*floats.values(), *known.values()]
        if not terms or not wanted:
            return
        found = torch.autograd.grad(
            torch.stack(terms).sum(), wanted, allow_unused=True, materialize_grads=True
        )
        outcome.inputs = dict(zip(floats, found[: len(floats)], strict=True))
        outcome.parameters = dict(zip(known, found[len(floats) :], strict=True))


@contextmanager
def _same_randomness() -> Iterator[None]:
    # Models should draw no random numbers here; if they do, every run draws the same ones.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _moved(x: Tensor, moved: int, generator: torch.Generator) -> Tensor:
    """A copy; floats moved by up to one float32 rounding if `moved` is not 0."""
    if not moved or not x.is_floating_point():
        return x.detach().clone()
    by = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
    wide = x.detach().cpu().double()
    return (wide + wide * by * torch.finfo(torch.float32).eps).to(x.device, x.dtype)


def _leaf(tree: BroadcastTree) -> str:
    parents = {tree.parent(level) for level in tree.levels}
    leaves = [level for level in tree.levels if level not in parents]
    if len(leaves) != 1:
        raise TreeError("to", f"must name one of the tree's leaves {leaves}", "None")
    return leaves[0]


def _flat_inputs(
    tree: BroadcastTree, levels: Mapping[str, str], to: str
) -> Callable[[Mapping[str, Tensor]], dict[str, Any]]:
    maps = {name: tree.ancestors(to, of=level).long() for name, level in levels.items()}
    # Plain indexing, not the library's broadcast: this side stands for a model without it.
    return lambda x: {n: y[maps[n]] if n in maps else y for n, y in x.items()}


def _spread(
    tree: BroadcastTree, output_levels: str | Sequence[str] | None, to: str
) -> Callable[[list[Tensor]], list[Tensor]]:
    def spread(outputs: list[Tensor]) -> list[Tensor]:
        given = to if output_levels is None else output_levels
        each = [given] * len(outputs) if isinstance(given, str) else list(given)
        if len(each) != len(outputs):
            raise ValueError(f"output_levels names {len(each)} outputs of {len(outputs)}")
        return [
            y if level == to else y[tree.ancestors(to, of=level).long()]
            for y, level in zip(outputs, each, strict=True)
        ]

    return spread


def _counterparts(flat: nn.Module, fast: nn.Module, renamed: Mapping[str, str]) -> dict[str, str]:
    """The flat model's name of each parameter of the tree model; their values must be equal."""
    theirs = dict(flat.named_parameters())
    names = {}
    for name, parameter in fast.named_parameters():
        other = renamed.get(name, name)
        if other not in theirs:
            raise ValueError(
                f"parameter {name!r} of the tree model has no counterpart {other!r} in the flat"
                f" model, which has {list(theirs)}; give parameters={{{name!r}: ...}}"
            )
        if not torch.equal(parameter, theirs[other]):
            raise ValueError(
                f"parameter {name!r} differs from the flat model's {other!r}: load the same"
                " weights into both (load_state_dict)"
            )
        names[name] = other
    return names
