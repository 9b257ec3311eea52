"""silu_attention against loops, for all the memories it takes."""

import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, Memory, TreeError, UnsupportedError
from ikbo_tree.kernels.silu_attention import torch_impl
from ikbo_tree.ops.silu_attention import silu_attention
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


def check(tree, seed, dtype=torch.float32, impl="torch"):
    check_op("silu_attention", tree, impl=impl, dtype=dtype, seed=seed)


@settings(max_examples=40)
@given(tree=trees(max_rows=80), seed=st.integers(0, 2**16))
def test_contracts(tree, seed):
    check(tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=8)
@given(tree=trees(max_rows=60), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(dtype, tree, seed):
    check(tree, seed, dtype)


@settings(max_examples=8)
@given(tree=trees(max_rows=40), seed=st.integers(0, 2**16))
def test_the_reference_keeps_the_contracts(tree, seed):
    check(tree, seed, impl="reference")


@settings(max_examples=15)
@given(tree=trees(max_rows=80), seed=st.integers(0, 2**16))
def test_scores_cut_anywhere(tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "_blocks", lambda call, q, keys: [
            slice(at, at + 1) for at in range(q.shape[1])
        ])  # fmt: skip
        check(tree, seed)


@every_impl
@pytest.mark.parametrize("counts", [[0, 2, 0], [1, 0, 5, 4, 0], [0], []])
def test_childless_rows_and_no_keys(counts, impl):
    tree, rows = users(counts), len(counts)
    q = torch.randn(sum(counts), 1, 1, 2, requires_grad=True)
    k = torch.randn(rows, 3, 1, 2, requires_grad=True)
    lengths = torch.tensor([3, 0, 2, 1, 3][:rows], dtype=torch.int32)
    memory = Memory("user", k, k, lengths=lengths)
    out = silu_attention(q, [memory], tree=tree, level="item", impl=impl)
    dq, dk = torch.autograd.grad(out, [q, k], torch.ones_like(out))
    assert out.isfinite().all()
    assert dq.isfinite().all()
    for user, count in enumerate(counts):
        assert (dk[user, int(lengths[user]) :] == 0).all()
        if count == 0:
            assert (dk[user] == 0).all()
    if sum(counts) and not int(lengths[counts.index(max(counts))]):
        assert (out == 0).any()


@every_impl
def test_nan_that_no_one_owns(impl):
    """Padding of one user is next to the keys of the other, in memory and in a call."""
    k = torch.randn(2, 20, 2, 4)
    k[0, 13:] = torch.nan
    k.requires_grad_()
    q = torch.randn(5, 2, 2, 4, requires_grad=True)
    memory = Memory("user", k, k, lengths=torch.tensor([13, 20]))
    out = silu_attention(q, [memory], tree=users([2, 3]), level="item", impl=impl)
    dq, dk = torch.autograd.grad(out.sum(), [q, k])
    assert out.isfinite().all()
    assert dq.isfinite().all()
    assert (dk[0, 13:] == 0).all()
    assert dk[0, :13].isfinite().all()


def test_a_second_derivative_raises():
    q = torch.randn(3, 1, 1, 2, requires_grad=True)
    k = torch.randn(2, 4, 1, 2)
    out = silu_attention(q, {"user": (k, k)}, tree=users([2, 1]), level="item")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        dq.sum().backward()


def test_opcheck():
    tree = users([2, 1])
    route = tree.route("item", "user")
    q, k, v = (torch.randn(n, s, 2, 3) for n, s in ((3, 1), (2, 4), (2, 4)))
    lists = [[None], [None], [route.index], [route.offsets], [None]]
    given = (q.requires_grad_(), [k.requires_grad_()], [v], [], [], *lists, None)
    for factors in (None, torch.rand(3)):
        call = (*given, factors, 0.5, 0.5, "torch")
        torch.library.opcheck(torch.ops.ikbo_tree.silu_attention.default, call)


def test_errors_are_in_the_callers_words():
    tree = users([2, 1])
    q, k = torch.zeros(3, 1, 2, 4), torch.zeros(2, 5, 2, 4)
    where = {"tree": tree, "level": "item"}
    with pytest.raises(TreeError, match="length must be positive; got 0"):
        silu_attention(q, {"user": (k, k)}, length=0, **where)
    with pytest.raises(TreeError, match="length must have 3 rows"):
        silu_attention(q, {"user": (k, k)}, length=torch.ones(2), **where)
    with pytest.raises(TreeError, match="length must not require a gradient"):
        silu_attention(q, {"user": (k, k)}, length=torch.ones(3, requires_grad=True), **where)
    with pytest.raises(TreeError, match=r'memories\["user"\].k must be 4 wide'):
        silu_attention(q, {"user": (k[..., :3], k)}, **where)
    with pytest.raises(TreeError, match="at least one entry"):
        silu_attention(q, {}, **where)
    with pytest.raises(TypeError, match=r"q must be float64.*got torch.int64"):
        silu_attention(q.long(), {"user": (k, k)}, **where)
    with pytest.raises(UnsupportedError, match='impl="triton" cannot run silu_attention'):
        silu_attention(q, {"user": (k, k)}, impl="triton", **where)


@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(spare):
    def score(q, k, tree):
        return silu_attention(q, {"user": (k, k)}, tree=tree, level="item")

    for compiled, rng in compiled_once(score):
        tree = some_users(rng, spare)
        q = torch.randn(tree.capacity("item"), 1, 2, 3, requires_grad=True)
        k = torch.randn(tree.capacity("user"), 4, 2, 3, requires_grad=True)
        out, exact = compiled(q, k, tree), score(q, k, tree)
        torch.testing.assert_close(out, exact)
        grads = torch.autograd.grad(out.sum(), [q, k])
        torch.testing.assert_close(grads, torch.autograd.grad(exact.sum(), [q, k]))


def test_unsorted_trees_and_branches():
    tree = BroadcastTree.from_parents({"item": [1, 0, 1, 0]}, root="user", root_rows=2)
    q, k = torch.randn(4, 1, 1, 2), torch.randn(2, 3, 1, 2)
    out = silu_attention(q, {"user": (k, k)}, tree=tree, level="item")
    sure = silu_attention(q, {"user": (k, k)}, tree=tree, level="item", impl="reference")
    torch.testing.assert_close(out, sure)
