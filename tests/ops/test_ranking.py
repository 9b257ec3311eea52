"""segment_topk and the losses over segments, against one segment at a time."""

import numpy as np
import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError, UnsupportedError, implementation
from ikbo_tree.ops import pairs, ranking
from ikbo_tree.ops.ranking import listwise_softmax_loss, pairwise_logistic_loss, segment_topk
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

OPS = ("segment_topk", "listwise_softmax_loss", "pairwise_logistic_loss")
LOSSES = OPS[1:]
every_op = pytest.mark.parametrize("op", OPS)
every_loss = pytest.mark.parametrize("op", LOSSES)
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


def check(op, tree, seed, dtype=torch.float32, impl="torch"):
    check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


@every_op
@settings(max_examples=25)
@given(tree=trees(max_rows=80), seed=st.integers(0, 2**16))
def test_contracts(op, tree, seed):
    check(op, tree, seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
@settings(max_examples=8)
@given(tree=trees(max_rows=60), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(op, dtype, tree, seed):
    check(op, tree, seed, dtype)


@pytest.mark.parametrize("op", ["segment_topk", "pairwise_logistic_loss"])
@settings(max_examples=15)
@given(tree=trees(max_rows=80), seed=st.integers(0, 2**16))
def test_segments_of_one_length_at_a_time(op, tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "PADDING", 0)
        check(op, tree, seed)


@settings(max_examples=15)
@given(tree=trees(max_rows=80), seed=st.integers(0, 2**16))
def test_topk_as_on_a_device_that_no_one_waits_for(tree, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "on_host", lambda x: False)
        check("segment_topk", tree, seed)


class TestTopk:
    @every_impl
    def test_ties_go_to_the_lower_row_and_nan_comes_first(self, impl):
        tree = BroadcastTree.from_parents({"item": [1, 0, 1, 0, 1, 1]}, root="user", root_rows=3)
        scores = torch.tensor([0.0, 5.0, -0.0, 5.0, torch.nan, -torch.inf])
        values, rows = segment_topk(scores, 3, tree=tree, level="item", of="user", impl=impl)
        assert rows.tolist() == [[1, 3, -1], [4, 0, 2], [-1, -1, -1]]
        assert values[0].tolist() == [5, 5, -torch.inf]
        assert values[1, 0].isnan()
        assert values[1, 1:].tolist() == [0, 0]
        assert values[2].tolist() == [-torch.inf] * 3

    def test_a_value_of_minus_infinity_has_a_row(self):
        scores = torch.tensor([-torch.inf, 1.0])
        values, rows = segment_topk(scores, 3, tree=users([2]), level="item", of="user")
        assert rows.tolist() == [[1, 0, -1]]
        assert values.tolist() == [[1, -torch.inf, -torch.inf]]

    def test_gradients_of_what_is_missing_go_nowhere(self):
        scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        values, _ = segment_topk(scores, 2, tree=users([2, 0, 1]), level="item", of="user")
        grad = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan], [3.0, torch.nan]])
        (found,) = torch.autograd.grad(values, scores, grad)
        assert found.tolist() == [2, 1, 3]

    def test_each_row_is_its_own_best(self):
        scores = torch.tensor([1.0, 2.0, torch.nan])
        tree = users([1], capacity={"user": 2, "item": 3})
        values, rows = segment_topk(scores, 2, tree=tree, level="item", of="item")
        assert rows.tolist() == [[0, -1], [0, 0], [0, 0]]
        assert values.tolist() == [[1, -torch.inf], [0, 0], [0, 0]]


class TestPairs:
    @pytest.mark.parametrize("most", [1, 7, 64])
    @settings(max_examples=10)
    @given(tree=trees(max_rows=60), seed=st.integers(0, 2**16))
    def test_cut_anywhere(self, most, tree, seed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairs, "PAIRS", most)
            check("pairwise_logistic_loss", tree, seed)

    def test_one_long_segment_beside_short_ones(self):
        tree = users([1] * 50 + [3000] + [2] * 50)
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(tree.rows("item"), generator=generator, requires_grad=True)
        labels = torch.randint(0, 2, scores.shape, generator=generator)
        where = {"tree": tree, "level": "item", "of": "user"}
        losses = pairwise_logistic_loss(scores, labels, reduction="none", **where)
        (found,) = torch.autograd.grad(losses.sum(), scores)
        s, y = scores.detach()[50:3050].double(), labels[50:3050]
        gaps = s[y == 0][None, :] - s[y == 1][:, None]
        exact = torch.nn.functional.softplus(gaps).sum()
        torch.testing.assert_close(losses[50].double(), exact, rtol=1e-6, atol=0)
        exact = -gaps.sigmoid().sum(1)
        torch.testing.assert_close(found[50:3050][y == 1].double(), exact, rtol=1e-5, atol=0)
        assert (losses[:50] == 0).all()

    def test_labels_of_any_kind_and_nan(self):
        scores = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float16)
        where = {"tree": users([3]), "level": "item", "of": "user"}
        for labels in (torch.tensor([True, False, False]), torch.tensor([3, 1, 1])):
            loss = pairwise_logistic_loss(scores, labels, reduction="sum", **where)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss.item(), np.log1p(np.e) + np.log1p(np.e**2))
        nan = torch.tensor([1.0, torch.nan, 0.0])
        loss = pairwise_logistic_loss(scores, nan, **where)
        torch.testing.assert_close(loss.item(), np.log1p(np.e**2))

    def test_a_second_derivative_raises(self):
        scores = torch.randn(3, requires_grad=True)
        loss = pairwise_logistic_loss(
            scores, torch.arange(3), tree=users([3]), level="item", of="user"
        )
        (found,) = torch.autograd.grad(loss, scores, create_graph=True)
        with pytest.raises(NotImplementedError, match="no derivative of its own"):
            found.sum().backward()

    def test_opcheck(self):
        scores, labels = torch.randn(5, requires_grad=True), torch.tensor([1.0, 0, 2, 2, 0])
        offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
        for order in (None, torch.tensor([1, 0, 4, 2, 3], dtype=torch.int32)):
            call = (scores, labels, offsets, order)
            torch.library.opcheck(torch.ops.ikbo_tree.pairwise_logistic.default, call)
            call = (labels, scores.detach(), labels, offsets, order)
            torch.library.opcheck(torch.ops.ikbo_tree.pairwise_logistic_backward.default, call)


class TestLists:
    def test_left_out_rows_and_lists(self):
        scores = torch.tensor([0.0, -torch.inf, 0.0, 7.0, 3.0], requires_grad=True)
        labels = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0])
        where = {"tree": users([3, 1, 1, 0]), "level": "item", "of": "user"}
        losses = listwise_softmax_loss(scores, labels, reduction="none", **where)
        torch.testing.assert_close(losses, torch.tensor([2.0, 1.0, 1.0, 1.0]).log())
        mean = listwise_softmax_loss(scores, labels, **where)
        torch.testing.assert_close(mean.item(), np.log(2) / 2)
        (found,) = torch.autograd.grad(mean, scores)
        assert found.tolist() == [-0.25, 0, 0.25, 0, 0]

    def test_nothing_positive_anywhere(self):
        scores = torch.randn(3, requires_grad=True)
        for op in (listwise_softmax_loss, pairwise_logistic_loss):
            loss = op(scores, torch.zeros(3), tree=users([2, 1]), level="item", of="user")
            assert loss.item() == 0
            assert torch.autograd.grad(loss, scores)[0].tolist() == [0, 0, 0]


@every_impl
@every_op
@pytest.mark.parametrize("counts", [[1, 0, 5, 4, 0], [0, 0], [0], []])
def test_childless_rows_and_no_rows(op, counts, impl):
    where = {"tree": users(counts), "level": "item", "of": "user", "impl": impl}
    scores = torch.randn(sum(counts), requires_grad=True)
    empty = torch.tensor(counts) == 0
    if op == "segment_topk":
        out, rows = segment_topk(scores, 2, **where)
        assert (out[empty] == -torch.inf).all()
        assert (rows[empty] == -1).all()
        out = out.masked_fill(rows < 0, 0)
    else:
        labels = torch.arange(sum(counts)) % 2
        out = getattr(ranking, op)(scores, labels, reduction="none", **where)
        assert (out[empty] == 0).all()
    (found,) = torch.autograd.grad(out.sum(), scores)
    assert found.isfinite().all()


def test_errors_are_in_the_callers_words():
    where = {"tree": users([2, 1]), "level": "item", "of": "user"}
    scores = torch.zeros(3)
    with pytest.raises(TreeError, match="k must be at least 1; got 0"):
        segment_topk(scores, 0, **where)
    with pytest.raises(TypeError, match=r"scores must be float64.*got torch.int64"):
        segment_topk(scores.long(), 1, **where)
    with pytest.raises(TreeError, match=r"labels must have 3 rows \(level 'item'\)"):
        listwise_softmax_loss(scores, torch.zeros(2), **where)
    with pytest.raises(TreeError, match=r"scores must have shape \[rows\]"):
        pairwise_logistic_loss(scores[:, None], scores, **where)
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, none"):
        listwise_softmax_loss(scores, scores, reduction="batchmean", **where)
    with pytest.raises(TreeError, match="must be above 'user'"):
        segment_topk(torch.zeros(2), 1, tree=users([2, 1]), level="user", of="item")


def test_topk_has_no_kernel():
    where = {"tree": users([3]), "level": "item", "of": "user"}
    with pytest.raises(UnsupportedError, match='impl="triton" cannot run segment_topk'):
        segment_topk(torch.zeros(3), 1, impl="triton", **where)
    with implementation("gluon"), pytest.raises(UnsupportedError, match='impl="gluon"'):
        segment_topk(torch.zeros(3), 1, **where)


@every_loss
def test_no_fallback_from_an_explicit_choice(op):
    if torch.cuda.is_available():
        pytest.skip("the choice may be one that runs here")
    with pytest.raises(UnsupportedError, match='impl="triton" cannot run'):
        getattr(ranking, op)(
            torch.zeros(3), torch.ones(3), tree=users([3]), level="item", of="user", impl="triton"
        )


@every_op
@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(op, spare):
    def score(scores, labels, tree):
        where = {"tree": tree, "level": "item", "of": "user"}
        if op == "segment_topk":
            return segment_topk(scores, 2, **where)[0]
        return getattr(ranking, op)(scores, labels, **where)

    for compiled, rng in compiled_once(score):
        tree = some_users(rng, spare, counts=(2, 9), rows=(3, 9))
        scores = torch.randn(tree.capacity("item"), requires_grad=True)
        labels = torch.arange(tree.capacity("item")) % 3
        out, exact = compiled(scores, labels, tree), score(scores, labels, tree)
        torch.testing.assert_close(out, exact)
        (found,) = torch.autograd.grad(out.sum(), scores)
        torch.testing.assert_close(found, torch.autograd.grad(exact.sum(), scores)[0])
