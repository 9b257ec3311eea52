"""`target_attention` on a CPU beside flat models; see `bench_ops_cpu.py`.

Workloads are named `attn-s<keys>-r<items a user>-n<query rows an item>-h<heads>-d<width>`, `attn3-`
where users and vendors own that many keys each; `-uneven` has random fan-outs (2 to 126 a user) of
the same sum of query-key pairs, so that times compare.

Contenders:

- `ikbo-torch`: the public function, tree and all.
- `materialised+broadcast`: what an unmodified model runs: index_select of K and V to the items, cat
  of the levels, scaled_dot_product_attention.
- `materialised`: that attention alone, its copies of K and V given.
- `folded`: by hand, one view and one call; even fan-outs and one level only.

`peak_mb` is what a call holds at most beyond its inputs; notes say how much is not its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Results, Timing, cpu_peak_mb, interleaved
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ikbo_tree as ikbo

VENDORS = 4
"""Vendors a user in workloads of three levels."""


@dataclass(frozen=True)
class Workload:
    """A call at one size.

    Attributes:
        users: root rows.
        ratio: items a user, on average where uneven.
        keys: S of every memory.
        n: query rows an item.
        dim: head width.
        heads: heads of queries and keys.
        levels: 2 (user, item) or 3 (user, vendor, item).
        uneven: random fan-outs.
        dtype: of everything.
    """

    users: int
    ratio: int
    keys: int
    n: int
    dim: int = 64
    heads: int = 2
    levels: int = 2
    uneven: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """As results files have it."""
        depth = "3" if self.levels == 3 else ""
        uneven = "-uneven" if self.uneven else ""
        sizes = f"s{self.keys}-r{self.ratio}-n{self.n}-h{self.heads}-d{self.dim}"
        return f"attn{depth}-{sizes}{uneven}"

    def tree(self) -> ikbo.BroadcastTree:
        """Even counts, or pairs of counts that add up to two even ones."""
        each = self.ratio // (VENDORS if self.levels == 3 else 1)
        parents = self.users * (VENDORS if self.levels == 3 else 1)
        counts = torch.full((parents,), each)
        if self.uneven:
            less = torch.randint(0, each - 1, (parents // 2,))
            counts[0::2] -= less
            counts[1::2] += less
        below = {"vendor": [VENDORS] * self.users} if self.levels == 3 else {}
        return ikbo.BroadcastTree.from_counts({**below, "item": counts}, root="user")


WORKLOADS = (
    *(Workload(16, 64, 256, n) for n in (1, 8, 32)),
    *(Workload(16, 64, 256, n, uneven=True) for n in (1, 8, 32)),
    Workload(16, 64, 256, 8, dim=128),
    Workload(16, 64, 256, 8, levels=3),
    Workload(16, 64, 256, 8, levels=3, uneven=True),
    Workload(16, 64, 256, 8, dtype=torch.bfloat16),
    Workload(1, 64, 1024, 1),
    Workload(256, 8, 64, 1, uneven=True),
)


@dataclass(frozen=True)
class Data:
    """Tensors of a workload; keys and values of each coarse level."""

    workload: Workload
    tree: ikbo.BroadcastTree
    q: Tensor
    memories: dict[str, tuple[Tensor, Tensor]]

    @staticmethod
    def of(workload: Workload) -> Data:
        """Normal values."""
        torch.manual_seed(0)
        w, tree = workload, workload.tree()
        q = torch.randn(tree.rows("item"), w.n, w.heads, w.dim).to(w.dtype)
        memories = {}
        for level in tree.levels[:-1]:
            shape = (tree.rows(level), w.keys, w.heads, w.dim)
            memories[level] = (torch.randn(shape).to(w.dtype), torch.randn(shape).to(w.dtype))
        return Data(workload, tree, q, memories)

    @property
    def flops(self) -> float:
        """Useful operations of a forward pass."""
        w = self.workload
        return 4.0 * self.q.numel() * w.keys * len(self.memories)

    def ours(self) -> Tensor:
        """The public function."""
        found = ikbo.target_attention(self.q, self.memories, tree=self.tree, level="item")
        assert isinstance(found, Tensor)
        return found

    def copies(self) -> tuple[Tensor, Tensor]:
        """K and V of each item, all levels' keys one after another: [items, H, keys, D]."""
        parts = []
        for level, pair in self.memories.items():
            index = self.tree.ancestors("item", of=level)
            parts.append([x.index_select(0, index) for x in pair])
        k, v = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*parts, strict=True))
        return k.transpose(1, 2), v.transpose(1, 2)

    def flat(self) -> Tensor:
        """With the broadcast."""
        return self.attend(*self.copies())

    def attend(self, k: Tensor, v: Tensor) -> Tensor:
        """An item's query rows over its own copies."""
        return scaled_dot_product_attention(self.q.transpose(1, 2), k, v).transpose(1, 2)

    def folded(self) -> Tensor:
        """All query rows of a user as one sequence."""
        (pair,) = self.memories.values()
        q = self.q.view(self.workload.users, -1, *self.q.shape[2:])
        o = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, *pair)))
        return o.transpose(1, 2).reshape(self.q.shape)

    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        return [self.q, *(x for pair in self.memories.values() for x in pair)]

    def contenders(self) -> dict[str, Callable[[], Tensor]]:
        """Forward passes."""
        found = {"ikbo-torch": self.ours, "materialised+broadcast": self.flat}
        if not self.workload.uneven and len(self.memories) == 1:
            found["folded"] = self.folded
        return found

    def check(self) -> None:
        """Raises unless all agree, as no speed counts otherwise."""
        right = self.flat()
        for contender in self.contenders().values():
            torch.testing.assert_close(contender(), right, rtol=2e-2, atol=2e-2)


def bench(results: Results, rounds: int) -> None:
    """All workloads, forward, and forward with backward."""
    for workload in WORKLOADS:
        data = Data.of(workload)
        data.check()
        bench_forward(results, data, rounds)
        bench_training(results, data, max(5, rounds // 3))


def bench_forward(results: Results, data: Data, rounds: int) -> None:
    """Without gradients."""
    with torch.inference_mode():
        contenders: dict[str, Callable[[], object]] = dict(data.contenders())
        k, v = data.copies()
        contenders["materialised"] = lambda: data.attend(k, v)
        timings = interleaved(contenders, rounds)
        peak = {who: cpu_peak_mb(contenders[who]) for who in contenders}
    result_mb = data.q.nbytes / 2**20
    add(results, data, timings, "fwd", data.flops, peak, result_mb)


def bench_training(results: Results, data: Data, rounds: int) -> None:
    """With the gradients of queries, keys and values; the log-sum-exp has none."""
    for leaf in data.leaves():
        leaf.requires_grad_()
    grad = torch.randn_like(data.q)

    def training(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), data.leaves(), grad)

    contenders = {who: training(forward) for who, forward in data.contenders().items()}
    timings = interleaved(contenders, rounds)
    peak = {who: cpu_peak_mb(contenders[who]) for who in contenders}
    result_mb = sum(leaf.nbytes for leaf in data.leaves()) / 2**20
    add(results, data, timings, "fwd_bwd", 3.5 * data.flops, peak, result_mb)


def add(
    results: Results,
    data: Data,
    timings: dict[str, Timing],
    direction: str,
    flops: float,
    peak: dict[str, float],
    result_mb: float,
) -> None:
    """Records; notes say each time over ours (median of the rounds' ratios) and extra memory."""
    ours = timings["ikbo-torch"]
    extra = {who: max(mb - result_mb, 0.0) for who, mb in peak.items()}
    notes = {who: f"{mb:.2f} MiB beyond results" for who, mb in extra.items()}
    for who, timing in timings.items():
        if who != "ikbo-torch":
            memory = extra[who] / extra["ikbo-torch"] if extra["ikbo-torch"] else float("inf")
            notes[who] = f"{ours.times_faster_than(timing):.2f}x ours; {notes[who]}, {memory:.1f}x"
    results.add(
        data.workload.name,
        timings,
        direction=direction,
        dtype=str(data.workload.dtype).removeprefix("torch."),
        flops=flops,
        peak_mb=peak,
        notes=notes,
    )
