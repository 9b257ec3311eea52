"""How far flat and tree forms are from float64 as more items share a user.

`python benchmarks/bench_numerics.py` writes benchmarks/results/numerics_<device>.json: as many
items at every ratio, 10 to 10,000 of them a user, in float16 and bfloat16. Workloads are
`num-<op>-r<items a user>`; `fwd` is the result, `bwd` the gradient of the user's input, a sum over
its items. Contenders:

    rounded         the float64 result rounded once: nothing in this dtype is nearer
    flat            rows copied by index_select, concatenated, one product or one attention
    decomposed      products: one a level, the user's rounded to the dtype, gathered and added
    ikbo-<impl>     this package; -p16 rounds partial results to the dtype, as decomposed does

Errors are relative to the root mean square of the float64 result: `rms`, and `worst` of an element.
Inputs are rounded to the dtype before float64 sees them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import records
import torch
from harness import cpu_name
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import ikbo_tree as ikbo

RATIOS = (10, 100, 1000, 10_000)
OPS = ("linear", "lce", "attn")
DTYPES = ("float16", "bfloat16")
IMPLS = ("gluon", "gluon-p16", "triton", "torch", "torch-p16")

Inputs = Mapping[str, Tensor]
Form = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Widths of the ops: those of the published system, but for columns of LCE, which repeat.

    Attributes:
        user: K of the user.
        item: K of the item.
        out: rows of weights.
        columns: N of LCE.
        keys: S of a history.
        heads: of attention.
        dim: of a head.
    """

    user: int = 1178
    item: int = 866
    out: int = 433
    columns: int = 16
    keys: int = 512
    heads: int = 2
    dim: int = 128


class Problem:
    """An op on one tree: its inputs, the float64 result and the forms of the op.

    Args:
        op: one of `OPS`.
        tree: users with as many items each.
        sizes: its widths.
        dtype: of the inputs.
    """

    def __init__(self, op: str, tree: ikbo.BroadcastTree, sizes: Sizes, dtype: torch.dtype) -> None:
        self.op, self.tree, self.sizes = op, tree, sizes
        self.map = tree.ancestors("item", of="user").long()
        random = torch.Generator(tree.device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(shape, device=tree.device, generator=random) * scale
            return values.to(dtype)

        users, items, s = tree.rows("user"), tree.rows("item"), sizes
        if op == "attn":
            memory = (users, s.keys, s.heads, s.dim)
            self.inputs = {"user": draw(*memory), "v": draw(*memory)}
            self.inputs["q"] = draw(items, 1, s.heads, s.dim)
            self.grad = draw(items, 1, s.heads, s.dim)
            return
        last = (s.columns,) if op == "lce" else ()
        self.inputs = {
            "user": draw(users, s.user, *last),
            "item": draw(items, s.item, *last),
            "w_user": draw(s.out, s.user, scale=s.user**-0.5),
            "w_item": draw(s.out, s.item, scale=s.item**-0.5),
        }
        self.grad = draw(items, s.out, *last)

    def forms(self, impls: Sequence[str]) -> dict[str, Form]:
        """All but the float64 one; of `impls` those that take the call."""
        found: dict[str, Form] = {"flat": self.flat}
        if self.op != "attn":
            found["decomposed"] = self.decomposed
        for impl in impls:
            if impl.endswith("-p16") and self.op == "attn":
                continue
            form = partial(self.ours, impl)
            try:
                form(self.inputs)
            except ikbo.UnsupportedError:
                continue
            found[f"ikbo-{impl}"] = form
        return found

    def flat(self, x: Inputs) -> Tensor:
        """What an unmodified model runs."""
        if self.op == "attn":
            q, k, v = (
                y.transpose(1, 2)
                for y in (x["q"], *(x[name].index_select(0, self.map) for name in ("user", "v")))
            )
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
        rows = torch.cat([x["user"].index_select(0, self.map), x["item"]], 1)
        weight = torch.cat([x["w_user"], x["w_item"]], 1)
        return linear(rows, weight) if self.op == "linear" else torch.matmul(weight, rows)

    def decomposed(self, x: Inputs) -> Tensor:
        """The article's first stage, in eager torch."""
        if self.op == "linear":
            users, items = (linear(x[name], x[f"w_{name}"]) for name in ("user", "item"))
        else:
            users, items = (torch.matmul(x[f"w_{name}"], x[name]) for name in ("user", "item"))
        return items + users.index_select(0, self.map)

    def ours(self, impl: str, x: Inputs) -> Tensor:
        """The public function."""
        name, _, p16 = impl.partition("-")
        if self.op == "attn":
            memories = {"user": (x["user"], x["v"])}
            return ikbo.target_attention(x["q"], memories, tree=self.tree, level="item", impl=name)
        op = ikbo.linear if self.op == "linear" else ikbo.linear_compression
        return op(
            {"user": x["user"], "item": x["item"]},
            {"user": x["w_user"], "item": x["w_item"]},
            tree=self.tree,
            partial_dtype=x["user"].dtype if p16 else None,
            impl=name,
        )

    def exact(self, x: Inputs) -> Tensor:
        """Each user's items as a dim of their own, so that nothing is copied; any dtype."""
        users = len(x["user"])
        if self.op == "attn":
            q = x["q"].unflatten(0, (users, -1))
            scores = torch.einsum("urnhd,ushd->urnhs", q, x["user"]) / math.sqrt(self.sizes.dim)
            return torch.einsum("urnhs,ushd->urnhd", scores.softmax(-1), x["v"]).flatten(0, 1)
        if self.op == "linear":
            coarse, fine = (linear(x[name], x[f"w_{name}"]) for name in ("user", "item"))
        else:
            coarse, fine = (torch.matmul(x[f"w_{name}"], x[name]) for name in ("user", "item"))
        return (fine.unflatten(0, (users, -1)) + coarse.unsqueeze(1)).flatten(0, 1)


def both(form: Form, inputs: Inputs, grad: Tensor) -> dict[str, Tensor]:
    """Result, and gradient of the user's input."""
    user = inputs["user"].detach().requires_grad_()
    out = form({**inputs, "user": user})
    (gradient,) = torch.autograd.grad(out, [user], grad)
    return {"fwd": out.detach(), "bwd": gradient}


def errors(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Relative to the root mean square of `exact`."""
    scale = exact.square().mean().sqrt()
    away = (found.double() - exact).abs() / scale
    return {"rms": _short(away.square().mean().sqrt()), "worst": _short(away.max())}


def _short(value: Tensor) -> float:
    return float(f"{value.item():.4g}")


def measure(
    op: str, tree: ikbo.BroadcastTree, sizes: Sizes, dtype: torch.dtype, impls: Sequence[str]
) -> list[dict[str, Any]]:
    """Records of one op on one tree in one dtype."""
    problem = Problem(op, tree, sizes, dtype)
    wide = {name: x.double() for name, x in problem.inputs.items()}
    exact = both(problem.exact, wide, problem.grad.double())
    del wide
    results = {"rounded": {direction: x.to(dtype) for direction, x in exact.items()}}
    for who, form in problem.forms(impls).items():
        results[who] = both(form, problem.inputs, problem.grad)
    ratio = tree.rows("item") // tree.rows("user")
    return [
        {
            "workload": f"num-{op}-r{ratio}",
            "who": who,
            "direction": direction,
            "dtype": str(dtype).removeprefix("torch."),
            "items": tree.rows("item"),
            **errors(x, exact[direction]),
        }
        for who, found in results.items()
        for direction, x in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--items", type=int, default=10_000, help="at every ratio")
    parser.add_argument("--ratio", type=int, nargs="*", default=RATIOS, help="items a user")
    parser.add_argument("--op", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--impl", nargs="*", choices=IMPLS, default=IMPLS)
    parser.add_argument("--columns", type=int, default=Sizes.columns, help="N of lce")
    parser.add_argument("--keys", type=int, default=Sizes.keys, help="S of attn")
    parser.add_argument("--topic", default="numerics", help="begins the name of the results file")
    options = parser.parse_args()
    if any(options.items % ratio for ratio in options.ratio):
        parser.error(f"--ratio must divide {options.items}; got {options.ratio}")
    if options.device == "cuda":
        from cuda_timing import device_name

        name = device_name()
    else:
        torch.set_num_threads(1)
        name = f"{cpu_name()}, 1 threads"
    sizes, found = Sizes(columns=options.columns, keys=options.keys), []
    for ratio in options.ratio:
        counts = {"item": [ratio] * (options.items // ratio)}
        tree = ikbo.BroadcastTree.from_counts(counts, root="user").to(options.device)
        for op, dtype in product(options.op, options.dtype):
            lines = measure(op, tree, sizes, getattr(torch, dtype), options.impl)
            found += lines
            for line in lines:
                print(*line.values(), flush=True)
        path = records.write(options.topic, name, found)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
