"""dot_interaction, factorization_machine and cross, against flat torch on broadcast inputs."""

import pytest
import torch
from flat_twins import compiled_once, some_users, users
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import TreeError, UnsupportedError
from ikbo_tree.ops import cross_layers, dots, interactions
from ikbo_tree.ops.cross_layers import MatrixCross, MixtureCross, VectorCross, cross
from ikbo_tree.ops.interactions import dot_interaction, factorization_machine
from ikbo_tree.testing import check_op
from ikbo_tree.testing.cases_composed import side_by_side
from ikbo_tree.testing.cases_interactions import flat_cross, flat_machine
from ikbo_tree.testing.strategies import trees

OPS = ("dot_interaction", "factorization_machine", "cross")
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


class TestDots:
    @pytest.mark.parametrize("rows", [1, 3, 50])
    @pytest.mark.parametrize("walked", [0, 10**9])
    @settings(max_examples=12)
    @given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
    def test_any_cut_and_either_way_to_the_coarse_fields(self, rows, walked, tree, seed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dots, "CHUNK", rows * 30)
            patch.setattr(dots, "WALKED", walked)
            check("dot_interaction", tree, seed)

    @settings(max_examples=20)
    @given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
    def test_as_on_a_device_that_no_one_waits_for(self, tree, seed):
        with pytest.MonkeyPatch.context() as patch:
            for module in (dots, interactions):
                patch.setattr(module, "on_host", lambda x: False)
            check("dot_interaction", tree, seed)

    def test_dlrm_and_torchrec_order(self):
        """Two user and two item fields of one-hot sums, so that every product names its pair."""
        x = torch.tensor([[[2.0], [3.0]]]), torch.tensor([[[5.0], [7.0]]])
        fields = dict(zip(("user", "item"), x, strict=True))
        tree = users([1])
        assert dot_interaction(fields, tree=tree).tolist() == [[6, 10, 15, 14, 21, 35]]
        out = dot_interaction(fields, tree=tree, order="triu")
        assert out.tolist() == [[6, 10, 14, 15, 21, 35]]
        out = dot_interaction(fields, tree=tree, self_interaction=True)
        assert out.tolist() == [[4, 6, 9, 10, 15, 25, 14, 21, 35, 49]]
        out = dot_interaction(fields, tree=tree, self_interaction=True, order="triu")
        assert out.tolist() == [[4, 6, 10, 14, 9, 15, 21, 25, 35, 49]]
        turned = {"item": fields["item"], "user": fields["user"]}
        assert dot_interaction(turned, tree=tree).tolist() == [[35, 10, 14, 15, 21, 6]]

    def test_nothing_but_the_fields_is_kept(self):
        tree = users([64] * 8)
        x = torch.randn(512, 4, 16, requires_grad=True)
        y = torch.randn(8, 4, 16, requires_grad=True)
        kept = {}

        def keep(t):
            if t.is_floating_point():
                kept[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            dot_interaction({"user": y, "item": x}, tree=tree)
        assert sum(kept.values()) <= x.numel() + y.numel()

    def test_one_field_has_no_pairs(self):
        x = torch.randn(3, 1, 4, requires_grad=True)
        out = dot_interaction({"item": x}, tree=users([2, 1]))
        assert out.shape == (3, 0)
        assert (torch.autograd.grad(out.sum(), x)[0] == 0).all()

    def test_a_second_derivative_raises(self):
        x = torch.randn(3, 2, 4, requires_grad=True)
        out = dot_interaction({"item": x}, tree=users([2, 1]))
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


class TestMachine:
    def test_far_less_cancels_than_in_the_flat_formula(self):
        """A user vector a thousand times as large as an item's: their product is all there is."""
        tree = users([3])
        user, item = torch.full((1, 1, 2), 1000.0), torch.full((3, 1, 2), 1.1e-3)
        out = factorization_machine({"user": user, "item": item}, tree=tree)
        exact = (user.double() * item.double()).squeeze(1)
        torch.testing.assert_close(out.double(), exact, rtol=1e-7, atol=0)
        flat = flat_machine(torch.cat([user.expand(3, 1, 2), item], dim=1))
        assert (flat - exact).abs().max() > 1e-3  # what this is about


class TestCross:
    @every_impl
    def test_vectors_alone_never_meet_at_the_finest_level(self, impl):
        """Three layers are one decomposed product: `linear` is called once, three columns wide."""
        tree = users([2, 0, 3])
        x = {"user": torch.randn(3, 4), "item": torch.randn(5, 2)}
        weights = [{"weight": torch.randn(6), "bias": torch.randn(6)} for _ in range(3)]
        calls = []
        whole = cross_layers.linear

        def watched(inputs, weights, **options):
            calls.append([w.shape for w in weights.values()])
            return whole(inputs, weights, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_layers, "linear", watched)
            out = cross(x, [VectorCross(**w) for w in weights], tree=tree, impl=impl)
        assert calls == [[(3, 4), (3, 2)]]
        exact = flat_cross(side_by_side(tree, "item", x, list(x)), [("vector", w) for w in weights])
        torch.testing.assert_close(out, exact)

    def test_no_layers_are_the_concatenation(self):
        x = {"user": torch.randn(2, 1), "item": torch.randn(3, 2)}
        out = cross(x, [], tree=users([2, 1]))
        assert torch.equal(out, torch.cat([x["user"][[0, 0, 1]], x["item"]], dim=1))


@every_impl
@pytest.mark.parametrize("counts", [[1, 0, 5, 4, 0], [0, 0], [0], []])
def test_childless_rows_and_no_rows(counts, impl):
    tree = users(counts)
    fields = {
        "user": torch.randn(len(counts), 2, 3, requires_grad=True),
        "item": torch.randn(sum(counts), 2, 3, requires_grad=True),
    }
    parts = {name: x.flatten(1) for name, x in fields.items()}
    at = {"tree": tree, "impl": impl}
    for out in (
        dot_interaction(fields, **at),
        factorization_machine(fields, **at),
        cross(parts, [MatrixCross(torch.randn(12, 12))], **at),
    ):
        dx, dy = torch.autograd.grad(out, list(fields.values()), torch.ones_like(out))
        assert dy.isfinite().all()
        assert (dx[torch.tensor(counts) == 0] == 0).all()


def test_errors_are_in_the_callers_words():
    tree = users([2, 1])
    x, y = torch.zeros(3, 2, 4), torch.zeros(2, 2, 4)
    with pytest.raises(TreeError, match=r'fields\["item"\] must have shape \[rows, F, D\], D = 4'):
        dot_interaction({"user": y, "item": x[..., :3]}, tree=tree)
    with pytest.raises(TreeError, match=r'fields\["user"\] must have shape \[rows, F, D\]'):
        factorization_machine({"user": y[:, 0]}, tree=tree)
    for op in (dot_interaction, factorization_machine):
        with pytest.raises(UnsupportedError, match='impl="gluon" cannot run'):
            op({"user": y, "item": x}, tree=tree, impl="gluon")
    with pytest.raises(ValueError, match="order must be one of tril, triu"):
        dot_interaction({"item": x}, tree=tree, order="upper")
    with pytest.raises(TypeError, match=r"must be torch.float32 like the first operand"):
        dot_interaction({"user": y, "item": x.double()}, tree=tree)
    parts = {"user": torch.zeros(2, 3), "item": torch.zeros(3, 1)}
    with pytest.raises(TreeError, match=r"layers\[1\].weight must have shape \(4, 4\).*\(4, 3\)"):
        cross(parts, [VectorCross(torch.zeros(4)), MatrixCross(torch.zeros(4, 3))], tree=tree)
    weights = torch.zeros(2, 4, 5), torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)
    with pytest.raises(TreeError, match=r"layers\[0\].c must have shape \(2, 5, 5\)"):
        cross(parts, [MixtureCross(*weights)], tree=tree)
    with pytest.raises(TypeError, match=r"layers\[0\].weight must be torch.float32, as inputs"):
        cross(parts, [VectorCross(torch.zeros(4).double())], tree=tree)
    with pytest.raises(TreeError, match=r'inputs\["item"\] must have shape \[rows, K\]'):
        cross({"item": x}, [], tree=tree)


@every_op
@pytest.mark.parametrize("spare", [0, 3])
def test_new_trees_do_not_recompile(op, spare):
    weights = torch.randn(12, 12) * 0.3, torch.randn(12) * 0.3

    def score(x, y, tree):
        fields = {"user": y, "item": x}
        if op == "cross":
            parts = {name: f.flatten(1) for name, f in fields.items()}
            return cross(parts, [VectorCross(weights[1]), MatrixCross(*weights)], tree=tree)
        return (dot_interaction if op == "dot_interaction" else factorization_machine)(
            fields, tree=tree
        )

    for compiled, rng in compiled_once(score):
        tree = some_users(rng, spare)
        x = torch.randn(tree.capacity("item"), 2, 3, requires_grad=True)
        y = torch.randn(tree.capacity("user"), 2, 3, requires_grad=True)
        out, exact = compiled(x, y, tree), score(x, y, tree)
        torch.testing.assert_close(out, exact)
        grads = torch.autograd.grad(out.sum(), [x, y])
        exact = torch.autograd.grad(exact.sum(), [x, y])
        torch.testing.assert_close(grads, exact, rtol=1e-5, atol=1e-5)
