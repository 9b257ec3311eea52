"""Fused ops across levels on a GPU: add, mul, film, norms, silu_attention beside flat torch.

`python benchmarks/bench_fused_gpu.py` writes benchmarks/results/fused_<device>.json. Two levels, 64
items a user, coarse and fine widths equal. Contenders:

- `ikbo-triton`: the public op.
- `ikbo-torch`: the same by plain torch (not `silu_attention`, which waits for the device there).
- `materialised+broadcast`: index_select of the coarse inputs to the items, then flat torch, both
  under torch.compile.
- `copy`: reads and writes as many bytes as the op must.

All are captured graphs, in turns, with a cold L2. Forward alone, and backward alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cuda_timing import ColdClock, cuda_ceilings, device_name, graphed, graphed_backward, peak_mb
from harness import Contender, Results, interleaved
from torch import Tensor

import ikbo_tree as ikbo

RATIO = 64
BYTES = 2**29
"""Of a fine tensor: ten times the L2 of an H200."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
OPS = ("add", "mul", "film", "layer_norm", "rms_norm", "silu_attention")
WIDTHS = (64, 256, 512)
EVENTS, HEAD = 128, 64


@dataclass
class Workload:
    """One op at one size.

    Attributes:
        op: one of `OPS`.
        width: of a row at either level; of `silu_attention` heads times `HEAD`.
        dtype: of all.
    """

    op: str
    width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        # Attention is bound by products, not by bytes.
        size = BYTES // 8 if self.op == "silu_attention" else BYTES
        users = size // (self.width * self.dtype.itemsize * RATIO)
        self.items = users * RATIO
        counts = torch.full((users,), RATIO)
        self.tree = ikbo.BroadcastTree.from_counts({"item": counts}, root="user").to("cuda")
        self.index = self.tree.ancestors("item", of="user")
        if self.op == "silu_attention":
            heads = self.width // HEAD
            self.x = [self._leaf(self.items, 1, heads, HEAD)]
            self.x += [self._leaf(users, EVENTS, heads, HEAD) for _ in range(2)]
        else:
            self.x = [self._leaf(self.items, self.width), self._leaf(users, self.width)]
            norm = self.op.endswith("norm")
            self.x += [self._leaf(2 * self.width)] if norm else []
            self.x += [self._leaf(users, self.width)] if self.op == "film" else []
        self.grad = torch.randn_like(self.ours("triton"))

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(self.dtype).requires_grad_()

    def ours(self, impl: str) -> Tensor:
        """On the tree."""
        x, at = self.x, {"tree": self.tree, "impl": impl}
        if self.op == "silu_attention":
            memory = {"user": (x[1], x[2])}
            return ikbo.silu_attention(x[0], memory, level="item", length=EVENTS, **at)
        pair = {"user": x[1], "item": x[0]}
        if self.op == "film":
            return ikbo.film(x[0], x[1], x[2], level="item", of="user", **at)
        if self.op == "layer_norm":
            return ikbo.layer_norm(pair, x[2], **at)
        if self.op == "rms_norm":
            return ikbo.rms_norm(pair, x[2], **at)
        return (ikbo.add if self.op == "add" else ikbo.mul)(pair, **at)

    def flat(self) -> Tensor:
        """What an unmodified model runs."""
        x, y = self.x, self.x[1].index_select(0, self.index)
        if self.op == "silu_attention":
            v = x[2].index_select(0, self.index)
            scores = torch.einsum("bnhd,bshd->bhns", x[0], y) * HEAD**-0.5
            return torch.einsum("bhns,bshd->bnhd", F.silu(scores) / EVENTS, v)
        if self.op == "film":
            return x[0] * y + x[2].index_select(0, self.index)
        if self.op.endswith("norm"):
            whole = torch.cat([y, x[0]], dim=1)
            if self.op == "rms_norm":
                return F.rms_norm(whole, whole.shape[1:], x[2], 1e-6)
            return F.layer_norm(whole, whole.shape[1:], x[2])
        return x[0] + y if self.op == "add" else x[0] * y

    def traffic(self, backward: bool) -> int:
        """Bytes that must be read and written: every input and output once."""
        fine, coarse = self.x[0].nbytes, sum(x.nbytes for x in self.x[1:])
        out = self.grad.nbytes
        if not backward:
            return fine + coarse + out
        # A sum hands its gradient on as it is.
        fine_gradients = {"add": 0}.get(self.op, 2 * fine)
        return out + fine_gradients + 2 * coarse

    @property
    def flops(self) -> float | None:
        """Of forward, where products are what takes time."""
        if self.op != "silu_attention":
            return None
        return 4.0 * self.items * EVENTS * self.width


def agree(work: Workload) -> None:
    """No speed without right results: within a few roundings of the largest value."""
    ours, theirs = work.ours("triton").float(), work.flat().float()
    eps = torch.finfo(work.dtype).eps
    if not bool(((ours - theirs).abs() <= 32 * eps * theirs.abs().max()).all()):
        raise AssertionError(f"{work.op}: tree and flat differ")


def bench(results: Results, work: Workload, dtype: str, rounds: int) -> None:
    """Adds the records of one workload, and prints its lines."""
    agree(work)
    forwards: dict[str, Callable[[], Tensor]] = {
        "ikbo-triton": lambda: work.ours("triton"),
        "materialised+broadcast": torch.compile(work.flat),
    }
    if work.op != "silu_attention":
        forwards["ikbo-torch"] = lambda: work.ours("torch")
    name = f"{work.op}-b{work.items}-r{RATIO}-k{work.width}"
    for direction in ("fwd", "bwd"):
        contenders: dict[str, Contender] = {}
        for who, forward in forwards.items():
            if direction == "bwd":
                contenders[who] = graphed_backward(forward, work.x, work.grad)
            else:
                contenders[who] = graphed(without_gradients(forward))
        traffic = work.traffic(direction == "bwd")
        source = torch.zeros(traffic // 2, dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        contenders["copy"] = graphed(lambda t=target, s=source: t.copy_(s))
        timings = interleaved(contenders, rounds, clock=ColdClock(), sample_ms=0.0)
        flops = work.flops if direction == "fwd" else None
        peak = {who: peak_mb(call) for who, call in forwards.items()} if direction == "fwd" else {}
        results.add(
            name, timings, direction=direction, dtype=dtype, traffic=traffic, flops=flops,
            peak_mb=peak,
        )  # fmt: skip
        ours = timings["ikbo-triton"]
        print(
            f"{name:36} {direction} {dtype:9} {traffic / 2**20:7.0f} MiB {ours.median_ms:8.4f} ms",
            *(f"{ours.times_faster_than(other):6.2f} of {who}" for who, other in timings.items()),
            flush=True,
        )


def without_gradients(forward: Callable[[], Tensor]) -> Contender:
    """Forward as a served model runs it."""

    def call() -> Tensor:
        with torch.no_grad():
            return forward()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--width", nargs="*", type=int, default=WIDTHS)
    parser.add_argument("--dtype", nargs="*", choices=list(DTYPES), default=("bfloat16",))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = Results("fused", device_name())
    results.ceilings = cuda_ceilings()
    print(results.device, results.ceilings, flush=True)
    for dtype in options.dtype:
        for op in options.op:
            for width in options.width:
                bench(results, Workload(op, width, DTYPES[dtype]), dtype, options.rounds)
                path = results.write()
    print(f"written to {path}")


if __name__ == "__main__":
    main()
