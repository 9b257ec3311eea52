"""Random calls of compositions: elementwise ops and norms; what all cases of compositions share.

What a composition means is flat torch on broadcast inputs, differentiated by autograd: its own
`impl="reference"` only chooses that of the tree ops inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.ops import elementwise, norms
from ikbo_tree.testing.cases import (
    Arrays,
    Call,
    Input,
    Rows,
    Tensors,
    flag,
    op_case,
    pick,
    reachable,
    some_of,
)
from ikbo_tree.testing.oracles import Array
from ikbo_tree.tree import BroadcastTree

Outputs: TypeAlias = tuple[Tensor, ...]


@dataclass
class Switch:
    """Whether results shall be sums of the absolute values of their terms; see `Call.terms`."""

    on: bool = False

    @contextlib.contextmanager
    def turned_on(self) -> Iterator[None]:
        """In this context."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


def against_flat(
    op: str,
    code: str,
    inputs: dict[str, Input],
    outputs: Sequence[Rows],
    run: Callable[[BroadcastTree, Tensors, str], Outputs],
    meaning: Callable[[BroadcastTree, Tensors], Outputs],
    **options: Any,
) -> Call:
    """A call whose meaning and oracle are flat torch.

    Args:
        op: see `Call`, as `code`, `inputs`, `outputs` and `options`.
        code: likewise.
        inputs: likewise.
        outputs: likewise.
        run: `(tree, tensors, impl)` -> the op's outputs.
        meaning: `(tree, tensors)` -> the same by flat torch.
        **options: the rest of `Call`.
    """

    def oracle(tree: BroadcastTree, arrays: Arrays) -> tuple[Array, ...]:
        x = {name: torch.from_numpy(np.asarray(a)) for name, a in arrays.items()}
        return tuple(y.detach().numpy() for y in meaning(tree, x))

    return Call(op, code, inputs, tuple(outputs), run, oracle, meaning=meaning, **options)


def flat(tree: BroadcastTree, level: str, x: Tensor, of: str) -> Tensor:
    """Live rows of `level`: what a flat model has of `x` there."""
    return x[tree.ancestors(level, of=of)[: tree.rows(level)].long()]


def side_by_side(tree: BroadcastTree, level: str, x: Tensors, names: Sequence[str]) -> Tensor:
    """Live rows of `level`: what a flat model concatenates there."""
    return torch.cat([flat(tree, level, x[name], name) for name in names], dim=1)


def padded(tree: BroadcastTree, level: str, x: Tensor) -> Tensor:
    """With zeros for the rows that are not live."""
    return torch.cat([x, x.new_zeros(tree.capacity(level) - len(x), *x.shape[1:])])


def to_level(
    tree: BroadcastTree, rng: np.random.Generator, level: str, names: Sequence[str]
) -> dict[str, str]:
    """The keyword `level`, sometimes left out where it is the default."""
    return {} if tree.chain("names", names)[-1] == level and flag(rng) else {"level": level}


def source(options: dict[str, Any]) -> str:
    """Keywords as source, for messages."""
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _some_dims(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Some of them 1, to broadcast."""
    return tuple(n if rng.integers(4) else 1 for n in shape)


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    return pick(rng, [(), (1,), (5,), (2, 3), (0,)])


def _of_levels(op: str, tree: BroadcastTree, rng: np.random.Generator) -> Call:
    """`add` or `mul`."""
    level, shape = pick(rng, tree.levels), _shape(rng)
    names = some_of(rng, reachable(tree, level))
    inputs = {name: Input(name, shape=_some_dims(rng, shape)) for name in names}
    options = to_level(tree, rng, level, names)
    ours, theirs = (elementwise.add, torch.add) if op == "add" else (elementwise.mul, torch.mul)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        total = flat(tree, level, x[names[0]], names[0])
        for name in names[1:]:
            total = theirs(total, flat(tree, level, x[name], name))
        return (padded(tree, level, total),)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        return (ours(x, tree=tree, impl=impl, **options),)

    code = f"{op}({{{', '.join(names)}}}, tree=tree{source(options)})"
    return against_flat(op, code, inputs, [Rows(level)], run, meaning, multilinear=True)


@op_case("add")
def _add(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _of_levels("add", tree, rng)


@op_case("mul")
def _mul(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _of_levels("mul", tree, rng)


def _pair(tree: BroadcastTree, rng: np.random.Generator) -> tuple[str, str, str, dict[str, Input]]:
    """Level of the result, those of the operands, and the operands `x` and `other`."""
    level, shape = pick(rng, tree.levels), _shape(rng)
    of = pick(rng, reachable(tree, level))
    of_x, other = (level, of) if flag(rng) else (of, level)
    inputs = {
        "x": Input(of_x, shape=_some_dims(rng, shape)),
        "other": Input(other, shape=_some_dims(rng, shape)),
    }
    return level, of_x, other, inputs


@op_case("gate")
def _gate(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level, of_x, other, inputs = _pair(tree, rng)
    name, factor = pick(rng, list(elementwise.ACTIVATIONS)), pick(rng, [1.0, 2.0])
    options: dict[str, Any] = {"level": of_x, "of": other, "activation": name, "factor": factor}

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        gates = elementwise.ACTIVATIONS[name](flat(tree, level, x["other"], other)) * factor
        return (padded(tree, level, flat(tree, level, x["x"], of_x) * gates),)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        return (elementwise.gate(x["x"], x["other"], tree=tree, impl=impl, **options),)

    code = f"gate(x, other, tree=tree{source(options)})"
    # At NaN the slope of torch's relu is 1, and not what it was before.
    entangled = name == "relu"
    return against_flat("gate", code, inputs, [Rows(level)], run, meaning, entangled=entangled)


@op_case("film")
def _film(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level, of_x, other, inputs = _pair(tree, rng)
    if flag(rng):
        inputs["shift"] = Input(other, shape=_some_dims(rng, inputs["other"].shape))
    options = {"level": of_x, "of": other}

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        out = flat(tree, level, x["x"], of_x) * flat(tree, level, x["other"], other)
        if "shift" in x:
            out = out + flat(tree, level, x["shift"], other)
        return (padded(tree, level, out),)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        shift = x.get("shift")
        return (elementwise.film(x["x"], x["other"], shift, tree=tree, impl=impl, **options),)

    code = f"film({', '.join(inputs)}, tree=tree{source(options)})"
    return against_flat("film", code, inputs, [Rows(level)], run, meaning, multilinear=True)


def flat_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By torch, over all features."""
    width = list(x.shape[1:])
    if op == "layer_norm":
        return torch.nn.functional.layer_norm(x, width, weight, bias, eps)
    return torch.nn.functional.rms_norm(x, width, weight, eps)


class _NormTerms(torch.autograd.Function):
    """The same, but its gradients are sums of the absolute values of their terms, which cancel."""

    @staticmethod
    def forward(
        ctx: Any, op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.op, ctx.eps = op, eps
        ctx.save_for_backward(x, weight, bias)
        return flat_norm(op, x, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if ctx.op == "layer_norm":
            x = x - x.mean(1, keepdim=True)
        rstd = (x.square().mean(1, keepdim=True) + ctx.eps).rsqrt()
        size, grad = (x * rstd).abs(), grad.abs()
        d_weight = None if weight is None else (grad * size).sum(0)
        d_bias = None if bias is None else grad.sum(0)
        grad = grad if weight is None else grad * weight.abs()
        dx = grad + size * (grad * size).mean(1, keepdim=True)
        if ctx.op == "layer_norm":
            dx = dx + grad.mean(1, keepdim=True)
        return None, rstd * dx, d_weight, d_bias, None


def _norm(op: str, tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    names = some_of(rng, reachable(tree, level))
    inputs = {name: Input(name, shape=(pick(rng, [1, 2, 7, 20]),)) for name in names}
    width = sum(spec.shape[0] for spec in inputs.values())
    given = [n for n in ("weight", "bias")[: 2 if op == "layer_norm" else 1] if flag(rng)]
    inputs |= {name: Input(shape=(width,)) for name in given}
    options: dict[str, Any] = {"eps": pick(rng, [1e-5, 1e-2])} | to_level(tree, rng, level, names)
    terms = Switch()

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        parts, weights = {n: x[n] for n in names}, {n: x[n] for n in given}
        ours: Callable[..., Tensor] = getattr(norms, op)
        return (ours(parts, **weights, tree=tree, impl=impl, **options),)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        whole = side_by_side(tree, level, x, names)
        norm: Callable[..., Tensor] = _NormTerms.apply if terms.on else flat_norm
        out = norm(op, whole, x.get("weight"), x.get("bias"), options["eps"])
        return (padded(tree, level, out),)

    code = f"{op}({{{', '.join(names)}}}, {', '.join([*given, 'tree=tree'])}{source(options)})"
    return against_flat(op, code, inputs, [Rows(level)], run, meaning, terms=terms.turned_on)


@op_case("layer_norm")
def _layer_norm(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _norm("layer_norm", tree, rng)


@op_case("rms_norm")
def _rms_norm(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    return _norm("rms_norm", tree, rng)
