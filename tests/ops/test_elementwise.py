"""add, mul, gate and film across levels, against flat torch on broadcast operands."""

import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError, UnsupportedError
from ikbo_tree.ops.elementwise import add, film, gate, mul
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

OPS = ("add", "mul", "gate", "film")
every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


def check(op, tree, seed, dtype=torch.float32, impl="torch"):
    check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


@every_op
@settings(max_examples=20)
@given(tree=trees(max_rows=200), seed=st.integers(0, 2**16))
def test_contracts(op, tree, seed):
    check(op, tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
@settings(max_examples=5)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(op, dtype, tree, seed):
    check(op, tree, seed, dtype)


@every_impl
@pytest.mark.parametrize("counts", [[1, 0, 5, 4, 0], [0, 0], [0], []])
def test_childless_rows_and_no_rows(counts, impl):
    tree = users(counts)
    x = torch.randn(sum(counts), 3, requires_grad=True)
    y = torch.randn(len(counts), 3, requires_grad=True)
    pair, at = {"user": y, "item": x}, {"tree": tree, "impl": impl}
    for out in (
        add(pair, **at),
        mul(pair, **at),
        gate(x, y, level="item", of="user", **at),
        film(x, y, y, level="item", of="user", **at),
    ):
        assert out.shape == x.shape
        dx, dy = torch.autograd.grad(out, [x, y], torch.ones_like(out))
        assert dx.isfinite().all()
        assert (dy[torch.tensor(counts) == 0] == 0).all()


def test_a_bfloat16_gradient_of_4096_ones():
    tree = users([4096])
    y = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    for out in (
        add({"user": y, "item": x}, tree=tree),
        mul({"user": y, "item": x}, tree=tree),
        film(x, y, tree=tree, level="item", of="user"),
    ):
        (dy,) = torch.autograd.grad(out.sum(), y)
        assert dy.tolist() == [[4096, 4096]]


@pytest.mark.parametrize("op", ["mul", "gate", "film"])
def test_no_coarse_operand_is_kept_at_the_finest_level(op):
    tree = users([64] * 8)
    x = torch.randn(512, 16, requires_grad=True)
    y = torch.randn(8, 16, requires_grad=True)
    kept = {}

    def keep(t):
        if t.is_floating_point():
            kept[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        if op == "mul":
            mul({"user": y, "item": x}, tree=tree)
        elif op == "gate":
            gate(x, y, tree=tree, level="item", of="user")
        else:
            film(x, y, y, tree=tree, level="item", of="user")
    assert kept[x.data_ptr()] == x.numel()
    del kept[x.data_ptr()]
    assert sum(kept.values()) <= 3 * y.numel()


def test_the_only_operand_is_not_returned_itself():
    x = torch.ones(3)
    for op in (add, mul):
        out = op({"item": x}, tree=users([2, 1]))
        assert torch.equal(out, x)
        assert out.data_ptr() != x.data_ptr()


@every_impl
def test_derivatives_of_any_order(impl):
    tree = BroadcastTree.from_parents({"item": [1, 0, 1, 1]}, root="user", root_rows=2)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    at = {"tree": tree, "impl": impl}

    def modulate(x, y):
        return film(x, y, y, level="item", of="user", **at) + mul({"item": x, "user": y}, **at)

    def gated(x, y):
        return gate(x, y, level="item", of="user", **at) + add({"item": x, "user": y}, **at)

    for f in (modulate, gated):
        assert torch.autograd.gradcheck(f, (x, y))
        assert torch.autograd.gradgradcheck(f, (x, y))


def test_errors_are_in_the_callers_words():
    tree = users([2, 1])
    x, y = torch.zeros(3, 4), torch.zeros(2, 4)
    with pytest.raises(TreeError, match=r"inputs\[\"item\"\] must have 3 rows"):
        add({"user": y, "item": y}, tree=tree)
    with pytest.raises(TreeError, match="must broadcast with"):
        mul({"user": y, "item": x[:, :3]}, tree=tree)
    with pytest.raises(TreeError, match="must broadcast with"):
        add({"user": y, "item": x[:, 0]}, tree=tree)
    with pytest.raises(TypeError, match=r"scale must be torch.float32 like the first operand"):
        film(x, y.double(), tree=tree, level="item", of="user")
    with pytest.raises(TypeError, match=r"must be float64.*got torch.int64"):
        add({"user": y.long()}, tree=tree)
    with pytest.raises(ValueError, match="activation must be one of sigmoid, tanh, relu, silu"):
        gate(x, y, tree=tree, level="item", of="user", activation="softplus")
    with pytest.raises(TreeError, match="shop"):
        gate(x, y, tree=tree, level="item", of="shop")
    with pytest.raises(TreeError, match="at least one level"):
        mul({}, tree=tree)
    branches = BroadcastTree.from_counts(
        {"item": [1], "session": [1]}, root="user", under={"session": "user"}
    )
    with pytest.raises(TreeError, match="must be above"):
        gate(torch.ones(1), torch.ones(1), tree=branches, level="item", of="session")


def test_no_fallback_from_an_explicit_choice():
    with pytest.raises(UnsupportedError, match='impl="gluon" cannot run'):
        add({"user": torch.ones(2), "item": torch.ones(3)}, tree=users([2, 1]), impl="gluon")
    with pytest.raises(ValueError, match="impl must be one of"):
        mul({"item": torch.ones(3)}, tree=users([2, 1]), impl="fastest")


@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(spare):
    def score(x, y, tree):
        a = mul({"user": y, "item": x}, tree=tree)
        b = gate(add({"user": y, "item": a}, tree=tree), y, tree=tree, level="item", of="user")
        return film(b, y, y, tree=tree, level="item", of="user")

    for compiled, rng in compiled_once(score, tries=8):
        tree = some_users(rng, spare, counts=(1, 6))
        x = torch.randn(tree.capacity("item"), 3, requires_grad=True)
        y = torch.randn(tree.capacity("user"), 3, requires_grad=True)
        out, exact = compiled(x, y, tree), score(x, y, tree)
        torch.testing.assert_close(out, exact)
        grads = torch.autograd.grad(out.sum(), [x, y])
        torch.testing.assert_close(grads, torch.autograd.grad(exact.sum(), [x, y]))


@every_impl
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_opcheck(given, impl):
    spare = {"user": 3, "item": 6}
    for tree in (
        users([2, 0, 2]),
        BroadcastTree.from_parents(
            {"item": [1, 0, 1, 1]}, root="user", root_rows=2, capacity=spare
        ),
    ):
        route, coarse = tree.route("item", "user"), tree.capacity("user")
        x = torch.randn(tree.capacity("item"), 2, requires_grad=True)
        scale, shift = (torch.randn(coarse, 2, requires_grad=True) if y else None for y in given)
        ops, kind = torch.ops.ikbo_tree, torch.float32
        torch.library.opcheck(ops.modulate.default, (x, scale, shift, *route, kind, impl))
        if scale is not None:
            args = torch.randn_like(x), x.detach(), scale.detach(), *route, kind, kind
            wants = [True, True, given[1]]
            torch.library.opcheck(ops.modulate_backward.default, (*args, wants, impl))
