"""Segment ops on a GPU beside plain torch and a copy of as many bytes.

`python benchmarks/bench_segments_gpu.py` writes benchmarks/results/segments_<device>.json. All
contenders are captured graphs, in turns, with a cold L2; what a call costs the host is in a note.
A workload is `seg-<op>-<shape>-w<columns>`; shapes:

    r4, r70, r1000    segments of 4, 70, 1000 rows
    uneven            1 to 130 rows at random
    long              one of 100,000 rows beside 1,000 of one row
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from cuda_timing import ColdClock, cuda_ceilings, device_name, graphed, host_us
from harness import Contender, Results, Timing, interleaved
from torch import Tensor

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.routes import Route

BYTES = 2**29
"""Of the fine tensor, at most: ten times the L2 of an H200."""
MOST_ROWS = 2**24

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
OPS = ("broadcast", "sum", "max", "logsumexp", "softmax", "max-bwd", "logsumexp-bwd", "softmax-bwd")
WIDTHS = {"bfloat16": (1, 8, 64, 256, 433), "float32": (1, 4, 64)}
SHAPES = ("r4", "r70", "r1000", "uneven", "long")


def counts_of(shape: str, rows: int) -> np.ndarray:
    """Rows of each segment, about `rows` in all."""
    if shape == "long":
        return np.concatenate((np.ones(500), [100_000], np.ones(500))).astype(np.int64)
    if shape == "uneven":
        return np.random.default_rng(0).integers(1, 131, rows // 65)
    size = int(shape[1:])
    return np.full(rows // size, size)


@dataclass
class Workload:
    """One op on one tree.

    Attributes:
        op: one of `OPS`.
        route: the maps.
        width: columns.
        dtype: of the values.
    """

    op: str
    route: Route
    width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        fine, coarse = self.route.fine_rows, self.route.coarse_rows
        self.x = torch.randn(fine, self.width, device="cuda").to(self.dtype)
        self.g = torch.randn(fine, self.width, device="cuda").to(self.dtype)
        self.y = torch.randn(coarse, self.width, device="cuda").to(self.dtype)

    def call(self, impl: str) -> Callable[[], Tensor]:
        """The op, forward or backward alone, under an implementation."""
        ops, route = torch.ops.ikbo_tree, self.route
        op, _, backward = self.op.partition("-")
        if op == "broadcast":
            return lambda: ops.broadcast(self.y, *route, impl)
        if op == "softmax" and backward:
            return lambda: ops.segment_softmax_backward(self.g, self.x, *route, impl)
        if op == "softmax":
            return lambda: ops.segment_softmax(self.x, *route, impl)
        if backward:
            out = ops.reduce(self.x, *route, op, impl)
            return lambda: ops.reduce_backward(self.y, self.x, out, *route, op, impl)
        return lambda: ops.reduce(self.x, *route, op, impl)

    @property
    def traffic(self) -> int:
        """Bytes that must be read and written: every input and output once."""
        fine, coarse = self.x.nbytes, self.y.nbytes
        maps = self.route.offsets.nbytes
        if self.op == "broadcast":
            return fine + coarse + self.route.index.nbytes
        passes = {"softmax": 2, "softmax-bwd": 3, "max-bwd": 2, "logsumexp-bwd": 2}.get(self.op, 1)
        segments = {"softmax": 0, "softmax-bwd": 0, "max-bwd": 2}.get(self.op, 1)
        return passes * fine + segments * coarse + maps


def copy_of(traffic: int) -> Contender:
    """A copy that reads and writes as many bytes in all."""
    source = torch.zeros(traffic // 2, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def bench(results: Results, op: str, shape: str, width: int, dtype: str, rounds: int) -> None:
    """Adds the records of one workload, and prints its line."""
    itemsize = DTYPES[dtype].itemsize
    counts = counts_of(shape, min(BYTES // (width * itemsize), MOST_ROWS))
    tree = BroadcastTree.from_counts({"item": counts}, root="user").to("cuda")
    work = Workload(op, tree.route("item", "user"), width, DTYPES[dtype])
    calls = {"ikbo-triton": work.call("triton"), "ikbo-torch": work.call("torch")}
    _agree(op, *(call() for call in calls.values()))
    host = host_us(calls["ikbo-triton"])
    contenders = {who: graphed(call) for who, call in calls.items()}
    contenders["copy"] = graphed(copy_of(work.traffic))
    timings = interleaved(contenders, rounds, clock=ColdClock(), sample_ms=0.0)
    direction = "bwd" if op.endswith("-bwd") else "fwd"
    name = f"seg-{op.removesuffix('-bwd')}-{shape}-w{width}"
    note = {"ikbo-triton": f"{host:.0f} us of the host a call"}
    results.add(name, timings, direction=direction, dtype=dtype, traffic=work.traffic, notes=note)
    _print(name, direction, dtype, work.traffic, timings, host)


def _agree(op: str, ours: Tensor, theirs: Tensor) -> None:
    """No speed without right results: both to within a few roundings of the largest value."""
    eps = torch.finfo(ours.dtype).eps
    scale = theirs.float().abs().max()
    if not bool(((ours.float() - theirs.float()).abs() <= 16 * eps * scale).all()):
        raise AssertionError(f"{op}: the implementations differ")


def _print(
    name: str, direction: str, dtype: str, traffic: int, timings: dict[str, Timing], host: float
) -> None:
    ours, plain, copy = (timings[who] for who in ("ikbo-triton", "ikbo-torch", "copy"))
    print(
        f"{name:24} {direction} {dtype:9} {traffic / 2**20:7.0f} MiB",
        f"triton {ours.median_ms:8.4f} ms",
        f"{ours.times_faster_than(copy):5.2f} of copy",
        f"{ours.times_faster_than(plain):6.2f}x torch",
        f"host {host:4.0f} us",
        sep="  ",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=SHAPES)
    parser.add_argument("--width", nargs="*", type=int)
    parser.add_argument("--dtype", nargs="*", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = Results("segments", device_name())
    results.ceilings = cuda_ceilings()
    print(results.device, results.ceilings, flush=True)
    for dtype in options.dtype:
        for width in options.width or WIDTHS[dtype]:
            for op in options.op:
                for shape in options.shape:
                    bench(results, op, shape, width, dtype, options.rounds)
            path = results.write()
    print(f"written to {path}")


if __name__ == "__main__":
    main()
