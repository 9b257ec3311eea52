"""layer_norm and rms_norm over a virtual concatenation, against flat torch on a real one."""

import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError, UnsupportedError
from ikbo_tree.kernels.level_norm import torch_impl
from ikbo_tree.ops import norms
from ikbo_tree.ops.norms import layer_norm, rms_norm
from ikbo_tree.testing import check_op
from ikbo_tree.testing.cases_composed import flat_norm, side_by_side
from ikbo_tree.testing.strategies import trees

OPS = ("layer_norm", "rms_norm")
every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


def check(op, tree, seed, dtype=torch.float32, impl="torch"):
    check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


@every_op
@settings(max_examples=25)
@given(tree=trees(max_rows=200), seed=st.integers(0, 2**16))
def test_contracts(op, tree, seed):
    check(op, tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
@settings(max_examples=5)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(op, dtype, tree, seed):
    check(op, tree, seed, dtype)


@every_op
@settings(max_examples=10)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_rows_cut_anywhere(op, tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "CHUNK", 40)
        check(op, tree, seed)


@every_op
@settings(max_examples=15)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_as_on_a_device_that_no_one_waits_for(op, tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "on_host", lambda x: False)
        check(op, tree, seed)


@pytest.mark.parametrize("offset", [1000.0, 4000.0])
def test_a_mean_far_larger_than_the_deviation(offset):
    """As good as torch on the concatenation, where E[x^2] - E[x]^2 has no digit right."""
    tree = BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 40]}, root="user")
    widths = {"user": 5, "vendor": 60, "item": 3}
    generator = torch.Generator().manual_seed(0)
    # Multiples of 1/64, so that the numbers themselves lose nothing in float32.
    x = {
        n: offset + torch.randint(-128, 128, (tree.rows(n), k), generator=generator) / 64
        for n, k in widths.items()
    }
    whole = side_by_side(tree, "item", x, list(widths))
    exact = flat_norm("layer_norm", whole.double(), None, None, 1e-5)
    theirs = flat_norm("layer_norm", whole, None, None, 1e-5)
    ours = layer_norm(x, tree=tree, eps=1e-5)
    # One rounding of the mean, 2^-24 of it, is all that either may be wrong by (and 4 for luck).
    allowed = 4 * offset * 2.0**-24
    assert (theirs - exact).abs().max() < allowed
    assert (ours - exact).abs().max() < allowed
    variance = whole.square().mean(1) - whole.mean(1).square()
    naive = (whole - whole.mean(1, keepdim=True)) * (variance.clamp(min=0) + 1e-5).rsqrt()[:, None]
    assert (naive - exact).abs().max() > 10 * allowed  # what this is about


@every_impl
@pytest.mark.parametrize("counts", [[1, 0, 5, 4, 0], [0, 0], [0], []])
def test_childless_rows_and_no_rows(counts, impl):
    tree = users(counts)
    y = torch.randn(len(counts), 4, requires_grad=True)
    x = torch.randn(sum(counts), 2, requires_grad=True)
    for op in (layer_norm, rms_norm):
        out = op({"user": y, "item": x}, torch.rand(6), tree=tree, impl=impl)
        assert out.shape == (sum(counts), 6)
        dy, dx = torch.autograd.grad(out, [y, x], torch.ones_like(out))
        assert dx.isfinite().all()
        assert (dy[torch.tensor(counts) == 0] == 0).all()


def test_dead_rows_and_no_eps():
    """1 / sqrt(0) at rows that do not count must not reach the weight's gradient."""
    tree = users([2, 1], capacity={"user": 4, "item": 6})
    weight = torch.ones(3, requires_grad=True)
    x = {"user": torch.randn(4, 1), "item": torch.randn(6, 2)}
    for op in (layer_norm, rms_norm):
        out = op(x, weight, tree=tree, eps=0.0)
        assert (out[3:] == 0).all()
        (dw,) = torch.autograd.grad(out, weight, torch.full_like(out, 1).log1p())
        assert dw.isfinite().all()


@every_op
def test_kept_for_backward_are_the_inputs_and_a_few_numbers_a_row(op):
    tree = users([64] * 8)
    x = {
        "user": torch.randn(8, 40, requires_grad=True),
        "item": torch.randn(512, 40, requires_grad=True),
    }
    kept = {}

    def keep(t):
        if t.is_floating_point():
            kept[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        getattr(norms, op)(x, tree=tree)
    inputs = sum(kept.pop(part.data_ptr(), 0) for part in x.values())
    assert inputs <= 520 * 40
    # The users' part with zeros in childless rows, and two numbers an item.
    assert sum(kept.values()) <= 8 * 40 + 512 * 2


@every_impl
def test_gradcheck(impl):
    tree = BroadcastTree.from_parents({"item": [1, 0, 1, 1]}, root="user", root_rows=2)
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((2, 3), (4, 2), (5,), (5,))]
    tensors = [x.requires_grad_() for x in tensors]

    def function(y, x, weight, bias):
        pair = {"user": y, "item": x}
        out = layer_norm(pair, weight, bias, tree=tree, impl=impl)
        return out + rms_norm(pair, weight, tree=tree, impl=impl)

    assert torch.autograd.gradcheck(function, tensors)


def test_a_second_derivative_raises():
    x = torch.randn(3, 4, requires_grad=True)
    out = layer_norm({"item": x}, tree=users([2, 1]))
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_errors_are_in_the_callers_words():
    tree = users([2, 1])
    x = {"user": torch.zeros(2, 3), "item": torch.zeros(3, 2)}
    with pytest.raises(TreeError, match=r"weight must have shape \[5\]; got shape \(3,\)"):
        layer_norm(x, torch.ones(3), tree=tree)
    with pytest.raises(TreeError, match=r"bias must have shape \[5\]"):
        layer_norm(x, None, torch.ones(5, 1), tree=tree)
    with pytest.raises(TypeError, match=r"weight must be torch.float32 like the inputs"):
        rms_norm(x, torch.ones(5).half(), tree=tree)
    with pytest.raises(TreeError, match=r'inputs\["item"\] must have shape \[rows, K\]'):
        rms_norm({"item": torch.zeros(3, 2, 1)}, tree=tree)
    with pytest.raises(TreeError, match="inputs must have at least one feature; got none"):
        layer_norm({"item": torch.zeros(3, 0)}, tree=tree)
    with pytest.raises(ValueError, match="impl must be one of"):
        layer_norm(x, tree=tree, impl="fastest")
    with pytest.raises(UnsupportedError, match='impl="gluon" cannot run level_norm'):
        rms_norm(x, tree=tree, impl="gluon")


@every_op
@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(op, spare):
    weight = torch.randn(5)

    def score(x, y, tree):
        return getattr(norms, op)({"user": y, "item": x}, weight, tree=tree)

    for compiled, rng in compiled_once(score):
        tree = some_users(rng, spare)
        x = torch.randn(tree.capacity("item"), 2, requires_grad=True)
        y = torch.randn(tree.capacity("user"), 3, requires_grad=True)
        grad = torch.randn(tree.capacity("item"), 5)
        out, exact = compiled(x, y, tree), score(x, y, tree)
        torch.testing.assert_close(out, exact)
        grads = torch.autograd.grad(out, [x, y], grad)
        exact = torch.autograd.grad(exact, [x, y], grad)
        torch.testing.assert_close(grads, exact, rtol=1e-5, atol=1e-5)


@every_impl
@pytest.mark.parametrize("centred", [True, False])
def test_opcheck(centred, impl):
    spare = {"user": 3, "item": 6}
    for tree in (
        users([2, 0, 2]),
        BroadcastTree.from_parents(
            {"item": [1, 0, 1, 1]}, root="user", root_rows=2, capacity=spare
        ),
    ):
        route = tree.route("item", "user")
        rows = tree.capacity("user"), tree.capacity("item")
        x = [torch.randn(n, k, requires_grad=True) for n, k in zip(rows, (3, 2), strict=True)]
        weight = torch.randn(5, requires_grad=True)
        bias = torch.randn(5, requires_grad=True) if centred else None
        rest = *([m, None] for m in route[:3]), route.live_fine, 1e-5, centred
        ops = torch.ops.ikbo_tree
        torch.library.opcheck(ops.level_norm.default, (x, weight, bias, *rest, impl))
        args = torch.randn(rows[1], 5), [part.detach() for part in x], weight.detach(), *rest
        wants = [True, False, True, centred]
        torch.library.opcheck(ops.level_norm_backward.default, (*args, wants, impl))
