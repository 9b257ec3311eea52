"""Small calls of every op's GPU kernels, forward and backward, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py

Without that variable torch hands out parts of larger allocations, and nobody sees a step beyond the
end of one. Dead rows, a childless row and widths that fill no tile are in every call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, UnsupportedError

CAPACITY = {"user": 4, "vendor": 7, "item": 40}
COUNTS = {"vendor": [2, 0, 3], "item": [9, 1, 0, 17, 5]}
WIDTHS = {"user": 178, "vendor": 72, "item": 131}
DTYPES = (torch.float16, torch.float32)
IMPLS = ("triton", "gluon")

Calls = Iterable[tuple[str, Callable[[], object], list[Tensor]]]


def leaf(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def linear_compression(tree: BroadcastTree, impl: str) -> Calls:
    for dtype, (M, N) in product(DTYPES, ((433, 256), (433, 128), (70, 24))):
        e = {n: leaf(CAPACITY[n], K, N, dtype=dtype) for n, K in WIDTHS.items()}
        w = {n: leaf(M, K, dtype=dtype) for n, K in WIDTHS.items()}
        call = lambda e=e, w=w: ikbo.linear_compression(e, w, tree=tree, impl=impl)  # noqa: E731
        yield f"{dtype}, M {M}, N {N}", call, [*e.values(), *w.values()]


def linear(tree: BroadcastTree, impl: str) -> Calls:
    for dtype, N in product(DTYPES, (470, 64)):
        x = {n: leaf(CAPACITY[n], K, dtype=dtype) for n, K in WIDTHS.items()}
        w = {n: leaf(N, K, dtype=dtype) for n, K in WIDTHS.items()}
        b = leaf(N, dtype=dtype)
        call = lambda x=x, w=w, b=b: ikbo.linear(x, w, tree=tree, bias=b, impl=impl)  # noqa: E731
        yield f"{dtype}, N {N}", call, [*x.values(), *w.values(), b]


def target_attention(tree: BroadcastTree, impl: str) -> Calls:
    for D, n in ((64, 65), (128, 64), (64, 5), (96, 17), (256, 32)):
        q = leaf(CAPACITY["item"], n, 2, D)
        user = [leaf(CAPACITY["user"], 150, 2, D) for _ in range(2)]
        vendor = [leaf(CAPACITY["vendor"], 70, 2, D) for _ in range(2)]
        memories = {"user": (user[0], user[1]), "vendor": (vendor[0], vendor[1])}
        call = lambda q=q, m=memories: ikbo.target_attention(  # noqa: E731
            q, m, tree=tree, level="item", impl=impl
        )
        yield f"D {D}, {n} rows an item", call, [q, *user, *vendor]


def self_target_attention(tree: BroadcastTree, impl: str) -> Calls:
    for D, n in ((64, 65), (128, 16), (64, 5)):
        q = leaf(CAPACITY["item"], n, 2, D)
        own, k, v = (leaf(CAPACITY["user"], 150, 2, D) for _ in range(3))
        call = lambda own=own, q=q, k=k, v=v: ikbo.self_target_attention(  # noqa: E731
            own, q, k, v, tree=tree, level="item", of="user", impl=impl
        )
        yield f"D {D}, {n} rows an item", call, [own, q, k, v]


def segments(tree: BroadcastTree, impl: str) -> Calls:
    x, y = leaf(CAPACITY["item"], 33), leaf(CAPACITY["user"], 33)
    up = {"tree": tree, "level": "item", "impl": impl}
    for op in ("sum", "mean", "max", "logsumexp"):
        yield op, lambda op=op: ikbo.reduce(x, to="user", op=op, **up), [x]
    yield "softmax", lambda: ikbo.segment_softmax(x, of="user", **up), [x]
    down = {"tree": tree, "level": "user", "to": "item", "impl": impl}
    yield "broadcast", lambda: ikbo.broadcast(y, **down), [y]


def elementwise(tree: BroadcastTree, impl: str) -> Calls:
    for dtype, width in product(DTYPES, (33, 433)):
        x = leaf(CAPACITY["item"], width, dtype=dtype)
        y, z = (leaf(CAPACITY["user"], width, dtype=dtype) for _ in range(2))
        at = {"tree": tree, "level": "item", "of": "user", "impl": impl}
        call = lambda x=x, y=y, z=z, at=at: ikbo.film(x, y, z, **at)  # noqa: E731
        yield f"film, {dtype}, width {width}", call, [x, y, z]
        pair = {"user": y, "item": x}
        yield (
            f"add, {dtype}, width {width}",
            lambda pair=pair: ikbo.add(pair, tree=tree, impl=impl),
            [x, y],
        )


def norms(tree: BroadcastTree, impl: str) -> Calls:
    for dtype in DTYPES:
        x = {n: leaf(CAPACITY[n], K, dtype=dtype) for n, K in WIDTHS.items()}
        w, b = (leaf(sum(WIDTHS.values()), dtype=dtype) for _ in range(2))
        call = lambda x=x, w=w, b=b: ikbo.layer_norm(x, w, b, tree=tree, impl=impl)  # noqa: E731
        yield f"layer_norm, {dtype}", call, [*x.values(), w, b]
        call = lambda x=x, w=w: ikbo.rms_norm(x, w, tree=tree, impl=impl)  # noqa: E731
        yield f"rms_norm, {dtype}", call, [*x.values(), w]


def silu_attention(tree: BroadcastTree, impl: str) -> Calls:
    for D, n in ((64, 1), (128, 5), (24, 65)):
        q = leaf(CAPACITY["item"], n, 2, D)
        user = [leaf(CAPACITY["user"], 150, 2, D) for _ in range(2)]
        vendor = [leaf(CAPACITY["vendor"], 70, 2, D) for _ in range(2)]
        memories = {"user": (user[0], user[1]), "vendor": (vendor[0], vendor[1])}
        call = lambda q=q, m=memories: ikbo.silu_attention(  # noqa: E731
            q, m, tree=tree, level="item", impl=impl
        )
        yield f"D {D}, {n} rows an item", call, [q, *user, *vendor]


OPS = (
    linear_compression,
    linear,
    target_attention,
    self_target_attention,
    segments,
    elementwise,
    norms,
    silu_attention,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="*", default=[op.__name__ for op in OPS])
    parser.add_argument("--impl", nargs="*", default=IMPLS)
    options = parser.parse_args()
    torch.manual_seed(0)
    tree = BroadcastTree.from_counts(COUNTS, root="user", capacity=CAPACITY).to("cuda")
    for op, impl in product(OPS, options.impl):
        if op.__name__ not in options.op:
            continue
        for name, call, inputs in op(tree, impl):
            try:
                found = call()
            except UnsupportedError:
                continue
            outputs = [found] if isinstance(found, Tensor) else list(found)
            grads = [torch.randn_like(x) for x in outputs]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
            torch.cuda.synchronize()
            print(f"{op.__name__}, {impl}: {name}", flush=True)


if __name__ == "__main__":
    main()
