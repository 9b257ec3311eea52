"""Calls of `linear` and `linear_compression`, their exact results by loops, and flat float32 ones.

Nothing here shares code with the ops: rows are found through a tree's parents one step at a time,
gradients are the textbook sums over rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.testing import oracles
from ikbo_tree.testing.budget import assert_within_budget
from ikbo_tree.testing.strategies import trees
from ikbo_tree.tree import BroadcastTree

OPS = ("linear", "linear_compression")
IMPLS = ("reference", "torch")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One call: tensors by name, NaN in dead rows; `grad` is the gradient of the result."""

    op: str
    tree: BroadcastTree
    x: dict[str, Tensor]
    weight: dict[str, Tensor]
    bias: Tensor | None
    level: str | None
    grad: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Every tensor a gradient may be asked for."""
        found = {f"x[{n}]": t for n, t in self.x.items()}
        found |= {f"weight[{n}]": t for n, t in self.weight.items()}
        return found if self.bias is None else found | {"bias": self.bias}

    @property
    def out_level(self) -> str:
        """Level of the result."""
        return self.tree.chain("inputs", tuple(self.x), self.level)[-1]

    def run(self, impl: str = "torch", **options) -> Tensor:
        """The public function."""
        if self.op == "linear":
            options["bias"] = self.bias
        return getattr(ikbo, self.op)(
            self.x, self.weight, tree=self.tree, level=self.level, impl=impl, **options
        )


def make(op, tree, widths, *, level=None, dtype=torch.float32, bias=True, M=4, N=3, seed=0):
    """A call with random tensors; `widths` has K for each level or table."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, live=None):
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if live is not None:
            values[live:] = torch.nan
        return values

    per_row = (N,) if op == "linear_compression" else ()
    height = M if op == "linear_compression" else N
    x = {n: draw(tree.capacity(n), k, *per_row, live=tree.rows(n)) for n, k in widths.items()}
    weight = {n: draw(height, k) for n, k in widths.items()}
    added = draw(height) if bias and op == "linear" else None
    at = tree.chain("inputs", tuple(widths), level)[-1]
    grad = draw(tree.capacity(at), height, *per_row, live=tree.rows(at))
    return Call(op, tree, x, weight, added, level, grad)


@st.composite
def calls(draw):
    """Any tree, any names on one of its paths, the result at the finest of them or below.

    With the inputs whose gradients are asked for.
    """
    tree = draw(trees(max_rows=60))
    leaf = draw(st.sampled_from(tree.levels))
    at = tree.structure.position[leaf]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    widths = {name: draw(st.sampled_from([0, 1, 3, 8])) for name in chosen}
    call = make(
        draw(st.sampled_from(OPS)),
        tree,
        widths,
        level=leaf if draw(st.booleans()) else None,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=draw(st.booleans()),
        M=draw(st.sampled_from([1, 4])),
        N=draw(st.sampled_from([1, 5])),
    )
    everything = st.just(list(call.inputs))
    return call, draw(everything | st.lists(st.sampled_from(list(call.inputs)), unique=True))


def results(call, impl="torch", wanted=None, **options):
    """The result and the gradients of `wanted` inputs (default all), by name."""
    names = list(call.inputs) if wanted is None else list(wanted)
    for name, tensor in call.inputs.items():
        tensor.requires_grad_(name in names)
    out = call.run(impl, **options)
    found = {"out": out.detach()}
    if names:
        grads = torch.autograd.grad(out, [call.inputs[n] for n in names], call.grad)
        found |= dict(zip(names, grads, strict=True))
    for tensor in call.inputs.values():
        tensor.requires_grad_(False)
    return found


def array(tensor: Tensor) -> np.ndarray:
    """float64, whatever the dtype."""
    return tensor.detach().double().numpy()


def rows_above(call):
    """For each name, the row of each live row of the result."""
    up = oracles.Parents(call.tree)
    rows = range(call.tree.rows(call.out_level))
    return {n: np.array([up.above(call.out_level, i, n) for i in rows], int) for n in call.x}


def exact(call):
    """Result and gradients in float64, row after row."""
    x = {n: array(t) for n, t in call.x.items()}
    weight = {n: array(t) for n, t in call.weight.items()}
    extra = (
        ()
        if call.op == "linear_compression"
        else (None if call.bias is None else array(call.bias),)
    )
    out = getattr(oracles, call.op)(call.tree, x, weight, *extra, call.out_level)
    found = {"out": out}
    grad = array(call.grad)
    for n, rows in rows_above(call).items():
        dx, dweight = np.zeros_like(x[n]), np.zeros_like(weight[n])
        for i, row in enumerate(rows):
            dx[row] += weight[n].T @ grad[i]
            one = x[n][row]
            dweight += np.outer(grad[i], one) if call.op == "linear" else grad[i] @ one.T
        found |= {f"x[{n}]": dx, f"weight[{n}]": dweight}
    if call.bias is not None:
        found["bias"] = grad[: call.tree.rows(call.out_level)].sum(0)
    return found


def terms(call):
    """What each result is added up from, without its signs.

    Where terms cancel, another evaluation may hit the exact value by luck; none can be asked to.
    """
    sizes = Call(**vars(call))
    sizes.x = {n: t.abs() for n, t in call.x.items()}
    sizes.weight = {n: t.abs() for n, t in call.weight.items()}
    sizes.bias = None if call.bias is None else call.bias.abs()
    sizes.grad = call.grad.abs()
    return {n: torch.from_numpy(np.asarray(size)) for n, size in exact(sizes).items()}


def flat(call):
    """The same in float32: an ordinary model on broadcast inputs."""
    live = call.tree.rows(call.out_level)
    leaves = {n: t.detach().to(torch.float32).requires_grad_() for n, t in call.inputs.items()}
    maps = {n: torch.from_numpy(rows) for n, rows in rows_above(call).items()}
    joined = torch.cat([leaves[f"x[{n}]"][maps[n]] for n in call.x], 1)
    weight = torch.cat([leaves[f"weight[{n}]"] for n in call.weight], 1)
    if call.op == "linear":
        out = torch.nn.functional.linear(joined, weight, leaves.get("bias"))
    else:
        out = weight @ joined
    grads = torch.autograd.grad(out, list(leaves.values()), call.grad[:live].to(torch.float32))
    whole = call.grad.new_zeros(call.grad.shape, dtype=torch.float32)
    whole[:live] = out.detach()
    return {"out": whole, **dict(zip(leaves, grads, strict=True))}


def moved(call, device):
    """The same call on a device."""
    there = Call(**vars(call))
    there.tree = call.tree.to(device)
    there.x = {n: t.to(device) for n, t in call.x.items()}
    there.weight = {n: t.to(device) for n, t in call.weight.items()}
    there.bias = None if call.bias is None else call.bias.to(device)
    there.grad = call.grad.to(device)
    return there


def check(call, impl="torch", wanted=None, *, device="cpu", **options):
    """Result and gradients against their budgets; returns how much of them was used."""
    found = results(call if device == "cpu" else moved(call, device), impl, wanted, **options)
    right = exact(call)
    near, sizes = flat(call), terms(call)
    spent = {}
    for name, value in found.items():
        assert value.dtype == call.grad.dtype
        assert value.is_contiguous()
        rows = name == "out" or name[0] == "x"
        spent[name] = assert_within_budget(
            value, right[name], near[name], name=name, rows=rows, terms=sizes[name]
        )
    return spent
