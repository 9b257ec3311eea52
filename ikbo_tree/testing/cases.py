"""Random calls of every public op: what `check_op` and `ikbo-tree fuzz` try.

An `OpCase` makes a `Call` for a tree from a seed: which levels, widths and options, how to run it,
what it means. To fuzz an op of your own, write the two functions of a `Call` and register it:

    @op_case("double")
    def make(tree, rng):
        level = pick(rng, tree.levels)
        return Call(
            op="double",
            code=f'double(x, tree=tree, level="{level}")',
            inputs={"x": Input(level, shape=(3,))},
            outputs=(Rows(level),),
            run=lambda tree, x, impl: (double(x["x"], tree=tree, level=level),),
            oracle=lambda tree, x: (x["x"] * 2,),
        )

    check_op("double", tree)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.segment_softmax import reference as softmax_reference
from ikbo_tree.ops import segments
from ikbo_tree.testing import oracles
from ikbo_tree.testing.oracles import Array, Parents
from ikbo_tree.tree import BroadcastTree

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Rows:
    """What dim 0 of an input or output runs over.

    Attributes:
        level: the level or table; None: it has no rows (weights).
        owners: where dim 0 runs over packed entries: the row of `level` that owns each, -1 for an
            entry that nobody owns.
        unused: bool [live rows of the level, ...] (a prefix of the shape): entries of live rows
            that the op must never read, or write as zero.
    """

    level: str | None = None
    owners: NDArray[np.int64] | None = None
    unused: NDArray[np.bool_] | None = None

    def live(self, tree: BroadcastTree, size: Sequence[int]) -> NDArray[np.bool_]:
        """Bool of the size: false where inputs must not be read and results are zero."""
        live = np.ones(tuple(size), bool)
        if self.owners is not None:
            live[self.owners < 0] = False
        elif self.level is not None:
            live[tree.rows(self.level) :] = False
        if self.unused is not None:
            spread = self.unused.reshape(*self.unused.shape, *[1] * (live.ndim - self.unused.ndim))
            live[: len(self.unused)] &= ~spread
        return live

    def random(self, tree: BroadcastTree, size: Sequence[int], seed: int, dead: float) -> Tensor:
        """Float64 normal values, `dead` where not live; the same ones under any capacity."""
        rows = len(size) and size[0]
        if self.level is not None and self.owners is None:
            rows = tree.rows(self.level)
        values = torch.full(tuple(size), dead, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((rows, *size[1:]), generator=generator, dtype=torch.float64)
        values[:rows] = drawn
        return torch.where(torch.from_numpy(self.live(tree, size)), values, dead)

    def roots(self, tree: BroadcastTree, size: int) -> NDArray[np.int64]:
        """[size]: the root row that each entry of dim 0 lies below.

        -1 where there is none: dead entries, weights, and tables, which many root rows share.
        """
        found = np.full(size, -1, np.int64)
        if self.level is None or self.level in tree.tables:
            return found
        up, root = Parents(tree), tree.levels[0]
        owners = np.arange(size) if self.owners is None else self.owners
        for i, owner in enumerate(owners):
            if 0 <= owner < tree.rows(self.level):
                found[i] = up.above(self.level, int(owner), root)
        return found


@dataclass(frozen=True)
class Input(Rows):
    """One differentiable input of a call.

    Attributes:
        shape: of one row (or packed entry); of the whole tensor where it has no rows.
        scale: standard deviation of the random values.
    """

    shape: tuple[int, ...] = ()
    scale: float = 1.0

    def size(self, tree: BroadcastTree) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        if self.owners is not None:
            return len(self.owners), *self.shape
        return self.shape if self.level is None else (tree.capacity(self.level), *self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op, apart from the values of its inputs.

    Attributes:
        op: the case's name.
        code: the call as source, for messages.
        inputs: the differentiable inputs by name.
        outputs: what dim 0 of each output runs over.
        run: `(tree, tensors, impl)` -> the op's outputs.
        oracle: `(tree, arrays)` -> the outputs by definition; must work in float64.
        roundings: how often a value passes through a 16-bit output dtype (see `budget`).
        continuous: false where the gradient jumps between neighbouring inputs (a maximum with
            ties), so that moved inputs say nothing of rounding.
        terms: a context in which results of `truth` are sums of the absolute values of their terms,
            where these may cancel (see `budget`).
        multilinear: results are sums of products of inputs, so that with absolute values for inputs
            they are the sums of the absolute values of their terms.
        entangled: NaN in one row may reach others of its segment that do not depend on it (a causal
            mask, which contract 3 says nothing of).
        mixes_requests: rows of different root rows are combined, as in a reduction to a table.
        meaning: `(tree, tensors)` -> the outputs by flat torch, which what comes out is compared
            with, and differentiated; None: `run` with `impl="reference"`. A composition has one:
            its own reference is composed in the same way.
    """

    op: str
    code: str
    inputs: Mapping[str, Input]
    outputs: tuple[Rows, ...]
    run: Callable[[BroadcastTree, Tensors, str], tuple[Tensor, ...]]
    oracle: Callable[[BroadcastTree, Arrays], tuple[Array, ...]]
    roundings: float = 1.0
    continuous: bool = True
    terms: Callable[[], AbstractContextManager[Any]] | None = None
    multilinear: bool = False
    entangled: bool = False
    mixes_requests: bool = False
    meaning: Callable[[BroadcastTree, Tensors], tuple[Tensor, ...]] | None = None

    def truth(self, tree: BroadcastTree, x: Tensors) -> tuple[Tensor, ...]:
        """What should come out, differentiable."""
        return self.run(tree, x, "reference") if self.meaning is None else self.meaning(tree, x)

    def tensors(
        self, tree: BroadcastTree, dtype: torch.dtype, seed: int, *, dead: float = np.nan
    ) -> dict[str, Tensor]:
        """Random inputs on the CPU; `dead` where the op must not read."""
        return {
            name: (spec.random(tree, spec.size(tree), seed * 1009 + i, dead) * spec.scale).to(dtype)
            for i, (name, spec) in enumerate(self.inputs.items())
        }

    def output_grads(self, tree: BroadcastTree, like: Sequence[Tensor], seed: int) -> list[Tensor]:
        """A random gradient for each output, on the CPU; NaN where it must not be read."""
        return [
            rows.random(tree, x.shape, seed * 1009 + 500 + i, np.nan).to(x.dtype)
            for i, (rows, x) in enumerate(zip(self.outputs, like, strict=True))
        ]


Maker = Callable[[BroadcastTree, np.random.Generator], Call]

CASES: dict[str, Maker] = {}
"""The registered cases by name, in order of registration."""


def op_case(name: str) -> Callable[[Maker], Maker]:
    """Registers a function that makes a random call for a tree."""

    def register(make: Maker) -> Maker:
        CASES[name] = make
        return make

    return register


def make_call(op: str, tree: BroadcastTree, seed: int) -> Call:
    """The call of the case `op` that belongs to a tree and a seed.

    Raises:
        ValueError: no such case.
    """
    if op not in CASES:
        raise ValueError(f"op must be one of {', '.join(CASES)}; got {op!r}")
    return CASES[op](tree, np.random.default_rng(seed))


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of the options."""
    return options[int(rng.integers(len(options)))]


def reachable(tree: BroadcastTree, level: str) -> list[str]:
    """The level, those above it, and the tables of all of them."""
    structure = tree.structure
    at = structure.position[level]
    names = [tree.levels[i] for i in (at, *structure.lineage[at])]
    return names + [table for table in tree.tables if tree.table_level(table) in names]


def some_of(rng: np.random.Generator, options: Sequence[T]) -> list[T]:
    """At least one of the options, in any order."""
    shuffled = [options[int(i)] for i in rng.permutation(len(options))]
    return shuffled[: int(rng.integers(1, len(options) + 1))]


def flag(rng: np.random.Generator) -> bool:
    """True or False."""
    return bool(rng.integers(2))


def _trailing(rng: np.random.Generator) -> tuple[int, ...]:
    return pick(rng, [(), (1,), (3,), (2, 3), (8,), (33,), (0,)])


@op_case("broadcast")
def _broadcast(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    to = pick(rng, tree.levels)
    level = pick(rng, reachable(tree, to))

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        return (segments.broadcast(x["x"], tree=tree, level=level, to=to, impl=impl),)

    return Call(
        "broadcast",
        f'broadcast(x, tree=tree, level="{level}", to="{to}")',
        {"x": Input(level, shape=_trailing(rng))},
        (Rows(to),),
        run,
        lambda tree, x: (oracles.broadcast(tree, x["x"], level, to),),
    )


@op_case("reduce")
def _reduce(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    to = pick(rng, reachable(tree, level))
    how = pick(rng, ["sum", "mean", "max", "min", "logsumexp"])

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        return (segments.reduce(x["x"], tree=tree, level=level, to=to, op=how, impl=impl),)

    return Call(
        "reduce",
        f'reduce(x, tree=tree, level="{level}", to="{to}", op="{how}")',
        {"x": Input(level, shape=_trailing(rng))},
        (Rows(to),),
        run,
        lambda tree, x: (oracles.reduce(tree, x["x"], level, to, how),),
        continuous=how not in ("max", "min"),
        mixes_requests=to in tree.tables,
    )


def _softmax_terms(grad: Tensor, x: Tensor, route: Route) -> Tensor:
    """In place of the reference's backward, p (g - sum of p g): with a plus."""
    p = softmax_reference.forward(x, route)
    size = zero_dead_rows(grad, route.live_fine).abs()
    return p * (size + gather_rows(segment_sum(p * size, route), route))


@op_case("segment_softmax")
def _segment_softmax(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    of = pick(rng, reachable(tree, level))

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        return (segments.segment_softmax(x["x"], tree=tree, level=level, of=of, impl=impl),)

    return Call(
        "segment_softmax",
        f'segment_softmax(x, tree=tree, level="{level}", of="{of}")',
        {"x": Input(level, shape=_trailing(rng), scale=3.0)},
        (Rows(level),),
        run,
        lambda tree, x: (oracles.segment_softmax(tree, x["x"], level, of),),
        terms=lambda: mock.patch.object(softmax_reference, "backward", _softmax_terms),
        mixes_requests=of in tree.tables,
    )


def _linear_like(
    tree: BroadcastTree, rng: np.random.Generator, tail: tuple[int, ...]
) -> tuple[str, dict[str, Input], dict[str, Any], str]:
    """Level of the result, inputs, keywords and their source for a call of the linear family."""
    level = pick(rng, tree.levels)
    names = some_of(rng, reachable(tree, level))
    rows = pick(rng, [1, 4, 13])
    inputs: dict[str, Input] = {}
    for name in names:
        k = pick(rng, [1, 3, 8, 20])
        inputs[f"x_{name}"] = Input(name, shape=(k, *tail))
        inputs[f"w_{name}"] = Input(shape=(rows, k))
    options: dict[str, Any] = {}
    if level != tree.chain("inputs", names)[-1] or flag(rng):
        options["level"] = level
    code = f"{{{', '.join(names)}}}" + "".join(f", {k}={v!r}" for k, v in options.items())
    return level, inputs, options, code


def _named(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The entries of one mapping argument, `x_user` as `user`."""
    return {name[2:]: value for name, value in values.items() if name.startswith(prefix)}


@op_case("linear")
def _linear(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    from ikbo_tree.ops.linear import linear

    level, inputs, options, code = _linear_like(tree, rng, ())
    if flag(rng):
        inputs["bias"] = Input(shape=next(iter(_named(inputs, "w_").values())).shape[:1])
        code += ", bias=bias"

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        out = linear(
            _named(x, "x_"), _named(x, "w_"), tree=tree, bias=x.get("bias"), impl=impl, **options
        )
        return (out,)

    def oracle(tree: BroadcastTree, x: Arrays) -> tuple[Array, ...]:
        return (oracles.linear(tree, _named(x, "x_"), _named(x, "w_"), x.get("bias"), level),)

    outputs = (Rows(level),)
    return Call("linear", f"linear({code})", inputs, outputs, run, oracle, multilinear=True)


@op_case("linear_compression")
def _linear_compression(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    from ikbo_tree.ops.linear import linear_compression

    level, inputs, options, code = _linear_like(tree, rng, (pick(rng, [1, 5, 16]),))

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        out = linear_compression(_named(x, "x_"), _named(x, "w_"), tree=tree, impl=impl, **options)
        return (out,)

    def oracle(tree: BroadcastTree, x: Arrays) -> tuple[Array, ...]:
        return (oracles.linear_compression(tree, _named(x, "x_"), _named(x, "w_"), level),)

    return Call(
        "linear_compression",
        f"linear_compression({code})",
        inputs,
        (Rows(level),),
        run,
        oracle,
        multilinear=True,
    )
