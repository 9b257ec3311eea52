"""Whether a request's scores depend on what else is in the batch: bits alone against bits in it.

`python benchmarks/bench_invariance.py` writes benchmarks/results/invariance_<device>.json. One user
with 64 items is computed alone, and as the first, the middle and the last of 2, 5, 16 and 32 users.
`differing` of `elements` results are not the bits that it has alone; `worst` is the largest
difference, relative to the largest result. Workloads are `inv-<op>`; contenders:

    flat            rows copied, concatenated, one product (cuBLAS) or one attention
    flat-cudnn      attention by cuDNN on copied keys
    folded-cudnn    the same with a user's query rows as one sequence
    decomposed      one product a level, gathered and added
    ikbo-<impl>     this package
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import records
import torch
from harness import cpu_name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

import ikbo_tree as ikbo

OPS = ("linear", "lce", "attn")
USERS = (2, 5, 16, 32)
IMPLS = ("gluon", "triton", "torch")

Inputs = dict[str, Tensor]
Form = Callable[[Inputs, ikbo.BroadcastTree], Tensor]
"""Tensors of any number of users, and their tree, to the items' results."""


def draw(op: str, users: int, items: int, dtype: torch.dtype, device: str) -> Inputs:
    """Tensors of so many users with `items` items each, weights aside at the widths of the op."""
    random = torch.Generator(device).manual_seed(0)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=random) * scale).to(dtype)

    if op == "attn":
        return {
            "user": make(users, 1024, 2, 128),
            "user_v": make(users, 1024, 2, 128),
            "item": make(users * items, 64, 2, 128),
        }
    last = (64,) if op == "lce" else ()
    return {
        "w_user": make(433, 1178, scale=1178**-0.5),
        "w_item": make(433, 866, scale=866**-0.5),
        "user": make(users, 1178, *last),
        "item": make(users * items, 866, *last),
    }


def part(inputs: Inputs, users: slice, items: int) -> Inputs:
    """Of these users alone: the same bits in memory of their own."""
    below = slice(users.start * items, users.stop * items)
    found = {}
    for name, x in inputs.items():
        rows = below if name == "item" else users
        found[name] = x if name.startswith("w_") else x[rows].clone()
    return found


def flat(op: str, x: Inputs, tree: ikbo.BroadcastTree) -> Tensor:
    """Copies, then one product or one attention."""
    index = tree.ancestors("item", of="user").long()
    if op == "attn":
        q, k, v = x["item"], x["user"].index_select(0, index), x["user_v"].index_select(0, index)
        return _attend(q, k, v)
    rows = torch.cat([x["user"].index_select(0, index), x["item"]], 1)
    weight = torch.cat([x["w_user"], x["w_item"]], 1)
    return linear(rows, weight) if op == "linear" else torch.matmul(weight, rows)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def cudnn(op: str, x: Inputs, tree: ikbo.BroadcastTree) -> Tensor:
    """`flat`, and no other backend."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return flat(op, x, tree)


def folded(op: str, x: Inputs, tree: ikbo.BroadcastTree) -> Tensor:
    """A user's query rows as one sequence, by cuDNN."""
    k, v, q = x["user"], x["user_v"], x["item"]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _attend(q.reshape(len(k), -1, *q.shape[2:]), k, v).reshape(q.shape)


def decomposed(op: str, x: Inputs, tree: ikbo.BroadcastTree) -> Tensor:
    """One product a level."""
    index = tree.ancestors("item", of="user").long()
    pairs = [(x[f"w_{name}"], x[name]) for name in ("user", "item")]
    users, items = (linear(b, a) if op == "linear" else torch.matmul(a, b) for a, b in pairs)
    return items + users.index_select(0, index)


def ours(op: str, impl: str, x: Inputs, tree: ikbo.BroadcastTree) -> Tensor:
    """The public function."""
    if op == "attn":
        memories = {"user": (x["user"], x["user_v"])}
        return ikbo.target_attention(x["item"], memories, tree=tree, level="item", impl=impl)
    call = ikbo.linear if op == "linear" else ikbo.linear_compression
    inputs, weights = ({name: x[a + name] for name in ("user", "item")} for a in ("", "w_"))
    return call(inputs, weights, tree=tree, impl=impl)


def forms(op: str, device: str) -> dict[str, Form]:
    """Contenders of an op."""
    found: dict[str, Form] = {"flat": lambda x, tree: flat(op, x, tree)}
    if op != "attn":
        found["decomposed"] = lambda x, tree: decomposed(op, x, tree)
    elif device == "cuda":
        found["flat-cudnn"] = lambda x, tree: cudnn(op, x, tree)
        found["folded-cudnn"] = lambda x, tree: folded(op, x, tree)
    for impl in IMPLS:
        found[f"ikbo-{impl}"] = lambda x, tree, impl=impl: ours(op, impl, x, tree)
    return found


def differences(
    form: Form, inputs: Inputs, most: int, items: int, batches: Sequence[int], device: str
) -> dict[str, Any]:
    """Of one contender, over all batches and places in them."""

    def result(users: slice) -> Tensor:
        counts = {"item": [items] * (users.stop - users.start)}
        tree = ikbo.BroadcastTree.from_counts(counts, root="user").to(device)
        return form(part(inputs, users, items), tree)

    middle = most // 2
    one = slice(middle, middle + 1)
    alone = result(one)
    scale, differing, elements, worst = float(alone.abs().max()), 0, 0, 0.0
    for users in batches:
        for place in sorted({0, users // 2, users - 1}):
            start = min(max(0, middle - place), most - users)
            at = middle - start
            together = result(slice(start, start + users))[at * items : (at + 1) * items]
            differing += int((together != alone).sum())
            elements += alone.numel()
            worst = max(worst, float((together.float() - alone.float()).abs().max()) / scale)
    return {"differing": differing, "elements": elements, "worst": float(f"{worst:.3g}")}


def measure(
    op: str, dtype: torch.dtype, device: str, items: int, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Records of one op in one dtype."""
    most = 2 * max(batches)
    inputs = draw(op, most, items, dtype, device)
    found = []
    for who, form in forms(op, device).items():
        try:
            counted = differences(form, inputs, most, items, batches, device)
        except ikbo.UnsupportedError:
            continue
        line = {
            "workload": f"inv-{op}",
            "who": who,
            "direction": "fwd",
            "dtype": str(dtype).removeprefix("torch."),
            **counted,
        }
        print(*line.values(), flush=True)
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--items", type=int, default=64, help="of a user")
    parser.add_argument("--users", type=int, nargs="*", default=USERS, help="in a batch")
    parser.add_argument("--op", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--topic", default="invariance", help="begins the name of the results file")
    options = parser.parse_args()
    if options.device == "cuda":
        from cuda_timing import device_name

        name = device_name()
    else:
        torch.set_num_threads(1)
        name = f"{cpu_name()}, 1 threads"
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for op in options.op:
            dtype = getattr(torch, options.dtype)
            found += measure(op, dtype, options.device, options.items, options.users)
            path = records.write(options.topic, name, found)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
