"""`linear` and `linear_compression` as torch.library ops: opcheck, compile, export."""

import io
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from linear_naive import IMPLS, OPS, make, results
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.ops.linear import _stages

every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", IMPLS)
WIDTHS = {"user": 3, "brand": 2, "vendor": 2, "item": 4}


def tree_of(users, vendors, items, capacity=None, unsorted=False):
    """Counts of vendors a user and items a vendor, and a table of two brands."""
    if unsorted:
        parents = {
            "vendor": np.repeat(np.arange(users), vendors)[::-1].copy(),
            "item": np.repeat(np.arange(sum(vendors)), items)[::-1].copy(),
        }
        tree = BroadcastTree.from_parents(parents, root="user", root_rows=users, capacity=capacity)
    else:
        counts = {"vendor": vendors, "item": items}
        tree = BroadcastTree.from_counts(counts, root="user", root_rows=users, capacity=capacity)
    return tree.with_table("brand", of="vendor", index=np.arange(sum(vendors)) % 2, rows=2)


def random_tree(rng, capacity=None):
    users = int(rng.integers(2, 8))
    vendors = rng.integers(1, 4, users)
    return tree_of(
        users, vendors.tolist(), rng.integers(1, 4, int(vendors.sum())).tolist(), capacity
    )


@every_impl
@every_op
@pytest.mark.parametrize("plain", [True, False])
def test_opcheck(op, impl, plain):
    """A sorted tree of live rows, and one with orders and dead rows."""
    options = {} if plain else {"capacity": {"user": 4, "item": 9}, "unsorted": True}
    tree = tree_of(2, [2, 1], [3, 0, 2], **options)
    call = make(op, tree, WIDTHS)
    for tensor in (*call.inputs.values(), call.grad):
        tensor.nan_to_num_(0).requires_grad_()
    dims = "[rows, K]" if op == "linear" else "[rows, K, N]"
    x, weight, *maps = _stages(call.x, call.weight, tree, None, dims)
    bias = (call.bias,) if op == "linear" else ()
    torch.library.opcheck(
        getattr(torch.ops.ikbo_tree, op).default, (x, weight, *bias, *maps, None, impl)
    )
    wants = [True, False, True, True] * 2 + [op == "linear"]
    backward = getattr(torch.ops.ikbo_tree, f"{op}_backward").default
    args = [t.detach() for t in x], [t.detach() for t in weight]
    torch.library.opcheck(backward, (call.grad.detach(), *args, *maps, wants, impl))


@every_op
def test_opcheck_of_a_single_level(op):
    tree = BroadcastTree.from_counts({}, root="user", root_rows=3)
    call = make(op, tree, {"user": 2})
    for tensor in call.inputs.values():
        tensor.requires_grad_()
    dims = "[rows, K]" if op == "linear" else "[rows, K, N]"
    x, weight, *maps = _stages(call.x, call.weight, tree, None, dims)
    bias = (call.bias,) if op == "linear" else ()
    torch.library.opcheck(
        getattr(torch.ops.ikbo_tree, op).default, (x, weight, *bias, *maps, None, "torch")
    )


@every_impl
@every_op
@pytest.mark.parametrize("unsorted", [False, True])
def test_gradcheck(op, impl, unsorted):
    tree = tree_of(3, [2, 0, 1], [3, 0, 2], unsorted=unsorted)
    call = make(op, tree, WIDTHS, dtype=torch.float64, M=2, N=3)
    inputs = [tensor.requires_grad_() for tensor in call.inputs.values()]

    def function(*args):
        given = dict(zip(call.inputs, args, strict=True))
        bias = {"bias": given["bias"]} if op == "linear" else {}
        x = {n: given[f"x[{n}]"] for n in call.x}
        weight = {n: given[f"weight[{n}]"] for n in call.x}
        return getattr(ikbo, op)(x, weight, tree=tree, impl=impl, **bias)

    torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize(
    ("op", "capacity"),
    [("linear", None), ("linear_compression", {"user": 8, "vendor": 32, "item": 128})],
)
def test_new_trees_do_not_recompile(op, capacity):
    """Forward and backward of 100 trees: one graph for the first, one for all the others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(tree, x, weight):
        return getattr(ikbo, op)(x, weight, tree=tree)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    rng = np.random.default_rng(0)
    for count in range(100):
        call = make(op, random_tree(rng, capacity), WIDTHS, bias=False, seed=count)
        expected = results(call)
        inputs = {n: t.requires_grad_() for n, t in call.inputs.items()}
        out = compiled(call.tree, call.x, call.weight)
        grads = torch.autograd.grad(out, list(inputs.values()), call.grad)
        for name, value in zip(("out", *inputs), (out, *grads), strict=True):
            assert torch.equal(value, expected[name]), name
        if count == 2:
            settled = counter.frame_count
    assert counter.frame_count == settled


@every_op
@pytest.mark.parametrize(
    "first",
    [(0, [], []), (1, [1], [1]), (2, [1, 1], [1, 1]), (2, [0, 0], [])],
    ids=["no rows", "one row", "levels of one size", "childless"],
)
def test_any_first_tree_compiles(op, first):
    """What the first tree looks like is baked into nothing that later trees see."""
    torch._dynamo.reset()

    def step(tree, x, weight):
        return getattr(ikbo, op)(x, weight, tree=tree)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for shape in (first, (2, [2, 1], [3, 0, 2]), (3, [1, 1, 1], [1, 1, 1]), first):
        call = make(op, tree_of(*shape), WIDTHS, bias=False, dtype=torch.float64)
        expected = results(call)
        inputs = {n: t.requires_grad_() for n, t in call.inputs.items()}
        out = compiled(call.tree, call.x, call.weight)
        grads = torch.autograd.grad(out, list(inputs.values()), call.grad)
        assert torch.equal(out, expected["out"])
        for name, grad in zip(inputs, grads, strict=True):
            assert torch.equal(grad, expected[name]), name


@pytest.mark.slow
@every_op
def test_compiled_in_a_fresh_process(op):
    """A compiled call may be the very first use of the package."""
    width = ", 2" if op == "linear_compression" else ""
    code = f"""
        import torch
        import ikbo_tree as ikbo
        from ikbo_tree import BroadcastTree

        tree = BroadcastTree.from_counts({{"item": [3, 0, 2]}}, root="user")
        x = {{"user": torch.ones(3, 4{width}, requires_grad=True), "item": torch.ones(5, 2{width})}}
        weight = {{"user": torch.ones(6, 4, requires_grad=True), "item": torch.ones(6, 2)}}
        step = torch.compile(
            lambda x, weight: ikbo.{op}(x, weight, tree=tree), fullgraph=True, backend="aot_eager"
        )
        out = step(x, weight)
        out.sum().backward()
        assert (out == 6).all(), out
        assert x["user"].grad.flatten(1)[:, 0].tolist() == [18.0, 0.0, 12.0], x["user"].grad
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Model(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        call = make(op, tree_of(1, [1], [1]), WIDTHS, bias=False)
        self.weight = torch.nn.ParameterDict(
            {n: torch.nn.Parameter(w) for n, w in call.weight.items()}
        )

    def forward(self, tree, x):
        return getattr(ikbo, self.op)(x, dict(self.weight.items()), tree=tree)


@every_op
@pytest.mark.parametrize("capacity", [None, {"user": 8, "vendor": 32, "item": 128}], ids=str)
def test_export_save_load(op, capacity):
    """An exported model takes other trees."""
    rng = np.random.default_rng(0)
    model = Model(op)
    call = make(op, random_tree(rng, capacity), WIDTHS, bias=False)
    leaves = torch.utils._pytree.tree_leaves(call.tree)
    # Sizes 2 and 3 are those of counts, of brands and of their offsets: the same in all trees.
    dims = [{0: Dim.DYNAMIC} if leaf.shape[0] > 3 else None for leaf in leaves]
    x_dims = {n: {0: Dim.DYNAMIC} if n != "brand" else None for n in call.x}
    program = torch.export.export(model, (call.tree, call.x), dynamic_shapes=(dims, x_dims))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for seed in range(5):
        call = make(op, random_tree(rng, capacity), WIDTHS, bias=False, seed=seed)
        assert torch.equal(loaded(call.tree, call.x), model(call.tree, call.x))
