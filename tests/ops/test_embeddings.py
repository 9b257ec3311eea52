"""embedding, by distinct ids or not, against plain indexing."""

import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import TreeError, UnsupportedError
from ikbo_tree.ops import embeddings
from ikbo_tree.ops.embeddings import embedding
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])
either_way = pytest.mark.parametrize("unique", [True, False])


def check(tree, seed, dtype=torch.float32, impl="torch"):
    check_op("embedding", tree, impl=impl, dtype=dtype, seed=seed)


@every_impl
@settings(max_examples=25)
@given(tree=trees(max_rows=200), seed=st.integers(0, 2**16))
def test_contracts(impl, tree, seed):
    check(tree, seed, impl=impl)


@settings(max_examples=15)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_as_on_a_device_that_no_one_waits_for(tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "on_host", lambda x: False)
        check(tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=8)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(dtype, tree, seed):
    check(tree, seed, dtype)


def test_each_distinct_id_is_looked_up_once():
    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.index_select.default and args[0] is weight:
                looked_up.append(args[2].tolist())
            return function(*args, **(kwargs or {}))

    weight, looked_up = torch.randn(100, 2), []
    ids = torch.tensor([7, 3, 7, 7, 90, 3])
    with Watched():
        out = embedding(ids, weight, tree=users([6]), level="item", unique=True)
    assert looked_up == [[3, 7, 90]]
    assert torch.equal(out, weight[ids])


@either_way
def test_a_bfloat16_gradient_of_4096_ones(unique):
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.ones(4096, dtype=torch.int32)
    embedding(ids, weight, tree=users([4096]), level="item", unique=unique).sum().backward()
    assert weight.grad.tolist() == [[0, 0], [4096, 4096], [0, 0]]


@either_way
@pytest.mark.parametrize("counts", [[0, 0], []])
def test_no_rows(counts, unique):
    weight = torch.randn(3, 2, requires_grad=True)
    ids = torch.empty(0, 4, dtype=torch.int64)
    out = embedding(ids, weight, tree=users(counts), level="item", unique=unique)
    assert out.shape == (0, 4, 2)
    assert (torch.autograd.grad(out.sum(), weight)[0] == 0).all()


@either_way
def test_an_empty_table_below_dead_rows(unique):
    tree = users([0], capacity={"user": 1, "item": 2})
    weight = torch.randn(0, 2, requires_grad=True)
    out = embedding(torch.tensor([5, -1]), weight, tree=tree, level="item", unique=unique)
    assert out.tolist() == [[0, 0], [0, 0]]
    assert torch.autograd.grad(out.sum(), weight)[0].shape == (0, 2)


@either_way
def test_derivatives_of_any_order(unique):
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([2, 0, 2, 2])

    def function(weight):
        return embedding(ids, weight, tree=users([4]), level="item", unique=unique).square()

    assert torch.autograd.gradcheck(function, weight)
    assert torch.autograd.gradgradcheck(function, weight)


@pytest.mark.parametrize(("ids", "got"), [([0, 3], 3), ([-1, 0], -1)])
def test_ids_out_of_range(ids, got):
    with pytest.raises(TreeError, match=rf"ids must lie in 0 ... 2, the rows of weight; got {got}"):
        embedding(torch.tensor(ids), torch.zeros(3, 2), tree=users([2]), level="item")


def test_errors_are_in_the_callers_words():
    tree, ids, weight = users([2]), torch.tensor([0, 1]), torch.zeros(3, 2)
    with pytest.raises(TypeError, match=r"ids must be integers; got torch.float32"):
        embedding(ids.float(), weight, tree=tree, level="item")
    with pytest.raises(TypeError, match=r"weight must be float64.*got torch.int64"):
        embedding(ids, weight.long(), tree=tree, level="item")
    with pytest.raises(TreeError, match=r"weight must have shape \[V, D\]"):
        embedding(ids, weight[0], tree=tree, level="item")
    with pytest.raises(TreeError, match=r"ids must have 2 rows \(level 'item'\)"):
        embedding(ids[:1], weight, tree=tree, level="item")
    with pytest.raises(TreeError, match="'shop'"):
        embedding(ids, weight, tree=tree, level="shop")
    with pytest.raises(UnsupportedError, match='impl="gluon" cannot run'):
        embedding(ids, weight, tree=tree, level="item", impl="gluon")


@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(spare):
    def look_up(ids, weight, tree):
        return embedding(ids, weight, tree=tree, level="item")

    weight = torch.randn(9, 2, requires_grad=True)
    for compiled, rng in compiled_once(look_up):
        tree = some_users(rng, spare, counts=(2, 9), rows=(3, 9))
        ids = torch.from_numpy(rng.integers(0, 9, (tree.capacity("item"), 2)))
        ids[tree.rows("item") :] = 99
        grad = torch.randn(*ids.shape, 2)
        out, exact = compiled(ids, weight, tree), look_up(ids, weight, tree)
        assert torch.equal(out, exact)
        (found,) = torch.autograd.grad(out, weight, grad)
        assert torch.equal(found, torch.autograd.grad(exact, weight, grad)[0])
