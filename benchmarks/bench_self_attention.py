"""`self_target_attention` on a GPU beside its two halves.

`python benchmarks/bench_self_attention.py` writes benchmarks/results/self-attention_<device>.json.
32 users with 64 items each, 2 heads of width 128. `two-launches` are cuDNN's self-attention of the
history and our `target_attention`. Captured graphs, in turns, with a cold L2; TFLOP/s count useful
work, half of the history's own where it is causal.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from cuda_timing import ColdClock, cuda_ceilings, device_name, graphed
from harness import Contender, Results, interleaved
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ikbo_tree as ikbo

USERS, ITEMS, HEADS, DIM = 32, 64, 2, 128
SHAPES = ((512, 64), (1024, 64), (2048, 64), (4096, 64), (1024, 16))
"""Keys of a user, query rows of an item."""
TOLERANCE = 0.01
"""Of the norm of the difference between two contenders' results: a few roundings."""


def contenders(keys: int, rows: int, causal: bool) -> dict[str, Contender]:
    """Ours in one launch, and the halves."""
    torch.manual_seed(0)
    tree = ikbo.BroadcastTree.from_counts({"item": [ITEMS] * USERS}, root="user").to("cuda")

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, HEADS, DIM, device="cuda", dtype=torch.float16)

    own, k, v = (draw(USERS, keys) for _ in range(3))
    q = draw(USERS * ITEMS, rows)

    def one(impl: str) -> tuple[Tensor, Tensor]:
        return ikbo.self_target_attention(
            own, q, k, v, tree=tree, level="item", of="user", causal=causal, impl=impl
        )

    def two() -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            a, b, c = (x.transpose(1, 2) for x in (own, k, v))
            mine = scaled_dot_product_attention(a, b, c, is_causal=causal).transpose(1, 2)
        memories = {"user": (k, v)}
        return mine, ikbo.target_attention(q, memories, tree=tree, level="item", impl="gluon")

    return {
        "ikbo-gluon": lambda: one("gluon"),
        "ikbo-triton": lambda: one("triton"),
        "two-launches": two,
    }


def bench(results: Results, keys: int, rows: int, causal: bool, rounds: int) -> None:
    """Adds the records of one shape, and prints them."""
    calls = contenders(keys, rows, causal)
    expected = next(iter(calls.values()))()
    for who, call in calls.items():
        for a, b in zip(call(), expected, strict=True):  # type: ignore[call-overload]
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < TOLERANCE, f"{who} is {error:.1e} away"
    graphs = {who: graphed(call) for who, call in calls.items()}
    timings = interleaved(graphs, rounds, clock=ColdClock(), sample_ms=0.0)
    per_key = 4 * USERS * HEADS * DIM * keys
    flops = per_key * (ITEMS * rows + keys / (2 if causal else 1))
    name = f"self-s{keys}-r{ITEMS}-n{rows}-h{HEADS}-d{DIM}{'-causal' if causal else ''}"
    results.add(name, timings, direction="fwd", dtype="float16", flops=flops)
    first = timings["ikbo-gluon"]
    for who, timing in timings.items():
        ratio = first.times_faster_than(timing)
        print(
            f"{name:36} {who:14} {timing.median_ms:8.4f} ms  {ratio:5.2f} of our time", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = Results("self-attention", device_name())
    results.ceilings = cuda_ceilings()
    with torch.no_grad():
        for (keys, rows), causal in product(SHAPES, (False, True)):
            bench(results, keys, rows, causal, options.rounds)
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()
