"""Random calls of the interactions: dots of pairs, factorisation machine, cross network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.ops.cross_layers import (
    CrossLayer,
    LowRankCross,
    MatrixCross,
    MixtureCross,
    VectorCross,
    cross,
)
from ikbo_tree.ops.interactions import dot_interaction, factorization_machine
from ikbo_tree.testing.cases import Call, Input, Rows, Tensors, flag, op_case, pick, reachable
from ikbo_tree.testing.cases import some_of as some_names
from ikbo_tree.testing.cases_composed import (
    Outputs,
    against_flat,
    padded,
    side_by_side,
    source,
    to_level,
)
from ikbo_tree.tree import BroadcastTree

FORMS = ("vector", "matrix", "low rank", "mixture", "gated mixture")
Layer: TypeAlias = tuple[str, Mapping[str, Tensor]]


def flat_dots(x: Tensor, order: str, itself: bool) -> Tensor:
    """By the definition of the order, pair after pair."""
    z = torch.bmm(x, x.transpose(1, 2))
    size = x.shape[1]
    if order == "tril":
        pairs = [(i, j) for i in range(size) for j in range(i + itself)]
    else:
        pairs = [(i, j) for i in range(size) for j in range(i + 1 - itself, size)]
    i, j = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return z[:, i, j]


def flat_machine(x: Tensor) -> Tensor:
    """The usual formula, half of the square of the sum less the sum of squares."""
    return (x.sum(1).square() - x.square().sum(1)) / 2


def flat_cross(x0: Tensor, layers: list[Layer]) -> Tensor:
    """One layer after the other on the whole concatenation."""
    x = x0
    for form, w in layers:
        bias = w.get("bias", 0)
        if form == "vector":
            x = x0 * (x @ w["weight"])[:, None] + bias + x
        elif form == "matrix":
            x = x0 * (x @ w["weight"].T + bias) + x
        elif form == "low rank":
            x = x0 * (x @ w["v"].T @ w["u"].T + bias) + x
        else:
            x = _flat_mixture(x0, x, w) + x
    return x


def _flat_mixture(x0: Tensor, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    experts = w["v"].shape[0]
    gates = torch.full((len(x), experts), 1 / experts, dtype=x.dtype)
    if "gates" in w:
        gates = (x @ w["gates"].T).softmax(1)
    total = torch.zeros_like(x0)
    for e in range(experts):
        hidden = torch.tanh(torch.tanh(x @ w["v"][e].T) @ w["c"][e].T)
        total = total + gates[:, e, None] * (x0 * (hidden @ w["u"][e].T + w.get("bias", 0)))
    return total


def _of_fields(op: str, tree: BroadcastTree, rng: np.random.Generator) -> Call:
    """`dot_interaction` or `factorization_machine`."""
    level = pick(rng, tree.levels)
    names = some_names(rng, reachable(tree, level))
    options: dict[str, Any] = dict(to_level(tree, rng, level, names))
    dim = pick(rng, [1, 3, 8])
    inputs = {name: Input(name, shape=(pick(rng, [1, 2, 5]), dim)) for name in names}
    ours: Callable[..., Tensor] = factorization_machine
    theirs: Callable[[Tensor], Tensor] = flat_machine
    if op == "dot_interaction":
        order, itself = pick(rng, ["tril", "triu"]), flag(rng)
        ours, theirs = dot_interaction, lambda x: flat_dots(x, order, itself)
        options |= {"order": order, "self_interaction": itself}

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        return (padded(tree, level, theirs(side_by_side(tree, level, x, names))),)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        return (ours(x, tree=tree, impl=impl, **options),)

    code = f"{op}({{{', '.join(names)}}}, tree=tree{source(options)})"
    return against_flat(op, code, inputs, [Rows(level)], run, meaning, multilinear=True)


@op_case("dot_interaction")
def _dot_interaction(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _of_fields("dot_interaction", tree, rng)


@op_case("factorization_machine")
def _factorization_machine(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _of_fields("factorization_machine", tree, rng)


def _layer_shapes(form: str, width: int, rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
    rank, experts = pick(rng, [1, 3]), pick(rng, [1, 2])
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "vector": {"weight": (width,)},
        "matrix": {"weight": (width, width)},
        "low rank": {"u": (width, rank), "v": (rank, width)},
        "mixture": {
            "u": (experts, width, rank),
            "v": (experts, rank, width),
            "c": (experts, rank, rank),
        },
    }
    found = shapes[form.removeprefix("gated ")]
    if form == "gated mixture":
        found["gates"] = (experts, width)
    return found | ({"bias": (width,)} if flag(rng) else {})


def _layer(form: str, weights: Mapping[str, Tensor]) -> CrossLayer:
    kinds: dict[str, Callable[..., CrossLayer]] = {
        "vector": VectorCross,
        "matrix": MatrixCross,
        "low rank": LowRankCross,
    }
    return kinds.get(form, MixtureCross)(**weights)


@op_case("cross")
def _cross(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    names = some_names(rng, reachable(tree, level))
    options = to_level(tree, rng, level, names)
    inputs = {name: Input(name, shape=(pick(rng, [1, 3, 8]),)) for name in names}
    width = sum(spec.shape[0] for spec in inputs.values())
    forms = [pick(rng, FORMS) for _ in range(pick(rng, [1, 1, 2, 3]))]
    if flag(rng):
        forms = ["vector", *forms]
    shapes = [_layer_shapes(form, width, rng) for form in forms]
    for at, layer in enumerate(shapes):
        inputs |= {f"{at}_{n}": Input(shape=shape, scale=0.4) for n, shape in layer.items()}

    def layers(x: Tensors) -> list[Layer]:
        weights = [{n: x[f"{at}_{n}"] for n in layer} for at, layer in enumerate(shapes)]
        return list(zip(forms, weights, strict=True))

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        whole = side_by_side(tree, level, x, names)
        return (padded(tree, level, flat_cross(whole, layers(x))),)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        made = [_layer(*layer) for layer in layers(x)]
        return (cross({n: x[n] for n in names}, made, tree=tree, impl=impl, **options),)

    code = f"cross({{{', '.join(names)}}}, {forms}, tree=tree{source(dict(options))})"
    return against_flat("cross", code, inputs, [Rows(level)], run, meaning)
