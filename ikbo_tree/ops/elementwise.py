"""Elementwise ops of operands that live at different levels: add, mul, gate, film.

Operands meet at the coarsest level where they can: the user's and the vendor's are combined once a
vendor, and only what comes out meets the items, where one pass reads it, the items' own and writes
the result (`ikbo_tree::modulate`). Backward is one pass too. Where trailing dims broadcast, what
meets the items is gathered first, and becomes the result in place. Either way nothing coarse is
held at the finest level for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.ops import segments
from ikbo_tree.ops.checks import check_rows, check_trailing
from ikbo_tree.ops.crossing import entering, joins, modulated, widened
from ikbo_tree.tree import BroadcastTree

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


def add(
    inputs: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Sum over levels of what each row's ancestors hold: `out[i] = sum over l of x_l[a_l(i)]`.

    Args:
        inputs: for each level or table x [rows, ...]. Trailing dims broadcast as in torch, of one
            number of dims.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, ...] in the inputs' dtype, summed in float32 (float64 for float64) and
        rounded once. Dead rows are zero. Differentiable any number of times.

    Raises:
        TreeError: unknown names, names on several branches; shapes, rows or devices that do not
            fit.
        TypeError: dtypes that differ, or no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([10.0, 20.0]), "item": torch.tensor([1.0, 2.0, 3.0])}
    >>> add(x, tree=tree)
    tensor([11., 12., 23.])
    """
    steps = _checked(inputs, tree, level, impl)
    last, dtype = steps[-1][0], next(iter(inputs.values())).dtype
    partial: dict[str, Tensor] = {}
    at: dict[str, Any] = {"tree": tree, "impl": impl}
    for name, producers in steps:
        own = inputs.get(name)
        for producer in producers:
            x = partial.pop(producer)
            if own is None:
                own = segments.broadcast(x, level=producer, to=name, **at)
                continue
            rounded = name == last and producer == producers[-1]
            kept = dtype if rounded else accumulator(dtype)
            own = modulated(own, None, x, level=name, of=producer, dtype=kept, **at)
        assert own is not None
        partial[name] = own
    return _result(partial[last], inputs.get(last), dtype, tree.live(last))


def mul(
    inputs: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Product over levels of what each row's ancestors hold: `out[i] = prod over l of x_l[a_l(i)]`.

    Args:
        inputs: see `add`.
        tree: the tree.
        level: see `add`.
        impl: see `add`.

    Returns:
        [rows of the level, ...] in the inputs' dtype, multiplied in float32 (float64 for float64)
        and rounded once. Dead rows are zero. Differentiable any number of times; what is kept for
        that is the inputs and partial products above the finest level.

    Raises:
        TreeError: see `add`.
        TypeError: see `add`.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([10.0, 20.0]), "item": torch.tensor([1.0, 2.0, 3.0])}
    >>> mul(x, tree=tree)
    tensor([10., 20., 60.])
    """
    steps = _checked(inputs, tree, level, impl)
    last, dtype = steps[-1][0], next(iter(inputs.values())).dtype
    partial: dict[str, Tensor] = {}
    at: dict[str, Any] = {"tree": tree, "impl": impl}
    for name, producers in steps:
        own = inputs.get(name)
        if own is not None and name != last:
            own = entering(own, tree=tree, level=name, to=last)
        for producer in producers:
            x = partial.pop(producer)
            if own is None:
                # What is multiplied again has a gradient that nothing may round before its sum.
                x = widened(x) if len(producers) > 1 else x
                own = segments.broadcast(x, level=producer, to=name, **at)
                continue
            rounded = name == last and producer == producers[-1]
            kept = dtype if rounded else accumulator(dtype)
            own = modulated(own, x, None, level=name, of=producer, dtype=kept, **at)
        assert own is not None
        partial[name] = own
    return _result(partial[last], inputs.get(last), dtype, tree.live(last))


def gate(
    x: Tensor,
    gates: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    activation: str = "sigmoid",
    factor: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """`x` times a gate of another level: `out[i] = x[i] * factor * activation(gates[a(i)])`.

    The activation runs at the gates' own rows, once a row. (Gating by a user's or a domain's
    features as in PEPNet has the sigmoid and the factor 2.)

    Args:
        x: [rows of `level`, ...].
        gates: [rows of `of`, ...], before the activation. Trailing dims broadcast as in torch, of
            one number of dims.
        tree: the tree.
        level: `x`'s level.
        of: the gates' level: one of the two is the other or lies above it, a table may be.
        activation: `"sigmoid"`, `"tanh"`, `"relu"` or `"silu"`.
        factor: of the gate.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the finer of the two levels, ...] in `x`'s dtype, computed in float32 (float64 for
        float64) and rounded once. Dead rows are zero. Differentiable any number of times.

    Raises:
        TreeError: unknown names, neither level above the other; shapes, rows or devices that do not
            fit.
        TypeError: dtypes that differ, or no float dtype.
        ValueError: no such activation.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> gate(x, torch.zeros(2), tree=tree, level="item", of="user", factor=2.0)
    tensor([1., 2., 3.])
    """
    if activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {names}; got {activation!r}")
    finest = _checked_pair("gates", x, gates, tree, level, of, impl)
    factors = ACTIVATIONS[activation](entering(widened(gates), tree=tree, level=of, to=finest))
    if factor != 1.0:
        factors = factors * factor
    return _times(x, factors, None, tree, level, of, impl)


def film(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    impl: str = "auto",
) -> Tensor:
    """`x` scaled and shifted by another level: `out[i] = x[i] * scale[a(i)] + shift[a(i)]`.

    Feature-wise linear modulation (FiLM), plain: a model that predicts scales around 1 adds the 1.

    Args:
        x: [rows of `level`, ...].
        scale: [rows of `of`, ...]. Trailing dims broadcast as in torch, of one number of dims.
        shift: like `scale`; None: nothing is added.
        tree: the tree.
        level: `x`'s level.
        of: the level of scale and shift: one of the two is the other or lies above it, a table may
            be.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the finer of the two levels, ...] in `x`'s dtype, computed in float32 (float64 for
        float64) and rounded once. Dead rows are zero. Differentiable any number of times.

    Raises:
        TreeError: see `gate`.
        TypeError: see `gate`.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x, scale = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0])
    >>> film(x, scale, torch.ones(2), tree=tree, level="item", of="user")
    tensor([11., 21., 61.])
    """
    _checked_pair("scale", x, scale, tree, level, of, impl)
    if shift is not None:
        _checked_pair("shift", x, shift, tree, level, of, impl)
    return _times(x, scale, shift, tree, level, of, impl)


def _times(
    x: Tensor,
    factors: Tensor,
    shift: Tensor | None,
    tree: BroadcastTree,
    level: str,
    of: str,
    impl: str,
) -> Tensor:
    """`x * factors + shift` at the finer of their levels, in `x`'s dtype; dead rows are zero."""
    finest = _finer(tree, level, of)
    if level != of and finest == level:
        return modulated(x, factors, shift, tree=tree, level=level, of=of, dtype=x.dtype, impl=impl)
    live = tree.live(finest)
    if level == of:
        out = zero_dead_rows(widened(factors), live) * zero_dead_rows(widened(x), live)
    else:
        kept = x.dtype if shift is None else accumulator(x.dtype)
        out = modulated(factors, x, None, tree=tree, level=of, of=level, dtype=kept, impl=impl)
    if shift is None:
        return out.to(x.dtype)
    return zero_dead_rows((out + widened(shift)).to(x.dtype), live)


def _finer(tree: BroadcastTree, level: str, of: str) -> str:
    """The one of two names whose rows lie below the other's."""
    if level in tree.tables:
        tree.route(of, level)
        return of
    if of not in tree.tables and level in tree.levels and of in tree.levels:
        at, other = (tree.structure.position[name] for name in (level, of))
        if at in tree.structure.lineage[other]:
            return of
    tree.route(level, of)
    return level


def _checked(
    inputs: Mapping[str, Tensor], tree: BroadcastTree, level: str | None, impl: str
) -> list[tuple[str, list[str]]]:
    """The names coarse first, the result's level last, each with those that hand to it."""
    checked_name(impl)
    steps = joins("inputs", tuple(inputs), tree, level)
    like = next(iter(inputs.values()))
    for name, x in inputs.items():
        check_rows(f'inputs["{name}"]', x, like, tree, name)
    check_trailing(f"inputs of {list(inputs)}", list(inputs.values()))
    return steps


def _checked_pair(
    argument: str,
    x: Tensor,
    other: Tensor,
    tree: BroadcastTree,
    level: str,
    of: str,
    impl: str,
) -> str:
    """The finer level of two operands that fit each other."""
    checked_name(impl)
    finest = _finer(tree, level, of)
    check_rows("x", x, x, tree, level)
    check_rows(argument, other, x, tree, of)
    check_trailing(argument, [x, other])
    return finest


def _result(out: Tensor, own: Tensor | None, dtype: torch.dtype, live: Tensor | None) -> Tensor:
    """In the inputs' dtype; a copy, without its dead rows, where it is the only operand itself."""
    return zero_dead_rows(out.clone(), live) if out is own else out.to(dtype)
