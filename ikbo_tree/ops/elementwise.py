"""Elementwise ops of operands that live at different levels: add, mul, gate, film.

Operands meet at the coarsest level where they can: the user's and the vendor's are combined once a
vendor, and only what comes out is gathered to the items. The gathered copy becomes the result, in
place, and backward gathers again instead of keeping it, so no coarse operand is ever held at the
finest level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError, UnsupportedError
from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.ops import segments
from ikbo_tree.ops.memories import FLOATS, shape_of
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
            own = gathered if own is None else _added(gathered, own)
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
        out = _added(out, raised(widened(shift), tree=tree, level=of, to=finest, impl=impl))
    return zero_dead_rows(out.to(x.dtype), tree.live(finest))


def in_force(impl: str) -> str:
    """What backward shall use too; a traced program reads the context when it runs."""
    return impl if torch.compiler.is_compiling() else dispatch.in_force(impl)


def on_host(x: Tensor) -> bool:
    """Whether work may be cut up by what maps hold: no device to wait for, and nothing traced."""
    return x.device.type == "cpu" and untraced(x)


def untraced(x: Tensor) -> bool:
    """Whether `x` is a real tensor in an eager program."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


def check_plain(impl: str, op: str) -> None:
    """Raises an UnsupportedError where a kernel is asked for and plain torch alone would run."""
    if in_force(impl) not in ("auto", "reference", "torch"):
        raise UnsupportedError(in_force(impl), op, "it has no such implementation")


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype that ops calculate in: float64 as it is, all else as float32."""
    return x.to(accumulator(x.dtype))


def entering(x: Tensor, *, tree: BroadcastTree, level: str, to: str) -> Tensor:
    """`x` with zeros in the rows that no row of `to` depends on: dead and childless ones.

    A gradient of 0 times what such a row holds, or what it meets there, could be NaN (contracts 3,
    5 and 9); the gradient of this selection is 0 instead.
    """
    route = None if level == to else tree.route(to, level)
    if route is None:
        return zero_dead_rows(x, tree.live(level))
    used = (route.offsets.diff() > 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(used, x, x.new_zeros(()))


def raised(x: Tensor, *, tree: BroadcastTree, level: str, to: str, impl: str) -> Tensor:
    """`broadcast`, but `x` itself where it lies at `to` already."""
    if level == to:
        return x
    return segments.broadcast(x, tree=tree, level=level, to=to, impl=impl)


def scaled(
    fine: Tensor, coarse: Tensor, *, tree: BroadcastTree, level: str, of: str, impl: str
) -> Tensor:
    """`fine * broadcast(coarse)`, in the wider of their dtypes, that keeps nothing but the two.

    Args:
        fine: [rows of `level`, ...]; dead rows are read, and what comes of them is not zero.
        coarse: [rows of `of`, ...], of as many dims.
        tree: the tree.
        level: the finer level.
        of: a level above it, or a table reached from it; not `level` itself.
        impl: of the tree ops inside.
    """
    route = tree.route(level, of)
    assert route is not None
    out: Tensor = _Scaled.apply(fine, coarse, *route, in_force(impl))  # type: ignore[no-untyped-call]
    return out


class _Scaled(torch.autograd.Function):
    """Its own backward, since autograd's would keep the gathered copy of `coarse`."""

    @staticmethod
    def forward(fine: Tensor, coarse: Tensor, *rest: Any) -> Tensor:
        return _product(fine, _broadcast(coarse, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.impl = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fine, coarse, *maps = ctx.saved_tensors
        grad = widened(grad)
        d_fine = d_coarse = None
        if ctx.needs_input_grad[0]:
            product = grad * _broadcast(coarse, *maps, ctx.impl)
            d_fine = _summed_like(product, fine).to(fine.dtype)
        if ctx.needs_input_grad[1]:
            product = _summed_like(grad * fine, coarse)
            d_coarse = _reduce(product, *maps, "sum", ctx.impl).to(coarse.dtype)
        return d_fine, d_coarse, *[None] * 6


def _product(fine: Tensor, gathered: Tensor) -> Tensor:
    return gathered.mul_(fine) if _fits(gathered, fine) else gathered * fine


def _added(fresh: Tensor, x: Tensor) -> Tensor:
    return fresh.add_(x) if _fits(fresh, x) else fresh + x


def _fits(fresh: Tensor, x: Tensor) -> bool:
    """Whether the memory of `fresh` can take an elementwise result of the two.

    Autograd allows no writing to what an op's body made as a view.
    """
    if torch.is_grad_enabled() and (fresh.requires_grad or x.requires_grad):
        return False
    shape = torch.broadcast_shapes(fresh.shape, x.shape)
    return fresh.shape == shape and fresh.dtype == torch.promote_types(fresh.dtype, x.dtype)


def _summed_like(x: Tensor, like: Tensor) -> Tensor:
    """Summed over the trailing dims in which `like` was broadcast; rows stay."""
    dims = [d for d in range(1, x.dim()) if like.shape[d] != x.shape[d]]
    return x.sum(dims, keepdim=True) if dims else x


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
    dispatch.checked_name(impl)
    steps = joins("inputs", tuple(inputs), tree, level)
    like = next(iter(inputs.values()))
    for name, x in inputs.items():
        check_rows(f'inputs["{name}"]', x, like, tree, name)
    _check_trailing(f"inputs of {list(inputs)}", list(inputs.values()))
    return steps


def joins(
    argument: str, names: Sequence[str], tree: BroadcastTree, level: str | None
) -> list[tuple[str, list[str]]]:
    """How partial results travel down: for each name, coarse first, who hands its own to it.

    A level hands to the next finer one named, a table to the level behind it (`TreeMaps.chain`).

    Raises:
        TreeError: an unknown name, no name at all, or levels on different branches.
    """
    chain = tree.chain(argument, names, level)
    producers: dict[str, list[str]] = {name: [] for name in chain}
    for at, name in enumerate(chain[:-1]):
        producers[next(n for n in chain[at + 1 :] if n not in tree.tables)].append(name)
    return list(producers.items())


def check_float(argument: str, x: Tensor) -> None:
    """Raises a TypeError unless `x` is of a dtype that ops calculate with."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{argument} must be float64, float32, float16 or bfloat16; got {x.dtype}")


def check_rows(argument: str, x: Tensor, like: Tensor, tree: BroadcastTree, name: str) -> None:
    """Raises unless `x` is a float tensor like `like` with the rows of a level or table."""
    check_float(argument, x)
    if x.dtype != like.dtype:
        raise TypeError(f"{argument} must be {like.dtype} like the first operand; got {x.dtype}")
    tree.check(argument, x, name)


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
    dispatch.checked_name(impl)
    finest = _finer(tree, level, of)
    check_rows("x", x, x, tree, level)
    check_rows(argument, other, x, tree, of)
    _check_trailing(argument, [x, other])
    return finest


def _check_trailing(argument: str, tensors: Sequence[Tensor]) -> None:
    sizes = list(tensors[0].shape[1:])
    for x in tensors[1:]:
        fits = x.dim() == len(sizes) + 1 and all(
            size == other or size == 1 or other == 1
            for size, other in zip(sizes, x.shape[1:], strict=True)
        )
        if not fits:
            rule = f"must broadcast with {sizes} beyond dim 0, in as many dims"
            raise TreeError(argument, rule, shape_of(x))
        sizes = [
            other if size == 1 else size for size, other in zip(sizes, x.shape[1:], strict=True)
        ]


def _unaliased(out: Tensor, x: Tensor | None) -> Tensor:
    """A copy where the only operand would be returned itself."""
    return out.clone() if out is x else out
