"""Which ops treat a dim as a pure batch dim: the rules, as data.

A rule looks at a call whose batched operands carry their rows in a known dim, and says in which dim
the result carries them, or None: then rows may mix, and the op stays where it is. The call is then
made on coarse rows. Rules were measured op by op: gather before and after, on random inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from ikbo_tree.rewriting.values import ALONE, Merged, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor argument on coarse rows, which lie in `dim`, perhaps `merged` with others."""

    node: fx.Node
    dim: int
    merged: Merged = ALONE


@dataclass(frozen=True)
class RowCall:
    """A call of an op with some operands on coarse rows.

    Attributes:
        args: by the names of the op's schema, defaults filled in: Operands, nodes, numbers, lists.
        out: the original value, on fine rows: a tensor or several.
        fine: the shape of the first tensor argument, on fine rows.
    """

    args: dict[str, Any]
    out: Any
    fine: torch.Size

    def operands(self) -> list[Operand]:
        """Those on coarse rows."""
        return [x for x in _flat(self.args.values()) if isinstance(x, Operand)]

    def others(self) -> list[fx.Node]:
        """Tensors without them."""
        nodes = [x for x in _flat(self.args.values()) if isinstance(x, fx.Node)]
        return [n for n in nodes if isinstance(n.meta["val"], torch.Tensor)]

    def only(self, *names: str) -> Operand | None:
        """The one operand, if it is the first of these arguments; no other may be batched."""
        found = self.operands()
        first = self.args[names[0]]
        return first if found == [first] else None


@dataclass(frozen=True)
class Rows:
    """Where a result has its rows.

    Attributes:
        dim: one, or one for each output, None for outputs that are empty.
        merged: what is merged with them.
        args: arguments to change; `ROWS` in a list of sizes stands for the size of `dim`.
        target: another op to call with nothing but `args`.
    """

    dim: int | tuple[int | None, ...]
    merged: Merged = ALONE
    args: dict[str, Any] = field(default_factory=dict)
    target: Any = None


ROWS = object()
"""The number of rows, times those merged with each."""

Rule: TypeAlias = Callable[[RowCall], Rows | None]

RULES: dict[Any, Rule] = {}
"""By op overload packet, as `aten.relu`."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ops of `aten`, those that this version of torch has."""

    def register(function: Rule) -> Rule:
        for name in names:
            if hasattr(aten, name):
                RULES[getattr(aten, name)] = function
        return function

    return register


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def rank(x: Operand | fx.Node) -> int:
    """Number of dims."""
    return len(shape(x.node if isinstance(x, Operand) else x))


def front(dim: int, ndim: int) -> int:
    """A dim, counted from the front."""
    return dim + ndim if dim < 0 else dim


ELEMENTWISE = """
    __and__ __or__ __xor__ abs acos acosh add addcdiv addcmul alias angle asin asinh atan atan2
    atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil
    celu clamp clamp_max clamp_min clone contiguous copy copysign cos cosh deg2rad detach digamma
    div elu eq erf erfc erfinv exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod
    frac full_like ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite
    isinf isnan isneginf isposinf le leaky_relu lerp lgamma lift_fresh_copy log log10 log1p log2
    log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter ones_like polygamma
    positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign signbit
    silu sin sinc sinh softplus softshrink special_erfcx special_expit special_xlog1py sqrt square
    sub tan tanh threshold to _to_copy trunc true_divide where xlogy zeros_like
"""


@rule(*ELEMENTWISE.split())
def elementwise(call: RowCall) -> Rows | None:
    """All operands' rows meet in one dim of the result, where every other tensor has size 1."""
    ndim = len(call.out.shape)
    at = {(ndim - rank(x) + x.dim, x.merged) for x in call.operands()}
    if len(at) != 1:
        return None
    ((dim, merged),) = at
    for other in call.others():
        own = dim - (ndim - rank(other))
        if own >= 0 and not is_one(shape(other)[own]):
            return None
    return Rows(dim, merged)


def is_one(size: Any) -> bool:
    """Whether a size is the number 1."""
    return isinstance(size, int) and size == 1


def _dims(call: RowCall, name: str, ndim: int) -> set[int]:
    """The dims an argument names; all where it names none."""
    value = call.args.get(name)
    if value is None or value == []:
        return set(range(ndim))
    listed = value if isinstance(value, (list, tuple)) else [value]
    return {front(d, ndim) for d in listed}


@rule(
    "sum", "mean", "amax", "amin", "logsumexp", "all", "any", "prod", "var", "std", "norm",
    "linalg_vector_norm", "argmax", "argmin", "max", "min", "var_mean", "std_mean", "nansum",
    "median", "mode", "count_nonzero", "kthvalue",
)  # fmt: skip
def reduction(call: RowCall) -> Rows | None:
    """Over other dims than that of the rows."""
    x = call.only("self")
    if x is None or ("other" in call.args and call.args["other"] is not None):
        return elementwise(call) if "other" in call.args else None
    dims = _dims(call, "dim", rank(x))
    if x.dim in dims:
        return None
    keep = bool(call.args.get("keepdim", False))
    dim = x.dim if keep else x.dim - sum(d < x.dim for d in dims)
    many = isinstance(call.out, (tuple, list))
    return Rows((dim,) * len(call.out) if many else dim, x.merged)


@rule(
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
    "sort", "topk", "cummax", "cummin", "split", "split_with_sizes", "chunk", "unsafe_split",
    "unsafe_chunk", "unsafe_split_with_sizes", "glu", "tensor_split", "_safe_softmax", "argsort",
)  # fmt: skip
def along_another_dim(call: RowCall) -> Rows | None:
    """Works along one dim, and keeps it."""
    x = call.only("self")
    if x is None or front(call.args["dim"], rank(x)) == x.dim:
        return None
    many = isinstance(call.out, (tuple, list))
    return Rows((x.dim,) * len(call.out) if many else x.dim, x.merged)


@rule("one_hot", "bucketize", "prelu", "dropout", "feature_dropout", "alpha_dropout")
def of_the_first(call: RowCall) -> Rows | None:
    """Elementwise in the first argument, in evaluation; all else is the same for every row."""
    x = call.only("self" if "self" in call.args else "input")
    weight = call.args.get("weight")
    if x is None or call.args.get("train", False):
        return None
    if weight is not None and x.dim == 1 and not is_one(shape(weight)[0]):
        return None
    return Rows(x.dim, x.merged)


@rule("type_as")
def like_another(call: RowCall) -> Rows | None:
    """In the dtype of the other, whatever its rows."""
    x = call.args["self"]
    return Rows(x.dim, x.merged) if isinstance(x, Operand) else None


@rule("searchsorted")
def between_sorted(call: RowCall) -> Rows | None:
    """Values of any shape among one sorted vector."""
    x = call.only("self")
    if x is None or rank(call.args["sorted_sequence"]) != 1:
        return None
    return Rows(x.dim, x.merged)


@rule("cosine_similarity")
def cosine(call: RowCall) -> Rows | None:
    """Elementwise up to the dim that is summed over."""
    operands = call.operands()
    ndim = max(rank(call.args[name]) for name in ("x1", "x2"))
    places = {(ndim - rank(x) + x.dim, x.merged) for x in operands}
    summed = front(call.args["dim"], ndim)
    if len(places) != 1 or len(operands) != 2 or next(iter(places))[0] == summed:
        return None
    ((dim, merged),) = places
    return Rows(dim - (summed < dim), merged)


@rule("slice", "narrow")
def part_of_another_dim(call: RowCall) -> Rows | None:
    """A range of one dim: of another, or all of it."""
    x = call.only("self")
    if x is None:
        return None
    along_rows = front(call.args["dim"], rank(x)) == x.dim
    return None if along_rows and not is_whole(call.args) else Rows(x.dim, x.merged)


def is_whole(args: dict[str, Any]) -> bool:
    """Whether the arguments of a slice say all of a dim."""
    from_first, to_last = args.get("start") in (None, 0), args.get("end", 0) in (None, 2**63 - 1)
    return from_first and to_last and args.get("step") == 1


@rule("select", "unbind")
def without_a_dim(call: RowCall) -> Rows | None:
    """Takes one dim away."""
    x = call.only("self")
    if x is None:
        return None
    gone = front(call.args["dim"], rank(x))
    if gone == x.dim:
        return None
    dim = x.dim - (gone < x.dim)
    many = isinstance(call.out, (tuple, list))
    return Rows((dim,) * len(call.out) if many else dim, x.merged)


@rule("flip", "roll", "squeeze")
def of_other_dims(call: RowCall) -> Rows | None:
    """Dims that are named, and the rows' dim not among them; squeeze takes size 1 away."""
    x = call.only("self")
    name = "dims" if "dims" in call.args else "dim"
    if x is None or call.args.get(name) in (None, []):
        return None
    dims = _dims(call, name, rank(x))
    if x.dim in dims:
        return None
    gone = [d for d in dims if d < x.dim] if len(call.out.shape) < rank(x) else []
    gone = [d for d in gone if is_one(shape(x.node)[d])]
    return Rows(x.dim - len(gone), x.merged)
