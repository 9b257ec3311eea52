"""The single checks of `check_op`: one function each, named after what it holds an op to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.testing.budget import Spent
from ikbo_tree.testing.cases import Call, Rows
from ikbo_tree.testing.evaluate import Expected, Results, expect, run
from ikbo_tree.testing.poison import canary_rows, natural_memory, poisoned_memory
from ikbo_tree.testing.treecode import with_capacity
from ikbo_tree.tree import BroadcastTree

SPARE_ROWS = 3
POINTS = 3
"""A step may lead across a kink, of a maximum or a relu: then the next point is tried."""


@dataclass
class Bench:
    """A call on a tree with its inputs, and what should come out.

    Attributes:
        call: the call.
        tree: on the CPU.
        impl: the implementation under test.
        dtype: of the inputs.
        seed: of the inputs.
        device: where the implementation runs; what it should give is computed on the CPU.
    """

    call: Call
    tree: BroadcastTree
    impl: str
    dtype: torch.dtype
    seed: int
    device: torch.device

    @property
    def constant_grads(self) -> bool:
        """Whether the gradient of an output is the same for all elements of a row."""
        return self.seed % 3 == 0

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs on the CPU, NaN where they must not be read."""
        return self.call.tensors(self.tree, self.dtype, self.seed)

    @cached_property
    def grads(self) -> list[Tensor]:
        """Gradients of the outputs on the CPU, NaN where they must not be read."""
        shapes = self.call.truth(self.tree, self.tensors)
        grads = self.call.output_grads(self.tree, shapes, self.seed)
        return [_constant_in_rows(g).contiguous() for g in grads] if self.constant_grads else grads

    @cached_property
    def expected(self) -> Expected:
        """What should come out."""
        return expect(self.call, self.tree, self.tensors, self.grads)

    @cached_property
    def placed(self) -> BroadcastTree:
        """The tree on the device under test."""
        return self.tree.to(self.device)

    def run(
        self,
        tensors: dict[str, Tensor] | None = None,
        grads: Sequence[Tensor] | None = None,
        *,
        wanted: Iterable[str] | None = None,
    ) -> Results:
        """Runs the implementation under test."""
        tensors = self.tensors if tensors is None else tensors
        grads = self.grads if grads is None else grads
        return run(
            self.call,
            self.placed,
            {name: x.to(self.device) for name, x in tensors.items()},
            [g.to(self.device) for g in grads],
            self.impl,
            wanted=wanted,
        )

    def rows_of(self, result: str) -> Rows:
        """What dim 0 of a result runs over, by its name in `Results.named`."""
        kind, name = result.rsplit(" ", 1)
        return self.call.outputs[int(name)] if kind == "output" else self.call.inputs[name]


def values(bench: Bench) -> dict[str, Spent]:
    """Outputs and gradients are within budget; dead elements are zero; inputs stay as they are."""
    tensors = {name: x.to(bench.device) for name, x in bench.tensors.items()}
    before = {name: x.clone() for name, x in tensors.items()}
    with poisoned_memory():
        got = bench.run(tensors)
    for name, x in tensors.items():
        if not torch.equal(x.nan_to_num(), before[name].nan_to_num()):
            raise AssertionError(f"the op wrote to its input {name}")
    _check_dead(bench, got)
    return bench.expected.check(got, bench.call)


def _check_dead(bench: Bench, got: Results) -> None:
    for name, value in got.named().items():
        dead = ~bench.rows_of(name).live(bench.tree, value.shape)
        if bool((value.cpu()[torch.from_numpy(dead)] != 0).any()):
            raise AssertionError(f"{name} is not zero in rows that are not live")


def reference(bench: Bench) -> None:
    """The float64 reference has the oracle's values, and finite differences of it as gradient."""
    wide = {name: x.double() for name, x in bench.tensors.items()}
    grads = [g.double() for g in bench.grads]
    got = run(bench.call, bench.tree, wide, grads, None)
    bench.expected.check(Results(got.outputs), bench.call)
    complaints = []
    for seed in range(bench.seed + 1, bench.seed + 2 * POINTS, 2):
        complaints.append(_slope_complaint(bench, grads, seed))
        if complaints[-1] is None:
            return
    raise AssertionError(complaints[0])


def _slope_complaint(bench: Bench, grads: Sequence[Tensor], seed: int) -> str | None:
    """What is wrong with the gradient at a point, if something is.

    Not at the rounded inputs, which may lie on the kink of a maximum.
    """
    smooth = bench.call.tensors(bench.tree, torch.float64, seed)
    got = run(bench.call, bench.tree, smooth, grads, None)
    directions = bench.call.tensors(bench.tree, torch.float64, seed + 1, dead=0.0)
    slope = sum(float((got.gradients[name] * directions[name]).sum()) for name in directions)
    steps = [_difference(bench, smooth, directions, grads, step) for step in (2e-4, 1e-4)]
    (far, size), (near, _) = steps
    # A central difference errs by the square of its step, and rounding by size * eps / step.
    allowed = 4 * abs(far - near) + 1e-9 * (1 + size + abs(slope))
    if abs(near - slope) <= allowed:
        return None
    return (
        f"the reference's gradient gives the slope {slope:.9g}, finite differences of the"
        f" oracle {near:.9g} (allowed {allowed:.1e})"
    )


def _difference(
    bench: Bench,
    at: dict[str, Tensor],
    along: dict[str, Tensor],
    grads: Sequence[Tensor],
    step: float,
) -> tuple[float, float]:
    """Slope of the oracle's outputs weighed by `grads`, and the size of their terms."""
    totals, size = [], 0.0
    for sign in (1, -1):
        moved = {name: (x + sign * step * along[name]).numpy() for name, x in at.items()}
        outputs = bench.call.oracle(bench.tree, moved)
        terms = [y * g.numpy() for y, g in zip(outputs, grads, strict=True)]
        finite = [np.where(np.isfinite(t), t, 0) for t in terms]
        totals.append(sum(float(t.sum()) for t in finite))
        size = sum(float(np.abs(t).sum()) for t in finite)
    return (totals[0] - totals[1]) / (2 * step), size


def subsets(bench: Bench) -> None:
    """Each subset of inputs may ask for gradients, with the same values; or none."""
    names = list(bench.tensors)
    rng = np.random.default_rng(bench.seed)
    tried = [names[:1], names[-1:], names[1:], [n for n in names if rng.integers(2)]]
    for wanted in tried:
        got = bench.run(wanted=wanted)
        if list(got.gradients) != wanted:
            raise AssertionError(f"gradients of {wanted} asked for, {list(got.gradients)} came")
        bench.expected.check(got, bench.call)


def strides(bench: Bench) -> None:
    """Inputs and gradients of any strides, with NaN between and around their elements.

    Gradients have stride 0 inside a row where they are constant there. (Stride 0 over rows too, as
    .sum() gives, makes the gradient of a softmax an exact zero, which is all rounding error.)
    """
    tensors = {
        name: _strided(x, bench.seed + i) for i, (name, x) in enumerate(bench.tensors.items())
    }
    grads = [_strided(g, bench.seed + i + 1) for i, g in enumerate(bench.grads)]
    if bench.constant_grads:
        grads = [_constant_in_rows(g) for g in bench.grads]
    bench.expected.check(bench.run(tensors, grads), bench.call)


def _strided(x: Tensor, kind: int) -> Tensor:
    """The same values in other strides."""
    if x.dim() == 0 or x.numel() == 0:
        return x
    if kind % 4 == 0:  # a slice along the last dim
        big = x.new_full((*x.shape[:-1], x.shape[-1] + 3), np.nan)
        big[..., 1:-2] = x
        return big[..., 1:-2]
    if kind % 4 == 1:  # every other row
        big = x.new_full((2 * x.shape[0] + 1, *x.shape[1:]), np.nan)
        big[1::2] = x
        return big[1::2]
    if kind % 4 == 2:  # dims stored the other way round
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    big = x.new_full((x.shape[0] + 4, *x.shape[1:]), np.nan)  # rows of a larger buffer
    big[2:-2] = x
    return big[2:-2]


def _constant_in_rows(x: Tensor) -> Tensor:
    """The first element of every row, expanded over it."""
    if x.numel() == 0:
        return x
    return x.reshape(len(x), -1)[:, 0].reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)


def isolation(bench: Bench) -> None:
    """NaN in one request reaches no other; NaN in one row reaches only what depends on it."""
    for fault in (np.nan, np.inf):
        _isolated_requests(bench, fault)
    if not bench.call.entangled:
        _isolated_rows(bench)


def _isolated_requests(bench: Bench, fault: float) -> None:
    tree, call = bench.tree, bench.call
    if call.mixes_requests or tree.rows(tree.levels[0]) < 2:
        return
    rng = np.random.default_rng(bench.seed)
    bad = int(rng.integers(tree.rows(tree.levels[0])))

    def spoil(x: Tensor, rows: Rows) -> Tensor:
        hit = torch.from_numpy(rows.roots(tree, len(x)) == bad) if x.dim() else None
        x = x.clone()
        if hit is not None:
            x[hit] = fault
        return x

    tensors = {name: spoil(x, call.inputs[name]) for name, x in bench.tensors.items()}
    grads = [spoil(g, rows) for g, rows in zip(bench.grads, call.outputs, strict=True)]
    got = bench.run(tensors, grads)
    skip = {}
    for name, value in got.named().items():
        rows = bench.rows_of(name)
        if rows.level is None:
            skip[name] = np.ones(value.shape, bool)
            continue
        away = rows.roots(tree, len(value)) == bad
        if rows.level in tree.tables:
            away = _of_table_rows_below(tree, rows, bad, len(value))
        skip[name] = np.broadcast_to(away.reshape(-1, *[1] * (value.dim() - 1)), value.shape).copy()
    bench.expected.check(got, call, skip=skip)


def _of_table_rows_below(
    tree: BroadcastTree, rows: Rows, root: int, size: int
) -> NDArray[np.bool_]:
    """[size]: entries of a table that something below one root row uses."""
    table = str(rows.level)
    of = tree.table_level(table)
    roots = Rows(of).roots(tree, tree.rows(of))
    index = tree.ancestors(of, of=table).cpu().numpy()[: len(roots)]
    used = np.isin(np.arange(tree.capacity(table)), index[roots == root])
    if rows.owners is None:
        return used
    found: NDArray[np.bool_] = (
        (rows.owners >= 0) & used[rows.owners] if len(used) else np.zeros(size, bool)
    )
    return found


def _isolated_rows(bench: Bench) -> None:
    """What depends on an element is what becomes NaN in the oracle and in the reference."""
    rng = np.random.default_rng(bench.seed + 1)
    call, tree = bench.call, bench.tree
    names = [name for name, spec in call.inputs.items() if spec.level is not None]
    name = names[int(rng.integers(len(names)))]
    live = np.flatnonzero(call.inputs[name].live(tree, bench.tensors[name].shape))
    if len(live) == 0:
        return
    spoilt = bench.tensors[name].clone()
    spoilt.view(-1)[int(live[rng.integers(len(live))])] = np.nan
    tensors = bench.tensors | {name: spoilt}
    wide = {n: x.double() for n, x in tensors.items()}
    truth = run(call, tree, wide, [g.double() for g in bench.grads], None)
    with np.errstate(invalid="ignore"):
        oracle = call.oracle(tree, {n: x.numpy() for n, x in wide.items()})
    truth.outputs = tuple(torch.from_numpy(np.asarray(y)) for y in oracle)
    got = bench.run(tensors)
    skip = {
        n: np.ones(x.shape, bool) if bench.rows_of(n).level is None else x.isnan().numpy()
        for n, x in truth.named().items()
    }
    bench.expected.check(got, call, skip=skip)


def dead_rows(bench: Bench) -> None:
    """Under a larger capacity: dead rows are never read, are zero, and change no live one."""
    if bench.tree.live(bench.tree.levels[0]) is not None:
        return  # a tree with dead rows of its own: every other check is this one
    tree = bench.tree
    spare = {name: SPARE_ROWS + i for i, name in enumerate((*tree.levels, *tree.tables))}
    padded = Bench(
        bench.call, with_capacity(tree, spare), bench.impl, bench.dtype, bench.seed, bench.device
    )
    got = padded.run()
    _check_dead(padded, got)
    cut = {n: _live_part(padded, n, x, bench) for n, x in got.named().items()}
    outputs = tuple(cut[f"output {i}"] for i in range(len(got.outputs)))
    gradients = {name: cut[f"gradient of {name}"] for name in got.gradients}
    bench.expected.check(Results(outputs, gradients), bench.call)


def _live_part(padded: Bench, name: str, x: Tensor, bench: Bench) -> Tensor:
    rows = padded.rows_of(name)
    if rows.level is None or rows.owners is not None:
        return x
    return x[: bench.tree.capacity(rows.level)]


def determinism(bench: Bench) -> None:
    """Two runs give the same bits, under torch's usual algorithms."""
    with natural_memory():
        first, second = bench.run(), bench.run()
    for name, x in first.named().items():
        if not torch.equal(_bits(x), _bits(second.named()[name])):
            raise AssertionError(f"{name} differs between two runs")


def _bits(x: Tensor) -> Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


def canaries(bench: Bench) -> None:
    """Nothing is written beside the buffers that the implementation allocates."""
    bench.grads  # noqa: B018  # made before memory is watched
    with canary_rows():
        got = bench.run()
    bench.expected.check(got, bench.call)


CHECKS: dict[str, Callable[[Bench], object]] = {
    "reference": reference,
    "values": values,
    "subsets": subsets,
    "strides": strides,
    "isolation": isolation,
    "dead_rows": dead_rows,
    "determinism": determinism,
    "canaries": canaries,
}
"""Every check by name, in the order in which `check_op` runs them."""
