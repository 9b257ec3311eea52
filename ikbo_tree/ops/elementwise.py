"""Elementwise ops of operands that live at different levels: add, mul, gate, film.

Operands meet at the coarsest level where they can: the user's and the vendor's are combined once a
vendor, and only what comes out is gathered to the items. The gathered copy becomes the result, in
place, and backward gathers again instead of keeping it, so no coarse operand is ever held at the
finest level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops import segments
from ikbo_tree.ops.checks import check_rows, check_trailing
from ikbo_tree.ops.crossing import added, entering, joins, raised, scaled, widened
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
    for name, producers in steps:
        handed = [partial.pop(producer) for producer in producers]
        own = inputs.get(name)
        terms = [*handed, *([] if own is None else [own])]
        # Two terms of one dtype and shape are added wide and rounded once by torch itself.
        alike = len({x.shape[1:] for x in terms}) == 1
        if name != last or len(terms) > 2 or not alike or len({x.dtype for x in terms}) > 1:
            handed = [widened(x) for x in handed]
        if own is not None and not alike:
            # Else its gradient would be rounded before autograd sums it over trailing dims.
            own = widened(own)
        for producer, x in zip(producers, handed, strict=True):
            gathered = segments.broadcast(x, tree=tree, level=producer, to=name, impl=impl)
            own = gathered if own is None else added(gathered, own)
        assert own is not None
        partial[name] = own
    out = partial[last].to(dtype)
    return zero_dead_rows(_unaliased(out, inputs.get(last)), tree.live(last))


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
    for name, producers in steps:
        handed = [partial.pop(producer) for producer in producers]
        own = inputs.get(name)
        if own is not None and name != last:
            own = entering(own, tree=tree, level=name, to=last)
        if name != last or len(handed) + (own is not None) > 2:
            handed = [widened(x) for x in handed]
        for producer, x in zip(producers, handed, strict=True):
            if own is None:
                own = segments.broadcast(x, tree=tree, level=producer, to=name, impl=impl)
            else:
                own = scaled(own, x, tree=tree, level=name, of=producer, impl=impl)
        assert own is not None
        partial[name] = own
    out = partial[last].to(dtype)
    return zero_dead_rows(_unaliased(out, inputs.get(last)), tree.live(last))


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
    out = _times(x, factors, tree, level, of, impl)
    return zero_dead_rows(out.to(x.dtype), tree.live(finest))


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
    finest = _checked_pair("scale", x, scale, tree, level, of, impl)
    if shift is not None:
        _checked_pair("shift", x, shift, tree, level, of, impl)
    out = _times(x, widened(scale) if shift is not None else scale, tree, level, of, impl)
    if shift is not None:
        out = added(out, raised(widened(shift), tree=tree, level=of, to=finest, impl=impl))
    return zero_dead_rows(out.to(x.dtype), tree.live(finest))


def _times(
    x: Tensor, factors: Tensor, tree: BroadcastTree, level: str, of: str, impl: str
) -> Tensor:
    """Their product at the finer of their levels; `factors` may be wider than `x`."""
    if level == of:
        live = tree.live(level)
        return zero_dead_rows(widened(factors), live) * zero_dead_rows(widened(x), live)
    if _finer(tree, level, of) == level:
        return scaled(x, factors, tree=tree, level=level, of=of, impl=impl)
    return scaled(factors, x, tree=tree, level=of, of=level, impl=impl)


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


def _unaliased(out: Tensor, x: Tensor | None) -> Tensor:
    """A copy where the only operand would be returned itself."""
    return out.clone() if out is x else out
