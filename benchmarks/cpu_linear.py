"""`linear` and `linear_compression` on a CPU beside flat models; see `bench_ops_cpu.py`.

Workloads are named `<op>-b<items>-r<items a user>-...`; K is that of each level, every level has
the same. Of two levels the arithmetic that is saved is at most 2 / (1 + 1/r) times, 1.97 at r = 64;
of three with two vendors a user 3 / (1 + 3/r).

Contenders:

- `ikbo-torch`: the public function, tree and all.
- `materialised+broadcast`: what an unmodified model runs: index_select of the coarse inputs, cat,
  one matmul with the given concatenated weight.
- `materialised`: the matmul alone, its concatenated input given.
- `decomposed`: one product a level, coarse results gathered and added in eager torch.
- `candidate`: the finest level's product alone. It does less; nothing can be faster than it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Results, Timing, cpu_peak_mb, interleaved
from torch import Tensor

import ikbo_tree as ikbo

VENDORS = 2
"""Vendors a user in workloads of three levels."""


@dataclass(frozen=True)
class Workload:
    """A call at one size.

    Attributes:
        op: `"linear"` or `"linear_compression"`.
        items: rows of the finest level.
        ratio: items a user.
        levels: 2 (user, item) or 3 (user, vendor, item).
        k: K of every level.
        n: N.
        m: M of linear_compression.
        dtype: of everything.
    """

    op: str
    items: int
    ratio: int
    levels: int
    k: int
    n: int
    m: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """As results files have it."""
        short = {"linear": "linear", "linear_compression": "lce"}[self.op]
        depth = "3" if self.levels == 3 else ""
        height = f"-m{self.m}" if self.m else ""
        return f"{short}{depth}-b{self.items}-r{self.ratio}-k{self.k}{height}-n{self.n}"

    def tree(self) -> ikbo.BroadcastTree:
        """Even counts: the ratio is what is studied here."""
        users = self.items // self.ratio
        if self.levels == 2:
            return ikbo.BroadcastTree.from_counts({"item": [self.ratio] * users}, root="user")
        counts = {
            "vendor": [VENDORS] * users,
            "item": [self.ratio // VENDORS] * (users * VENDORS),
        }
        return ikbo.BroadcastTree.from_counts(counts, root="user")


WORKLOADS = (
    Workload("linear", 1024, 64, 2, 512, 512),
    Workload("linear", 4096, 64, 2, 256, 256),
    Workload("linear", 16384, 64, 2, 128, 64),
    Workload("linear", 4096, 64, 3, 256, 256),
    Workload("linear", 4096, 1024, 2, 256, 256),
    Workload("linear", 4096, 64, 2, 256, 256, dtype=torch.bfloat16),
    Workload("linear_compression", 1024, 64, 2, 256, 64, 64),
    Workload("linear_compression", 1024, 64, 2, 512, 64, 128),
    Workload("linear_compression", 512, 64, 2, 512, 128, 256),
    Workload("linear_compression", 1024, 64, 3, 256, 64, 64),
    Workload("linear_compression", 1024, 64, 2, 256, 64, 64, torch.bfloat16),
)


@dataclass(frozen=True)
class Data:
    """Tensors of a workload; levels in `tree.levels`' order."""

    workload: Workload
    tree: ikbo.BroadcastTree
    x: dict[str, Tensor]
    weight: dict[str, Tensor]

    @staticmethod
    def of(workload: Workload) -> Data:
        """Normal values."""
        torch.manual_seed(0)
        tree = workload.tree()
        tail = (workload.n,) if workload.m else ()
        x, weight = {}, {}
        for level in tree.levels:
            x[level] = torch.randn(tree.rows(level), workload.k, *tail).to(workload.dtype)
            values = torch.randn(workload.m or workload.n, workload.k) / workload.k**0.5
            weight[level] = values.to(workload.dtype)
        return Data(workload, tree, x, weight)

    @property
    def leaf(self) -> str:
        """The finest level."""
        return self.tree.levels[-1]

    @property
    def flops(self) -> float:
        """Of the broadcast-free op."""
        rows = sum(self.tree.rows(level) for level in self.tree.levels)
        w = self.workload
        return 2.0 * rows * w.k * w.n * (w.m or 1)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The op's product on one input."""
        if self.workload.m:
            return torch.matmul(weight, x)
        return torch.nn.functional.linear(x, weight)

    def concatenated(self) -> Tensor:
        """Every level's input at the leaves, side by side."""
        parts = [
            self.x[level].index_select(0, self.tree.ancestors(self.leaf, of=level))
            for level in self.tree.levels[:-1]
        ]
        return torch.cat([*parts, self.x[self.leaf]], 1)

    def ours(self, **options: Any) -> Tensor:
        """The public function."""
        function: Callable[..., Tensor] = getattr(ikbo, self.workload.op)
        return function(self.x, self.weight, tree=self.tree, **options)

    def decomposed(self) -> Tensor:
        """A product a level, gathered and added."""
        out = self.multiply(self.x[self.leaf], self.weight[self.leaf])
        for level in self.tree.levels[:-1]:
            part = self.multiply(self.x[level], self.weight[level])
            out = out + part.index_select(0, self.tree.ancestors(self.leaf, of=level))
        return out

    def contenders(self) -> dict[str, Callable[[], object]]:
        """Forward passes."""
        flat_weight = torch.cat([self.weight[level] for level in self.tree.levels], 1)
        given = self.concatenated()
        found: dict[str, Callable[[], object]] = {
            "ikbo-torch": self.ours,
            "materialised+broadcast": lambda: self.multiply(self.concatenated(), flat_weight),
            "materialised": lambda: self.multiply(given, flat_weight),
            "decomposed": self.decomposed,
            "candidate": lambda: self.multiply(self.x[self.leaf], self.weight[self.leaf]),
        }
        if self.workload.dtype == torch.bfloat16:
            found["ikbo-torch-bf16-partials"] = partial(self.ours, partial_dtype=torch.bfloat16)
        return found

    def check(self) -> None:
        """Raises unless ours and the flat model agree, as no speed counts otherwise."""
        flat_weight = torch.cat([self.weight[level] for level in self.tree.levels], 1)
        flat = self.multiply(self.concatenated(), flat_weight)
        torch.testing.assert_close(self.ours(), flat, rtol=2e-2, atol=2e-2)

    def training_step(self, forward: Callable[[], Tensor]) -> Callable[[], object]:
        """Forward and backward with gradients of inputs and weights."""
        leaves = [*self.x.values(), *self.weight.values()]
        for leaf in leaves:
            leaf.requires_grad_()
        grad = torch.randn_like(forward())
        return lambda: torch.autograd.grad(forward(), leaves, grad)


def bench(results: Results, op: str, rounds: int) -> None:
    """All workloads of an op, forward, and forward with backward."""
    for workload in WORKLOADS:
        if workload.op == op:
            bench_forward(results, workload, rounds)
            bench_training(results, workload, max(5, rounds // 3))


def bench_forward(results: Results, workload: Workload, rounds: int) -> None:
    """One workload without gradients."""
    data = Data.of(workload)
    data.check()
    with torch.inference_mode():
        contenders = data.contenders()
        timings = interleaved(contenders, rounds)
        peak = {who: cpu_peak_mb(contenders[who]) for who in contenders}
    add(results, data, timings, "fwd", data.flops, peak)


def bench_training(results: Results, workload: Workload, rounds: int) -> None:
    """One workload with all gradients: the flat model's weight is one tensor, as it would be."""
    data = Data.of(workload)
    ours = data.training_step(data.ours)
    flat_weight = torch.cat([w.detach() for w in data.weight.values()], 1).requires_grad_()

    def flat() -> Tensor:
        return data.multiply(data.concatenated(), flat_weight)

    grad = torch.randn_like(flat())
    leaves = [*data.x.values(), flat_weight]
    timings = interleaved(
        {
            "ikbo-torch": ours,
            "materialised+broadcast": lambda: torch.autograd.grad(flat(), leaves, grad),
        },
        rounds,
    )
    add(results, data, timings, "fwd_bwd", 3 * data.flops, None)


def add(
    results: Results,
    data: Data,
    timings: dict[str, Timing],
    direction: str,
    flops: float,
    peak: dict[str, float] | None,
) -> None:
    """Records; a contender's note is its time over ours, the median of the rounds' ratios."""
    ours = timings["ikbo-torch"]
    notes = {
        who: f"{ours.times_faster_than(timing):.2f}x ours"
        for who, timing in timings.items()
        if who != "ikbo-torch"
    }
    results.add(
        data.workload.name,
        timings,
        direction=direction,
        dtype=str(data.workload.dtype).removeprefix("torch."),
        flops=flops,
        peak_mb=peak,
        notes=notes,
    )
