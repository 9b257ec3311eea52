"""The attention ops as torch.library ops: opcheck, gradcheck, compile, export."""

import io
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_naive import IMPLS, Call, memory, queries, results, with_grads
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, UnsupportedError

every_impl = pytest.mark.parametrize("impl", IMPLS)
both_ops = pytest.mark.parametrize("own", [False, True], ids=["target", "self_target"])
CAPACITY = {"user": 8, "vendor": 32, "item": 128}


def random_tree(rng, capacity=None):
    users = int(rng.integers(2, 8))
    vendors = rng.integers(0, 4, users)
    vendors[:2] = 2, 1
    items = rng.integers(1, 4, int(vendors.sum()))
    counts = {"vendor": vendors, "item": items}
    return BroadcastTree.from_counts(counts, root="user", capacity=capacity)


def make(tree, own=False, dtype=torch.float32, seed=0, width=4, keys=5):
    """A call with a memory of each form, or of the self op."""
    options = {"heads": (2, 1), "widths": (width, width), "dtype": dtype, "keys": keys}
    user = memory(tree, "user", "padded", seed=seed, **options)
    q = queries(tree, "item", 2, 2, width, dtype=dtype)
    if own:
        q_self = torch.full((*user.k.shape[:2], 2, width), 0.3, dtype=dtype)
        return with_grads(Call(tree, "item", q, [user], q_self=q_self, causal=True))
    memories = [
        user,
        memory(tree, "vendor", "packed", bias="head", mask=True, seed=seed + 1, **options),
        memory(tree, "item", "whole", bias="key", seed=seed + 2, **options),
    ]
    return with_grads(Call(tree, "item", q, memories))


def op_arguments(call, impl):
    """Arguments of `ikbo_tree::target_attention`, and of the op of self attention."""
    tree, of = call.tree, call.memories
    routes = [tree.route("item", m.level) for m in of]
    maps = [
        [None if r is None else getattr(r, name) for r in routes]
        for name in ("index", "offsets", "order")
    ]
    extents = [m.lengths if m.offsets is None else m.offsets for m in of]
    live, scale = tree.live("item"), 0.5
    if call.q_self is not None:
        (m,), one = of, [x[0] for x in maps]
        return (
            call.q_self,
            call.q,
            m.k,
            m.v,
            extents[0],
            *one,
            live,
            tree.live("user"),
            True,
            scale,
            impl,
        )
    biased = [i for i, m in enumerate(of) if m.bias is not None]
    lists = [m.k for m in of], [m.v for m in of], [of[i].bias for i in biased], biased
    return (call.q, *lists, extents, [m.mask for m in of], *maps, live, scale, impl)


@both_ops
@pytest.mark.parametrize(
    ("impl", "capacity"), [("torch", None), ("torch", CAPACITY), ("reference", CAPACITY)], ids=str
)
def test_opcheck(own, impl, capacity):
    call = make(random_tree(np.random.default_rng(0), capacity), own)
    for x in (*call.inputs.values(), *call.grads.values()):
        x.nan_to_num_(0)
    name = "self_target_attention" if own else "target_attention"
    args = op_arguments(call, impl)
    outputs = getattr(torch.ops.ikbo_tree, name)(*args)
    backward = getattr(torch.ops.ikbo_tree, f"{name}_backward").default
    grads = call.grads
    if own:
        given = [grads["o_self"], None, grads["lse_self"], grads["lse"], list(outputs)]
        wants = [True, False, True, True]
    else:
        given = [grads["o"], grads["lse"], *outputs]
        wants = [True, *[True, False, True], *[True] * 3, *[False, True]]
    torch.library.opcheck(backward, (*given, *args[:-1], wants, impl))
    for x in call.inputs.values():
        x.requires_grad_()
    torch.library.opcheck(getattr(torch.ops.ikbo_tree, name).default, args)


@every_impl
@both_ops
def test_gradcheck(own, impl):
    tree = BroadcastTree.from_counts({"vendor": [2, 0], "item": [2, 1]}, root="user")
    call = make(tree, own, torch.float64, width=2, keys=3)
    for x in call.inputs.values():
        x.nan_to_num_(0)

    def function(*given):
        # A NaN would hide itself: gradcheck wants finite results.
        for name, x in zip(call.inputs, given, strict=True):
            place(call, name, x)
        found = call.run(impl)
        return tuple(found[name] for name in call.grads)

    inputs = [x.requires_grad_() for x in call.inputs.values()]
    torch.autograd.gradcheck(function, inputs)


def place(call, name, x):
    """Replaces one input."""
    if name in ("q", "q_self"):
        setattr(call, name, x)
    else:
        i = int(name[-1])
        call.memories[i] = replace(call.memories[i], **{name[:-1]: x})


def step(own):
    """A function of tensors and a tree only, as a model would call it."""

    def function(tree, q, k, v, lengths, offsets, vendor_k, vendor_v):
        if own:
            q_self = torch.full_like(k, 0.3)
            o_self, o = ikbo.self_target_attention(
                q_self, q, k, v, tree=tree, level="item", of="user", lengths=lengths
            )
            return o, o_self
        memories = [
            ikbo.Memory("user", k, v, lengths=lengths),
            ikbo.Memory("vendor", vendor_k, vendor_v, offsets=offsets),
        ]
        o, lse = ikbo.target_attention(q, memories, tree=tree, level="item", return_lse=True)
        return o, lse.masked_fill(lse.isinf(), 0)

    return function


def step_arguments(tree, seed, dtype=torch.float32):
    user = memory(tree, "user", "padded", dtype=dtype, seed=seed, widths=(4, 4))
    vendor = memory(tree, "vendor", "packed", dtype=dtype, seed=seed + 1, widths=(4, 4))
    q = queries(tree, "item", 2, 2, 4, dtype=dtype)
    return tree, q, user.k, user.v, user.lengths, vendor.offsets, vendor.k, vendor.v


@both_ops
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["full", "capacity"])
def test_new_trees_do_not_recompile(own, capacity):
    """100 trees: as many graphs as the first few asked for, and the same results."""
    torch._dynamo.reset()
    counter = CompileCounter()
    function = step(own)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    rng = np.random.default_rng(0)
    for count in range(100):
        args = step_arguments(random_tree(rng, capacity), count)
        for x, y in zip(compiled(*args), function(*args), strict=True):
            assert torch.equal(x, y)
        if count == 2:
            settled = counter.frame_count
    assert counter.frame_count == settled


@both_ops
@pytest.mark.parametrize("counts", [([], []), ([1], [1]), ([1, 1], [1, 1]), ([0, 0], [])], ids=str)
def test_any_first_tree_compiles(own, counts):
    """Sizes 0 and 1, and as many users as items, are baked into nothing."""
    torch._dynamo.reset()
    function = step(own)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for vendors, items in (counts, ([2, 1], [3, 0, 2]), counts):
        given = {"vendor": vendors, "item": items}
        tree = BroadcastTree.from_counts(given, root="user", root_rows=len(vendors))
        args = step_arguments(tree, 0, torch.float64)
        leaves = [args[i].requires_grad_() for i in (1, 2, 3)]
        found = []
        for run in (compiled, function):
            out = run(*args)
            grads = torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])
            found.append((*out, *grads))
        for x, y in zip(*found, strict=True):
            assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_first_in_a_fresh_process(tmp_path, backend):
    code = f"""
        import torch
        import ikbo_tree as ikbo

        def step(q, k, v):
            return ikbo.target_attention(q, {{"user": (k, v)}}, tree=tree, level="item")

        tree = ikbo.BroadcastTree.from_counts({{"item": [2, 1]}}, root="user")
        q = torch.ones(3, 1, 1, 4)
        k = torch.zeros(2, 2, 1, 4)
        v = torch.arange(4.0).view(2, 2, 1, 1).expand(-1, -1, -1, 4).clone().requires_grad_()
        o = torch.compile(step, fullgraph=True, backend="{backend}")(q, k, v)
        o.sum().backward()
        print(o[:, 0, 0, 0].tolist(), v.grad[..., 0, 0].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[0.5, 0.5, 2.5] [[1.0, 1.0], [0.5, 0.5]]", done.stderr


class Model(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.function = step(own)

    def forward(self, tree, *tensors):
        return self.function(tree, *tensors)


@both_ops
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["full", "capacity"])
def test_export_save_load(own, capacity):
    """An exported program takes other trees."""
    rng = np.random.default_rng(0)
    tree, *tensors = step_arguments(random_tree(rng, capacity), 0)
    leaves = torch.utils._pytree.tree_leaves(tree)
    # The counts of rows of three levels are the same in number in all trees.
    dims = [{0: Dim.DYNAMIC} if leaf.shape[0] > 3 else None for leaf in leaves]
    shapes = (dims, tuple({0: Dim.AUTO} for _ in tensors))
    program = torch.export.export(Model(own), (tree, *tensors), dynamic_shapes=shapes)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for seed in range(5):
        args = step_arguments(random_tree(rng, capacity), seed)
        for x, y in zip(loaded(*args), Model(own)(*args), strict=True):
            assert torch.equal(x, y)


def test_second_derivatives_are_refused_not_dropped():
    call = make(random_tree(np.random.default_rng(0)))
    q = call.q.requires_grad_()
    (dq,) = torch.autograd.grad(call.run()["o"].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_choice_of_implementation():
    call = make(random_tree(np.random.default_rng(0)))
    with pytest.raises(UnsupportedError, match="target_attention"):
        call.run("gluon")
    with pytest.raises(ValueError, match="impl must be one of"):
        call.run("fast")
    with ikbo.implementation("reference"):
        chosen = results(call, "auto")
    for name, x in results(call, "reference").items():
        assert torch.equal(chosen[name].nan_to_num(7), x.nan_to_num(7)), name
