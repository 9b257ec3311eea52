"""Sums over segments with one fault each, as cases of `check_op`: every check must find its own."""

import functools
import itertools
from unittest import mock

import torch

from ikbo_tree.ops.segments import broadcast, reduce
from ikbo_tree.testing import oracles
from ikbo_tree.testing.cases import CASES, Call, Input, Rows

FAULTS = {}
"""For each fault: the function that has it, the checks that may find it, the dtype to use."""

_MAKERS = {}


def planted():
    """A context in which the faults are registered cases."""
    return mock.patch.dict(CASES, _MAKERS)


def fault(*checks, dtype=torch.float32, op="sum"):
    def register(function):
        FAULTS[function.__name__] = (function, checks, dtype)
        _MAKERS[function.__name__] = functools.partial(case, function, op)
        return function

    return register


def case(function, op, tree, rng):
    """`reduce` to the root, by `function` unless the reference is asked for."""
    level, to = tree.levels[-1], tree.levels[0]

    def run(tree, x, impl):
        if impl == "reference":
            out = reduce(x["x"], tree=tree, level=level, to=to, op=op, impl=impl)
            return (with_gradient(out, lambda g: 2 * g) if function is wrong_reference else out,)
        return (function(x["x"], tree, level, to, op),)

    return Call(
        op=function.__name__,
        code=f"{function.__name__}(x, tree=tree)",
        inputs={"x": Input(level, shape=(5,))},
        outputs=(Rows(to),),
        run=run,
        oracle=lambda tree, x: (oracles.reduce(tree, x["x"], level, to, op),),
    )


def correct(x, tree, level, to, op):
    return reduce(x, tree=tree, level=level, to=to, op=op, impl="torch")


class _Gradient(torch.autograd.Function):
    """The identity, whose gradient goes through a function."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def with_gradient(x, change):
    return _Gradient.apply(x, change)


@fault()
def nothing_wrong(*call):
    return correct(*call)


@fault("values")
def tail_dropped(x, tree, level, to, op):
    keep = torch.arange(len(x)) < tree.rows(level) - 1
    return correct(torch.where(keep[:, None], x, 0), tree, level, to, op)


@fault("values")
def neighbour_added(x, tree, level, to, op):
    out = correct(x, tree, level, to, op)
    return out + torch.nn.functional.pad(out[1:], (0, 0, 0, 1)) * 1e-3


@fault("isolation")
def nan_leaks_between_requests(x, tree, level, to, op):
    """As a mask by multiplication does, or a tile that is not masked on both operands."""
    live = (torch.arange(len(x)) < tree.rows(level))[:, None]
    return correct(x, tree, level, to, op) + torch.where(live, x, 0).detach().sum() * 0


@fault("isolation")
def gradient_leaks_between_requests(x, tree, level, to, op):
    live = (torch.arange(tree.capacity(to)) < tree.rows(to))[:, None]
    leak = lambda grad: torch.where(live, grad, 0) + torch.where(live, grad, 0).sum() * 0  # noqa: E731
    return with_gradient(correct(x, tree, level, to, op), leak)


@fault("values", dtype=torch.bfloat16)
def sums_kept_in_bfloat16(x, tree, level, to, op):
    index = tree.ancestors(level, of=to)
    rows = []
    for c in range(tree.capacity(to)):
        total = torch.zeros_like(x[0])
        for i in range(tree.rows(level)):
            if c < tree.rows(to) and index[i] == c:
                total = total + x[i]
        rows.append(total)
    return torch.stack(rows)


@fault("values")
def products_in_tf32(x, tree, level, to, op):
    bits = x.detach().view(torch.int32) & -(1 << 13)
    return correct(x + (bits.view(torch.float32) - x).detach(), tree, level, to, op)


@fault("values")
def gradient_in_bfloat16(x, tree, level, to, op):
    return correct(with_gradient(x, lambda g: g.bfloat16().float()), tree, level, to, op)


@fault("values", op="max")
def empty_maximum_is_zero(x, tree, level, to, op):
    out = correct(x, tree, level, to, op)
    return out.masked_fill(out == -torch.inf, 0)


@fault("values", "dead_rows")
def dead_rows_not_zeroed(x, tree, level, to, op):
    out = correct(x, tree, level, to, op)
    dead = torch.arange(tree.capacity(to)) >= tree.rows(to)
    return out.masked_fill(dead[:, None], 1.0)


@fault("values", "dead_rows")
def dead_rows_read(x, tree, level, to, op):
    return correct(x, tree, level, to, op) + x.detach()[-1:].sum() * 0


@fault("values", "dead_rows")
def dead_gradient_not_zeroed(x, tree, level, to, op):
    dead = torch.arange(tree.capacity(level)) >= tree.rows(level)
    changed = with_gradient(x, lambda g: g.masked_fill(dead[:, None], 1.0))
    return correct(changed, tree, level, to, op)


@fault("values")
def gradient_dropped(x, tree, level, to, op):
    return correct(x.detach(), tree, level, to, op)


@fault("values")
def gradient_doubled(x, tree, level, to, op):
    return correct(with_gradient(x, lambda g: 2 * g), tree, level, to, op)


@fault("strides")
def strides_ignored(x, tree, level, to, op):
    packed = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
    return correct(packed, tree, level, to, op)


class _StridesOfGradientIgnored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tree, level, to):
        ctx.route = tree, level, to
        return reduce(x, tree=tree, level=level, to=to, impl="torch")

    @staticmethod
    def backward(ctx, grad):
        tree, level, to = ctx.route
        packed = grad
        if grad.stride(-1) != 0:
            packed = torch.as_strided(grad, grad.shape, (grad.shape[1], 1))
        dx = broadcast(packed, tree=tree, level=to, to=level, impl="torch")
        return dx, None, None, None


@fault("strides")
def strides_of_gradient_ignored(x, tree, level, to, op):
    return _StridesOfGradientIgnored.apply(x, tree, level, to)


CALLS = itertools.count()


@fault("determinism")
def order_left_to_chance(x, tree, level, to, op):
    # No two calls in a row agree: a test of the test must not be left to chance itself.
    noise = (next(CALLS) % 2) * torch.finfo(torch.float32).eps
    return correct(x, tree, level, to, op) * (1 + noise)


@fault("values", "canaries")
def uninitialised_memory_read(x, tree, level, to, op):
    return correct(x, tree, level, to, op) + torch.empty(5).clamp(-1, 1) * 1e-3


@fault("canaries")
def writes_past_its_buffer(x, tree, level, to, op):
    out = torch.empty(tree.capacity(to), 5)
    room = out.untyped_storage().nbytes() // 4 - out.storage_offset()
    if room > out.numel():
        torch.as_strided(out, (out.numel() + 1,), (1,))[-1] = 1.0
    return correct(x, tree, level, to, op)


@fault("values")
def input_overwritten(x, tree, level, to, op):
    out = correct(x, tree, level, to, op)
    with torch.no_grad():
        x.detach()[: tree.rows(level)] *= 2
    return out


@fault("values")
def wrong_shape(x, tree, level, to, op):
    return correct(x, tree, level, to, op)[:-1]


@fault("reference")
def wrong_reference(x, tree, level, to, op):
    return correct(x, tree, level, to, op)


@fault("values")
def raises(x, tree, level, to, op):
    raise IndexError("out of range")
