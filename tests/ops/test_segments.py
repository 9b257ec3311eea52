"""broadcast, reduce and segment_softmax: the contracts on random trees, and hazards by name."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError, UnsupportedError
from ikbo_tree.testing import check_op, oracles
from ikbo_tree.testing.poison import natural_memory
from ikbo_tree.testing.strategies import trees

OPS = ("broadcast", "reduce", "segment_softmax")
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")
IDENTITY = {"sum": 0.0, "mean": 0.0, "max": -torch.inf, "min": torch.inf, "logsumexp": -torch.inf}
every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])
every_reduction = pytest.mark.parametrize("how", REDUCTIONS)


def users(counts, **options):
    return BroadcastTree.from_counts({"item": counts}, root="user", **options)


def to_users(x, tree, how="sum", impl="torch"):
    return ikbo.reduce(x, tree=tree, level="item", to="user", op=how, impl=impl)


def to_items(x, tree, impl="torch"):
    return ikbo.broadcast(x, tree=tree, level="user", to="item", impl=impl)


def softmax(x, tree, impl="torch"):
    return ikbo.segment_softmax(x, tree=tree, level="item", of="user", impl=impl)


@pytest.mark.parametrize("op", OPS)
@given(tree=trees(max_rows=200), seed=st.integers(0, 2**16))
def test_contracts(op, tree, seed):
    check_op(op, tree, impl="torch", seed=seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_impl
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=5)
@given(tree=trees(max_rows=100), seed=st.integers(0, 2**16))
def test_contracts_in_other_dtypes(op, impl, dtype, tree, seed):
    check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


class TestEmpty:
    @every_impl
    @every_reduction
    @pytest.mark.parametrize("counts", [[1, 0, 5, 4, 0], [0, 2, 0], [0, 0], [0], []])
    def test_childless_rows_get_the_identity_and_no_gradient(self, counts, how, impl):
        tree = users(counts)
        x = torch.randn(sum(counts), 3, requires_grad=True)
        out = to_users(x, tree, how, impl)
        assert out.shape == (len(counts), 3)
        empty = torch.tensor(counts) == 0
        assert (out[empty] == IDENTITY[how]).all()
        assert out[~empty].isfinite().all()
        out.backward(torch.ones_like(out))
        assert x.grad.isfinite().all()

    @every_impl
    def test_mean_over_nothing_backward(self, impl):
        tree = users([2, 0, 1])
        x = torch.ones(3, requires_grad=True)
        to_users(x, tree, "mean", impl).sum().backward()
        assert x.grad.tolist() == [0.5, 0.5, 1.0]

    @every_impl
    def test_a_segment_of_minus_infinity_counts_as_empty(self, impl):
        tree = users([2, 2])
        x = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf], requires_grad=True)
        lse = to_users(x, tree, "logsumexp", impl)
        assert lse.tolist() == [-torch.inf, 0.0]
        p = softmax(x, tree, impl)
        assert p.tolist() == [0.0, 0.0, 1.0, 0.0]
        (dx,) = torch.autograd.grad(p[2] * 3 + lse[1], x)
        assert dx.tolist() == [0.0, 0.0, 1.0, 0.0]

    @every_impl
    def test_gradient_of_childless_users_is_exactly_zero(self, impl):
        x = torch.randn(3, 2, requires_grad=True)
        to_items(x, users([0, 2, 0]), impl).sum().backward()
        assert x.grad.tolist() == [[0, 0], [2, 2], [0, 0]]

    @every_impl
    @pytest.mark.parametrize("width", [(), (0,), (2, 0)])
    def test_no_rows_and_no_width(self, width, impl):
        for tree in (users([]), users([0, 0]), users([1, 2])):
            items = torch.zeros(tree.rows("item"), *width)
            assert to_users(items, tree, "max", impl).shape == (tree.rows("user"), *width)
            assert softmax(items, tree, impl).shape == items.shape
            coarse = torch.zeros(tree.rows("user"), *width)
            assert to_items(coarse, tree, impl).shape == items.shape


class TestMaps:
    @every_impl
    @every_reduction
    def test_interleaved_parents(self, how, impl):
        tree = BroadcastTree.from_parents({"item": [1, 0, 1, 0]}, root="user", root_rows=2)
        x = torch.tensor([1.0, 2.0, 4.0, 8.0])
        exact = oracles.reduce(tree, x.double().numpy(), "item", "user", how)
        torch.testing.assert_close(to_users(x, tree, how, impl).double(), torch.from_numpy(exact))
        assert to_items(torch.tensor([5.0, 6.0]), tree, impl).tolist() == [6, 5, 6, 5]

    @every_impl
    def test_a_map_that_is_a_column(self, impl):
        table = torch.tensor([[1, 9], [0, 9], [1, 9]], dtype=torch.int16)
        tree = BroadcastTree.from_parents({"item": table[:, 0]}, root="user", root_rows=2)
        assert to_items(torch.tensor([5.0, 6.0]), tree, impl).tolist() == [6, 5, 6]

    @every_impl
    def test_tables_and_their_unreferenced_rows(self, impl):
        tree = users([2, 1]).with_table("brand", of="item", index=[3, 0, 3], rows=5)
        x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
        out = ikbo.reduce(x, tree=tree, level="item", to="brand", op="max", impl=impl)
        assert out.tolist() == [2, -torch.inf, -torch.inf, 4, -torch.inf]
        back = ikbo.broadcast(out, tree=tree, level="brand", to="item", impl=impl)
        assert back.tolist() == [4, 2, 4]
        back.sum().backward()
        assert x.grad.tolist() == [0, 1, 2]

    @every_impl
    def test_deep_trees_whose_maps_are_composed(self, impl):
        levels = [f"l{i}" for i in range(12)]
        counts = {level: [2] if i == 0 else [1, 1] for i, level in enumerate(levels[1:])}
        tree = BroadcastTree.from_counts(counts, root="l0")
        x = torch.tensor([1.0, 2.0])
        out = ikbo.reduce(x, tree=tree, level="l11", to="l0", impl=impl)
        assert out.tolist() == [3.0]


class TestSpill:
    @every_impl
    @every_reduction
    @pytest.mark.parametrize("width", [1, 3, 433, 470])
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_bad_user_stays_alone(self, how, impl, width, bad):
        """Long segments too, which are summed in pieces."""
        tree = users([20, 3, 2500 if width < 4 else 20])
        x = torch.randn(tree.rows("item"), width)
        x[20:23] = bad
        x.requires_grad_()
        out = to_users(x, tree, how, impl)
        p = softmax(x, tree, impl)
        (dx,) = torch.autograd.grad([out, p], x, [torch.ones_like(out), torch.randn_like(p)])
        others = torch.ones(len(x), dtype=torch.bool)
        others[20:23] = False
        assert out[[0, 2]].isfinite().all()
        assert p[others].isfinite().all()
        assert dx[others].isfinite().all()

    @every_impl
    def test_buffers_with_two_rows_more_than_the_tree_covers(self, impl):
        tree = users([3, 1], capacity={"user": 4, "item": 6})
        x = torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan, torch.nan], requires_grad=True)
        for how in REDUCTIONS:
            out = to_users(x, tree, how, impl)
            assert out[:2].isfinite().all()
            assert out[2:].tolist() == [0, 0]
            grad = torch.tensor([1.0, 1.0, torch.nan, torch.nan])
            (dx,) = torch.autograd.grad(out, x, grad)
            assert dx[:4].isfinite().all()
            assert dx[4:].tolist() == [0, 0]


class TestSizes:
    def test_one_long_user_beside_a_thousand_short_ones(self):
        tree = users([1] * 500 + [100_000] + [1] * 500)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(tree.rows("item"), generator=generator)
        exact = x[500:100_500].double()
        out = to_users(x, tree)
        torch.testing.assert_close(out[:500], x[:500], rtol=0, atol=0)
        # Summed in pieces: far nearer than 100,000 roundings of a running sum.
        assert abs(out[500].double() - exact.sum()) < 64 * 2**-24 * exact.abs().max() * 316
        assert to_users(x, tree, "max")[500] == exact.max().float()
        lse = to_users(x, tree, "logsumexp")[500].double()
        torch.testing.assert_close(lse, exact.logsumexp(0), rtol=1e-6, atol=0)
        p = softmax(x, tree)
        torch.testing.assert_close(p[500:100_500].double().sum(), torch.tensor(1.0).double())

    def test_many_leaves_of_little_width(self):
        counts = np.resize([1, 0, 2, 65], 4000)
        tree = users(counts)
        x = torch.randn(tree.rows("item"), 2, dtype=torch.float64)
        exact = np.zeros((4000, 2))
        np.add.at(exact, np.repeat(np.arange(4000), counts), x.numpy())
        np.testing.assert_allclose(to_users(x, tree), exact, rtol=1e-12, atol=1e-12)

    @every_impl
    def test_one_user_with_one_item(self, impl):
        tree = users([1])
        x = torch.tensor([7.0])
        assert [to_users(x, tree, how, impl).item() for how in REDUCTIONS] == [7.0] * 5
        assert softmax(x, tree, impl).item() == 1

    def test_offsets_past_two_to_the_31(self):
        """Rows 2^31 elements apart, in memory that is never touched in between."""
        tree = users([1, 2])
        with natural_memory():
            far = torch.empty(2**32 + 1, dtype=torch.uint8).as_strided((3,), (2**31,))
            far.copy_(torch.tensor([1, 2, 3]))
            assert to_users(far, tree).tolist() == [1, 5]
            assert to_users(far, tree, "max").tolist() == [1, 3]
            assert to_items(far[1:], tree).tolist() == [2, 3, 3]


class TestStridesAndGradients:
    @every_impl
    def test_a_bfloat16_gradient_of_4096_ones(self, impl):
        x = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
        to_items(x, users([4096]), impl).sum().backward()
        assert x.grad.tolist() == [[4096, 4096]]

    @every_impl
    def test_gradients_of_stride_zero_and_slices_of_a_cat(self, impl):
        tree = users([2, 1])
        x = torch.randn(3, 4, requires_grad=True)
        out = to_users(x, tree, "sum", impl)
        out.sum().backward()
        assert (x.grad == 1).all()
        x.grad = None
        torch.cat([out.new_zeros(1, 4), to_users(x, tree, "sum", impl)])[1:].sum().backward()
        assert (x.grad == 1).all()

    @every_impl
    def test_one_tensor_used_at_two_levels(self, impl):
        tree = users([1, 1])
        x = torch.randn(2, requires_grad=True)
        (to_items(x, tree, impl) + softmax(x, tree, impl) * 0 + x).sum().backward()
        assert x.grad.tolist() == [2, 2]

    @every_impl
    @pytest.mark.parametrize("how", ["max", "min"])
    def test_ties_share_as_in_torch(self, how, impl):
        tree = users([3, 2])
        x = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0], requires_grad=True)
        flat = getattr(torch, "a" + how)
        expected = [flat(part, 0) for part in x.split([3, 2])]
        (exact,) = torch.autograd.grad(torch.stack(expected).sum(), x)
        (dx,) = torch.autograd.grad(to_users(x, tree, how, impl).sum(), x)
        assert torch.equal(dx, exact)

    @every_impl
    @every_reduction
    def test_gradcheck(self, how, impl):
        tree = BroadcastTree.from_parents({"item": [1, 0, 1, 1]}, root="user", root_rows=2)
        x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: to_users(x, tree, how, impl), x)
        if how in ("sum", "mean"):
            assert torch.autograd.gradgradcheck(lambda x: to_users(x, tree, how, impl), x)

    @every_impl
    def test_gradcheck_of_the_others(self, impl):
        tree = users([3, 0, 1])
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: to_items(x, tree, impl), x)
        assert torch.autograd.gradgradcheck(lambda x: to_items(x, tree, impl), x)
        y = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda y: softmax(y, tree, impl), y)

    @every_impl
    def test_second_derivatives_that_there_are_not_raise(self, impl):
        tree = users([3])
        x = torch.randn(3, requires_grad=True)
        for out in (softmax(x, tree, impl), to_users(x, tree, "logsumexp", impl)):
            (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            with pytest.raises(NotImplementedError, match="no derivative of its own"):
                dx.sum().backward()


class TestDtypes:
    @every_impl
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
    def test_integers(self, dtype, impl):
        tree = users([3, 0, 1])
        x = torch.tensor([100, 100, 100, 7], dtype=dtype)
        total = to_users(x, tree, "sum", impl)
        assert total.dtype == torch.int64
        assert total.tolist() == [300, 0, 7]
        info = torch.iinfo(dtype)
        for how, nothing in (("max", info.min), ("min", info.max)):
            out = to_users(x, tree, how, impl)
            assert out.dtype == dtype
            assert out.tolist() == [100, nothing, 7]
        copied = to_items(x[:3], tree, impl)
        assert (copied.dtype, copied.tolist()) == (dtype, [100, 100, 100, 100])

    @every_impl
    def test_integer_sums_beyond_float32_are_exact(self, impl):
        x = torch.tensor([2**40 + 1, 1, 2**40 + 1])
        assert to_users(x, users([3]), "sum", impl).item() == 2**41 + 3

    @every_impl
    def test_bool(self, impl):
        tree = users([3, 1], capacity={"user": 3, "item": 5})
        x = torch.tensor([True, True, False, True, True])
        assert to_users(x, tree, "sum", impl).tolist() == [2, 1, 0]
        assert to_items(x[:3], tree, impl).tolist() == [True, True, True, True, False]

    @pytest.mark.parametrize(
        ("how", "dtype"),
        [("mean", torch.int32), ("logsumexp", torch.int64), ("max", torch.bool)],
    )
    def test_dtypes_that_make_no_sense(self, how, dtype):
        x = torch.ones(2, dtype=dtype)
        with pytest.raises(TypeError, match=f'for reduce with op="{how}"; got {dtype}'):
            to_users(x, users([2]), how)
        if how != "max":
            with pytest.raises(TypeError, match="x must be of dtype float64"):
                softmax(x, users([2]))


class TestRefusals:
    def test_errors_are_in_the_callers_words(self):
        tree = users([2, 1])
        x = torch.zeros(3)
        with pytest.raises(TreeError, match=r"x must have 3 rows \(level 'item'\).*shape \(2,\)"):
            to_users(x[:2], tree)
        with pytest.raises(TreeError, match="'shop'"):
            ikbo.reduce(x, tree=tree, level="item", to="shop")
        with pytest.raises(TreeError, match="must be above 'user'"):
            ikbo.broadcast(x, tree=tree, level="item", to="user")
        with pytest.raises(ValueError, match="op must be one of sum, mean, max, min, logsumexp"):
            to_users(x, tree, "median")
        with pytest.raises(ValueError, match="impl must be one of auto, reference"):
            to_users(x, tree, impl="fastest")

    @pytest.mark.parametrize("impl", ["triton", "gluon"])
    def test_no_fallback_from_an_explicit_choice(self, impl):
        if torch.cuda.is_available():
            pytest.skip("the choice may be one that runs here")
        with pytest.raises(UnsupportedError, match=f'impl="{impl}" cannot run reduce'):
            to_users(torch.zeros(3), users([2, 1]), impl=impl)


class TestCompile:
    @every_impl
    @pytest.mark.parametrize("plain", [True, False])
    def test_opcheck(self, plain, impl):
        options = {} if plain else {"capacity": {"user": 4, "item": 9}}
        tree = BroadcastTree.from_parents(
            {"item": [0, 0, 2, 2, 2] if plain else [2, 0, 2, 0, 2]},
            root="user", root_rows=3, **options,
        )  # fmt: skip
        route = tree.route("item", "user")
        x = torch.randn(tree.capacity("item"), 2, requires_grad=True)
        y = torch.randn(tree.capacity("user"), 2, requires_grad=True)
        ops = torch.ops.ikbo_tree
        torch.library.opcheck(ops.broadcast.default, (y, *route, impl))
        torch.library.opcheck(ops.segment_softmax.default, (x, *route, impl))
        for how in ("mean", "max", "logsumexp"):
            torch.library.opcheck(ops.reduce.default, (x, *route, how, impl))
        x, y = x.detach(), y.detach()
        torch.library.opcheck(ops.segment_softmax_backward.default, (x, x, *route, impl))
        top = ops.reduce(x, *route, "max", impl)
        torch.library.opcheck(ops.reduce_backward.default, (y, x, top, *route, "max", impl))

    def test_one_compilation_for_all_trees(self):
        from torch._dynamo.testing import CompileCounterWithBackend

        def score(x, tree):
            top = ikbo.reduce(x, tree=tree, level="item", to="user", op="max")
            centred = x - ikbo.broadcast(top, tree=tree, level="user", to="item")
            return ikbo.segment_softmax(centred, tree=tree, level="item", of="user")

        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(score, fullgraph=True, dynamic=True, backend=counter)
        rng = np.random.default_rng(0)
        for _ in range(30):
            tree = users(rng.integers(1, 6, int(rng.integers(2, 9))))
            x = torch.randn(tree.rows("item"), 3, requires_grad=True)
            y = torch.randn(tree.rows("item"), 3)
            out = compiled(x, tree)
            assert torch.equal(out, score(x, tree))
            (dx,) = torch.autograd.grad(out, x, y)
            assert torch.equal(dx, torch.autograd.grad(score(x, tree), x, y)[0])
        assert counter.frame_count == 1

    @pytest.mark.slow
    def test_compiled_as_the_very_first_call_of_a_process(self):
        code = """
            import torch, ikbo_tree as ikbo
            tree = ikbo.BroadcastTree.from_counts({"item": [2, 1]}, root="user")
            f = lambda x, tree: ikbo.reduce(x, tree=tree, level="item", to="user", op="logsumexp")
            x = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
            out = torch.compile(f, fullgraph=True, backend="aot_eager")(x, tree)
            out.sum().backward()
            print(out.tolist(), x.grad.tolist())
        """
        run = subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(code)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert run.stdout.strip().startswith("[0.693147")
        assert run.stdout.strip().endswith("[0.5, 0.5, 1.0]")

    def test_export(self):
        class Score(torch.nn.Module):
            def forward(self, x, tree):
                total = ikbo.reduce(x, tree=tree, level="item", to="user")
                return ikbo.broadcast(total, tree=tree, level="user", to="item")

        tree = users([3, 1, 2])
        x = torch.randn(6, 2)
        exported = torch.export.export(Score(), (x, tree))
        assert torch.equal(exported.module()(x, tree), Score()(x, tree))


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("op", OPS)
    @settings(max_examples=30)
    @given(tree=trees(max_rows=200), seed=st.integers(0, 2**16))
    def test_contracts(self, op, tree, seed):
        check_op(op, tree, impl="torch", seed=seed, device="cuda")

    @pytest.mark.parametrize("how", REDUCTIONS)
    def test_waits_for_nothing_and_gives_the_same_bits(self, how):
        counts = {"item": np.resize([0, 3, 900, 5000, 1], 40)}
        rows = int(counts["item"].sum())
        capacity = {"user": 48, "item": rows + 100}
        tree = BroadcastTree.from_counts(counts, root="user", capacity=capacity, device="cuda")
        x = torch.randn(rows + 100, 17, device="cuda", requires_grad=True)
        g = torch.randn(48, 17, device="cuda")

        def once():
            out = to_users(x, tree, how)
            p = softmax(x, tree)
            back = to_items(g, tree)
            dx = torch.autograd.grad([out, p], x, [g, back])[0]
            return out.detach(), p.detach(), dx, back

        with natural_memory():
            once()
            torch.cuda.set_sync_debug_mode("error")
            try:
                first, second = once(), once()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
