"""Linear compression over levels on a GPU, forward and backward, beside its peers.

`python benchmarks/bench_lce.py` writes benchmarks/results/lce_<device>.json. All contenders are
captured graphs, in turns, with a cold L2. Ours pads the weights, where their rows are no multiple
of 16 bytes, inside of what is timed; what peers are given for nothing is in their notes.

Workloads, all with M = 433 and N = 256, K = 1178 of the user, 512 of the vendor, 384 of the
product, 866 of the item:

    lce-b<items>-r<items a user>      two levels
    lce3-b<items>-r<items a user>     three, eight vendors a user
    lce4-b<items>-r<items a user>     four, eight vendors a user, two products a vendor
    lce3-uneven                       16 users with 4-40 vendors with 1-30 items each
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from cuda_timing import (
    ColdClock,
    cuda_ceilings,
    device_name,
    graphed,
    graphed_backward,
    host_us,
    peak_mb,
)
from harness import Contender, Results, Timing, interleaved
from peers import MissingPeerError
from peers.lce import PEERS, Peer, Problem
from torch import Tensor

import ikbo_tree as ikbo

M, N = 433, 256
WIDTHS = {"user": 1178, "vendor": 512, "product": 384, "item": 866}
VENDORS, PRODUCTS = 8, 2
BATCHES = (512, 1024, 2048, 3072)
RATIOS = (2, 10, 70, 1000)
WORKLOADS = (
    *(f"lce-b{b}-r70" for b in BATCHES),
    *(f"lce-b1024-r{r}" for r in RATIOS if r != 70),
    "lce3-b1024-r64",
    "lce3-uneven",
    "lce4-b1024-r64",
)
OURS = ("gluon", "gluon-p16", "triton", "torch")
"""By `impl`; p16: with partial results in the dtype of the result, as peers keep them."""
DIRECTIONS = ("fwd", "bwd", "fwd_bwd")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def tree_of(workload: str) -> ikbo.BroadcastTree:
    """The tree of a workload."""
    if workload == "lce3-uneven":
        rng = np.random.default_rng(0)
        vendors = rng.integers(4, 41, 16)
        counts = {"vendor": vendors, "item": rng.integers(1, 31, vendors.sum())}
        return ikbo.BroadcastTree.from_counts(counts, root="user")
    family, batch, ratio = workload.split("-")
    items, each = int(batch[1:]), int(ratio[1:])
    below = _even(items, math.ceil(items / each))
    if family == "lce":
        return ikbo.BroadcastTree.from_counts({"item": below}, root="user")
    per_vendor = [n for user in below for n in _even(user, VENDORS)]
    counts = {"vendor": [VENDORS] * len(below), "item": per_vendor}
    if family == "lce4":
        counts["product"] = [PRODUCTS] * len(per_vendor)
        counts["item"] = [n for vendor in per_vendor for n in _even(vendor, PRODUCTS)]
    return ikbo.BroadcastTree.from_counts(
        {level: counts[level] for level in WIDTHS if level in counts}, root="user"
    )


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


class Work:
    """A workload's tensors and contenders.

    Args:
        workload: one of `WORKLOADS`, or the like.
        dtype: of everything.
        gradients: tensors want them; torch multiplies in another way where they do.
    """

    def __init__(self, workload: str, dtype: torch.dtype, gradients: bool) -> None:
        self.name = workload
        self.tree = tree_of(workload).to("cuda")
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, device="cuda", generator=generator) * scale
            return values.to(dtype).requires_grad_(gradients)

        levels = self.tree.levels
        self.e = {n: draw(self.tree.rows(n), WIDTHS[n], N) for n in levels}
        self.w = {n: draw(M, WIDTHS[n], scale=WIDTHS[n] ** -0.5) for n in levels}
        last = levels[-1]
        self.grad = draw(self.tree.rows(last), M, N).detach()
        maps = {n: self.tree.ancestors(last, of=n).long() for n in levels[:-1]}
        maps[last] = torch.arange(self.tree.rows(last), device="cuda")
        pairs = zip(levels[1:], levels[:-1], strict=True)
        parents = [self.tree.ancestors(fine, of=coarse).long() for fine, coarse in pairs]
        e, w = list(self.e.values()), list(self.w.values())
        self.problem = Problem(e, w, parents, [maps[n] for n in levels])

    def ours(self, impl: str) -> Peer:
        """This package's op, by one of `OURS`."""
        name, _, p16 = impl.partition("-")
        partial = self.grad.dtype if p16 else None

        def call() -> Tensor:
            return ikbo.linear_compression(
                self.e, self.w, tree=self.tree, partial_dtype=partial, impl=name
            )

        with torch.no_grad():
            try:
                call()
            except ikbo.UnsupportedError as error:
                raise MissingPeerError(str(error)) from error
        return Peer(call, self.problem.inputs(), "pads W inside" if impl != "torch" else None)

    @property
    def flops(self) -> float:
        """Of the forward: a product a level at its own batch size."""
        return float(sum(2 * M * N * len(e) * e.shape[1] for e in self.problem.e))

    @property
    def traffic(self) -> float:
        """Bytes of the forward: E and W read once, the result written once."""
        return float(sum(x.nbytes for x in self.problem.inputs()) + self.grad.nbytes)


def contenders(work: Work, wanted: Sequence[str], compiled: bool) -> Iterator[tuple[str, Peer]]:
    """Ours first, then the peers that can be had."""
    makers: dict[str, Callable[[], Peer]] = {
        f"ikbo-{impl}": lambda impl=impl: work.ours(impl) for impl in OURS
    }
    makers |= {who: lambda make=make: make(work.problem) for who, make in PEERS.items()}
    for who, make in makers.items():
        if (wanted and who not in wanted) or (who == "torch-compile" and not compiled):
            continue
        try:
            yield who, make()
        except MissingPeerError as error:
            print(f"  {who} left out: {error}", flush=True)


def forward(peer: Peer) -> Contender:
    """Its forward, without a graph of gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return peer.call()

    return call


def step(peer: Peer, grad: Tensor) -> Contender:
    """Forward and backward."""
    return lambda: torch.autograd.grad(peer.call(), peer.inputs, grad)


def agreeing(work: Work, peers: dict[str, Peer]) -> dict[str, Peer]:
    """No speed without right results: those that are near a float64 sum on a few rows."""
    rows = torch.linspace(0, len(work.grad) - 1, 8, device="cuda").long()
    p = work.problem
    pairs = zip(p.w, p.e, p.above, strict=True)
    found = {}
    with torch.no_grad():
        exact = sum(w.double() @ e[index[rows]].double() for w, e, index in pairs)
        for who, peer in peers.items():
            try:
                error = (peer.call()[rows].double() - exact).norm() / exact.norm()
            except Exception as raised:  # whatever a stranger's kernel raises
                print(f"  {who} left out: it raised {raised!r:.160}", flush=True)
                continue
            if who == "cublas-candidate" or error < 4 * torch.finfo(work.grad.dtype).eps:
                found[who] = peer
            elif who.startswith("ikbo"):
                raise AssertionError(f"{who} is off by {error:.1e} on {work.name}")
            else:
                print(f"  {who} left out: it is off by {error:.1e}", flush=True)
    return found


def bench(
    results: Results, work: Work, direction: str, candidates: dict[str, Peer], rounds: int
) -> None:
    """Adds the records of one workload in one direction, and prints its lines."""
    peers = agreeing(work, candidates)
    calls: dict[str, Contender] = {}
    notes: dict[str, str] = {}
    memory: dict[str, float] = {}
    for who, peer in peers.items():
        if direction != "fwd" and not peer.inputs:
            continue
        notes[who] = peer.note or ""
        if direction == "fwd":
            call = forward(peer)
            memory[who] = peak_mb(call)
            calls[who] = graphed(call)
            if who.startswith("ikbo"):
                notes[who] += f"; {host_us(call):.0f} us of the host a call"
        elif direction == "bwd":
            calls[who] = graphed_backward(peer.call, peer.inputs, work.grad)
        else:
            calls[who] = graphed(step(peer, work.grad))
    timings = interleaved(calls, rounds, clock=ColdClock(), sample_ms=0.0)
    factor = {"fwd": 1, "bwd": 2, "fwd_bwd": 3}[direction]
    results.add(
        work.name,
        timings,
        direction=direction,
        dtype=str(work.grad.dtype).removeprefix("torch."),
        flops=factor * work.flops,
        traffic=factor * work.traffic,
        peak_mb=memory,
        notes=notes,
    )
    _print(work, direction, timings)


def _print(work: Work, direction: str, timings: dict[str, Timing]) -> None:
    rows = [work.tree.rows(n) for n in work.tree.levels]
    print(f"{work.name} {direction}, rows {rows}")
    ours = [(who, timing) for who, timing in timings.items() if who.startswith("ikbo")]
    for who, timing in timings.items():
        ratios = "  ".join(f"{one.times_faster_than(timing):6.3f} of {name}" for name, one in ours)
        print(f"  {who:24} {timing.median_ms:8.4f} ms  {ratios}", flush=True)


def directed(names: Sequence[str]) -> list[tuple[str, str]]:
    """Workloads and directions."""
    found = []
    for name in names:
        workload, _, direction = name.partition("/")
        found += [(workload, one) for one in ([direction] if direction else DIRECTIONS)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        nargs="*",
        default=WORKLOADS,
        help=f"of {', '.join(WORKLOADS)}; /{', /'.join(DIRECTIONS)} behind it for one direction",
    )
    parser.add_argument("--who", nargs="*", default=(), help="contenders; default all")
    parser.add_argument(
        "--compiled", nargs="*", help="what torch-compile tunes for; default: all of --workload"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--topic", default="lce", help="begins the name of the results file")
    options = parser.parse_args()
    results = Results(options.topic, device_name(), peers=("fbtriton",))
    results.ceilings = cuda_ceilings()
    print(results.device, results.ceilings, flush=True)
    compiled = set(directed(options.workload if options.compiled is None else options.compiled))
    for workload, direction in directed(options.workload):
        work = Work(workload, DTYPES[options.dtype], direction != "fwd")
        peers = dict(contenders(work, options.who, (workload, direction) in compiled))
        bench(results, work, direction, peers, options.rounds)
        del work, peers
        gc.collect()
        torch.cuda.empty_cache()
        path = results.write()
    print(f"written to {path}")


if __name__ == "__main__":
    main()
