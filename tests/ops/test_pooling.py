"""pool and attention_pool of padded and packed histories, against one row at a time."""

import numpy as np
import pytest
import torch
from flat_twins import compiled_once
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.ops import pooling
from ikbo_tree.ops.pooling import attention_pool, pool
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

OPS = ("pool", "attention_pool")
every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])
IDENTITY = {"mean": 0.0, "sum": 0.0, "max": -torch.inf}


def users(rows, **options):
    return BroadcastTree.from_counts({"item": [1] * rows}, root="user", root_rows=rows, **options)


def check(op, tree, seed, dtype=torch.float32, impl="torch"):
    check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


@every_op
@settings(max_examples=25)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_contracts(op, tree, seed):
    check(op, tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
@settings(max_examples=8)
@given(tree=trees(max_rows=60), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(op, dtype, tree, seed):
    check(op, tree, seed, dtype)


@every_op
@settings(max_examples=15)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_as_on_a_device_that_no_one_waits_for(op, tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "on_host", lambda x: False)
        check(op, tree, seed)


class TestPool:
    @every_impl
    @pytest.mark.parametrize("how", IDENTITY)
    def test_rows_that_own_nothing(self, how, impl):
        tree = users(3)
        x = torch.randn(3, 2, 4)
        x[0] = x[2] = torch.nan
        x.requires_grad_()
        lengths = torch.tensor([0, 2, 0], dtype=torch.uint8)
        out = pool(x, tree=tree, level="user", op=how, lengths=lengths, impl=impl)
        assert (out[[0, 2]] == IDENTITY[how]).all()
        assert out[1].isfinite().all()
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert (dx[[0, 2]] == 0).all()
        assert dx[1].isfinite().all()

    @every_impl
    @pytest.mark.parametrize("how", IDENTITY)
    def test_offsets_that_begin_late_and_end_early(self, how, impl):
        x = torch.tensor([torch.nan, 1.0, 2.0, 5.0, torch.nan], requires_grad=True)
        offsets = torch.tensor([1, 3, 3, 4], dtype=torch.int16)
        out = pool(x, tree=users(3), level="user", op=how, offsets=offsets, impl=impl)
        exact = {"mean": [1.5, 0, 5], "sum": [3, 0, 5], "max": [2, -torch.inf, 5]}
        assert out.tolist() == exact[how]
        (dx,) = torch.autograd.grad(out[[0, 2]].sum(), x)
        exact = {"mean": [0.5, 0.5], "sum": [1, 1], "max": [0, 1]}
        assert dx.tolist() == [0, *exact[how], 1, 0]

    def test_a_padded_history_at_a_table(self):
        tree = users(2).with_table("brand", of="item", index=[0, 0], rows=3)
        x = torch.ones(3, 4)
        lengths = torch.tensor([1, 2, 3])
        assert pool(x, tree=tree, level="brand", op="sum", lengths=lengths).tolist() == [1, 2, 3]

    def test_derivatives_of_any_order(self):
        x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
        for how in ("mean", "sum"):

            def function(x, how=how):
                lengths = torch.tensor([3, 1])
                return pool(x, tree=users(2), level="user", op=how, lengths=lengths)

            assert torch.autograd.gradcheck(function, x)
            assert torch.autograd.gradgradcheck(function, x)

    @pytest.mark.parametrize("padded", [False, True])
    def test_no_copy_of_the_history_is_made(self, padded):
        """Padding and unowned entries are segments that no one looks at, not zeros written in."""
        x = torch.randn(40, 50, 8, requires_grad=True)
        kept = []

        def keep(t):
            kept.append(t.numel() if t.is_floating_point() else 0)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            if padded:
                lengths = torch.arange(40)
                pool(x, tree=users(40), level="user", lengths=lengths)
            else:
                offsets = torch.arange(41) * 50
                pool(x.flatten(0, 1), tree=users(40), level="user", offsets=offsets)
        assert sum(kept) == 0


class TestAttention:
    def test_scores_of_minus_infinity_leave_entries_out(self):
        x = torch.tensor([[[1.0], [torch.nan]]])
        scores = torch.tensor([[0.0, -torch.inf]])
        out = attention_pool(x[:, :1].repeat(1, 2, 1), scores, tree=users(1), level="user")
        assert out.tolist() == [[1.0]]

    @pytest.mark.parametrize("packed", [False, True])
    @every_impl
    def test_a_row_that_leaves_all_its_entries_out(self, packed, impl):
        x = torch.randn(2, 3, 4, requires_grad=True)
        scores = torch.tensor([[-torch.inf] * 3, [0.0, -torch.inf, 0.0]], requires_grad=True)
        where = {"tree": users(2), "level": "user", "impl": impl}
        if packed:
            offsets = torch.tensor([0, 3, 6])
            out = attention_pool(x.flatten(0, 1), scores.flatten(), offsets=offsets, **where)
        else:
            out = attention_pool(x, scores, **where)
        torch.testing.assert_close(out, torch.stack([x[0, 0] * 0, (x[1, 0] + x[1, 2]) / 2]))
        dx, ds = torch.autograd.grad(out.sum(), [x, scores])
        assert (dx[0] == 0).all()
        assert dx[1].tolist() == [[0.5] * 4, [0.0] * 4, [0.5] * 4]
        assert (ds[0] == 0).all()
        assert ds[1, 1] == 0

    def test_a_vector_that_scores_gets_its_gradient(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
        w = torch.randn(4, generator=generator, dtype=torch.float64)

        def function(x, w):
            lengths = torch.tensor([5, 0, 2])
            return attention_pool(x, x @ w, tree=users(3), level="user", lengths=lengths)

        assert torch.autograd.gradcheck(function, (x.requires_grad_(), w.requires_grad_()))


@every_op
def test_errors_are_in_the_callers_words(op):
    tree = users(2)
    x, scores = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    lengths, offsets = torch.tensor([1, 3]), torch.tensor([0, 1, 3])

    def call(x, scores, **options):
        args = (x,) if op == "pool" else (x, scores)
        return getattr(pooling, op)(*args, tree=tree, level="user", **options)

    with pytest.raises(TreeError, match="lengths must not come with offsets"):
        call(x, scores, lengths=lengths, offsets=offsets)
    with pytest.raises(TreeError, match=r"lengths must lie in 0 ... 3, the padded length; got 4"):
        call(x, scores, lengths=lengths + 1)
    with pytest.raises(TreeError, match=r"offsets must not decrease"):
        call(x[0], scores[0], offsets=offsets.flip(0))
    with pytest.raises(TreeError, match=r"offsets must have shape \[3\]"):
        call(x[0], scores[0], offsets=offsets[:2])
    with pytest.raises(TypeError, match="lengths must be integers"):
        call(x, scores, lengths=lengths.float())
    with pytest.raises(TypeError, match="x must be float64"):
        call(x.long(), scores)
    with pytest.raises(TreeError, match=r"x must have 2 rows \(level 'user'\)"):
        call(x[:1], scores)
    with pytest.raises(TreeError, match=r"x must have shape \[rows, S, ...\], without offsets"):
        call(x[:, 0, 0], scores)
    if op == "pool":
        with pytest.raises(ValueError, match="op must be one of mean, sum, max"):
            call(x, scores, op="min")
    else:
        with pytest.raises(TreeError, match=r"scores must have shape \(2, 3\)"):
            call(x, scores[:, :2])
        with pytest.raises(TreeError, match=r"x must have shape \[rows, S, D\]"):
            call(x[..., 0], scores)


@every_op
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(op, packed, spare):
    def score(x, extent, tree):
        options = {"tree": tree, "level": "user", "offsets" if packed else "lengths": extent}
        return pool(x, **options) if op == "pool" else attention_pool(x, x[..., 0], **options)

    for count, (compiled, rng) in enumerate(compiled_once(score)):
        rows = int(rng.integers(3, 9))
        lengths = rng.integers(0, 6, rows)
        extent = [0, *np.cumsum(lengths)] if packed else [*lengths]
        extent = torch.tensor(extent + [99] * spare)
        tree = users(rows, capacity={"user": rows + spare, "item": rows} if spare else None)
        shape = (int(lengths.sum()) + 2, 4) if packed else (rows + spare, 6 + count, 4)
        x = torch.randn(shape, requires_grad=True)
        out, exact = compiled(x, extent, tree), score(x, extent, tree)
        # An eager program on a CPU sums only what is owned, in another order.
        torch.testing.assert_close(out, exact)
        grad = torch.randn_like(exact)
        (dx,) = torch.autograd.grad(out, x, grad)
        torch.testing.assert_close(dx, torch.autograd.grad(exact, x, grad)[0])
