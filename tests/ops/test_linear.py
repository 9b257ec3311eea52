"""`linear` and `linear_compression`: values and gradients against loops, and their contracts."""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from linear_naive import DTYPES, IMPLS, OPS, Call, calls, check, exact, make, results

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError, UnsupportedError
from ikbo_tree.testing.poison import poisoned_memory

every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", IMPLS)


def three_levels(**options):
    return BroadcastTree.from_counts(
        {"vendor": [2, 0, 1], "item": [3, 0, 2]}, root="user", **options
    )


@every_impl
@given(case=calls())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_against_loops(impl, case):
    call, wanted = case
    with poisoned_memory():
        check(call, impl, wanted)


@every_impl
@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "counts",
    [
        {"item": [0, 1, 0, 1]},
        {"item": [0, 0, 0]},
        {"item": []},
        {"vendor": [1, 0, 5, 4, 0], "item": [0, 0, 2, 0, 1, 0, 0, 3, 0, 0]},
        {"vendor": [0, 0], "item": []},
    ],
    ids=str,
)
def test_empty_segments_and_levels(op, impl, dtype, counts):
    first = next(iter(counts))
    tree = BroadcastTree.from_counts(counts, root="user", root_rows=len(counts[first]))
    widths = {"user": 3, **dict.fromkeys(counts, 2)}
    with poisoned_memory():
        check(make(op, tree, widths, dtype=dtype), impl)


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("widths", "M", "N"),
    [
        ({"user": 20, "item": 511}, 433, 16),
        ({"user": 1178, "item": 866}, 24, 8),
        ({"user": 24, "item": 20}, 8, 466),
    ],
    ids=str,
)
def test_awkward_sizes(op, dtype, widths, M, N):
    tree = BroadcastTree.from_counts({"item": [3, 1, 0, 4]}, root="user")
    check(make(op, tree, widths, dtype=dtype, M=M, N=M if op == "linear" else N))


@every_op
def test_many_rows(op):
    """Sums over rows are as good as a flat model's when there are many, in any dtype."""
    tree = BroadcastTree.from_counts({"item": [2600, 1, 0, 700]}, root="user")
    for dtype in (torch.float32, torch.bfloat16):
        check(make(op, tree, {"user": 3, "item": 4}, dtype=dtype, M=2, N=3))


@every_impl
@every_op
def test_strided_arguments(op, impl):
    """Column views, transposed weights and tables read in any order are no special case."""
    tree = three_levels().with_table("brand", of="vendor", index=[1, 0, 1])
    call = make(op, tree, {"user": 6, "brand": 4, "vendor": 3, "item": 5})
    plain = results(call, impl)
    strided = Call(**vars(call))
    strided.x = {n: torch.cat([t, t], 1)[:, : t.shape[1]] for n, t in call.x.items()}
    strided.x["user"] = call.x["user"].transpose(0, 1).contiguous().transpose(0, 1)
    strided.weight = {n: t.t().contiguous().t() for n, t in call.weight.items()}
    strided.bias = None if call.bias is None else torch.stack([call.bias] * 2, 1)[:, 0]
    strided.grad = torch.cat([call.grad, call.grad], 1)[:, : call.grad.shape[1]]
    for name, value in results(strided, impl).items():
        torch.testing.assert_close(value, plain[name])


@every_impl
@every_op
def test_a_gradient_of_stride_zero(op, impl):
    call = make(op, three_levels(), {"user": 2, "item": 3}, dtype=torch.bfloat16)
    ones = Call(**{**vars(call), "grad": torch.ones_like(call.grad)})
    call.grad = torch.ones((), dtype=torch.bfloat16).expand(call.grad.shape)
    expected = results(ones, impl)
    for name, value in results(call, impl).items():
        assert torch.equal(value, expected[name]), name


@every_impl
@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_coarse_gradient_is_summed_wide(op, impl, dtype):
    """4096 ones add up to 4096 and not to the 256 at which bfloat16 stops counting."""
    tree = BroadcastTree.from_counts({"item": [4096]}, root="user")
    call = make(op, tree, {"user": 1, "item": 1}, dtype=dtype, M=1, N=1)
    for tensor in (call.grad, *call.inputs.values()):
        tensor.fill_(1)
    found = results(call, impl)
    for name in ("x[user]", "weight[user]", "weight[item]", *(["bias"] if op == "linear" else [])):
        assert found[name].item() == 4096, name


@every_impl
@every_op
def test_each_subset_of_gradients(op, impl):
    """Whatever is asked for comes back the same, and nothing else is computed."""
    call = make(op, three_levels(), {"user": 2, "vendor": 1, "item": 3}, dtype=torch.float64)
    everything = results(call, impl)
    names = list(call.inputs)
    for mask in range(1 << len(names)):
        wanted = [n for i, n in enumerate(names) if mask >> i & 1]
        for name, value in results(call, impl, wanted).items():
            torch.testing.assert_close(value, everything[name])


@every_impl
@every_op
def test_one_tensor_at_two_levels(op, impl):
    """A weight tied between levels gets both gradients; so does an input where levels agree."""
    tree = BroadcastTree.from_counts({"item": [1, 1, 1]}, root="user")
    call = make(op, tree, {"user": 2, "item": 2}, dtype=torch.float64, bias=False)
    call.x["item"] = call.x["user"]
    call.weight["item"] = call.weight["user"]
    right = exact(call)
    x, weight = call.x["user"].requires_grad_(), call.weight["user"].requires_grad_()
    dx, dweight = torch.autograd.grad(call.run(impl), [x, weight], call.grad)
    for found, name in ((dx, "x"), (dweight, "weight")):
        expected = right[f"{name}[user]"] + right[f"{name}[item]"]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@every_impl
@every_op
@pytest.mark.parametrize("capacity", [None, {"user": 5, "vendor": 4, "item": 9}], ids=str)
def test_nan_stays_in_its_request(op, impl, capacity):
    tree = three_levels(capacity=capacity)
    call = make(op, tree, {"user": 2, "vendor": 3, "item": 20}, dtype=torch.float32)
    clean = results(call, impl)
    for name, row in (("user", 0), ("vendor", 1), ("item", 2)):
        call.x[name][row] = torch.nan
    call.grad[1] = torch.nan  # user 0, vendor 0
    spoiled = results(call, impl)
    assert spoiled["out"][:3].isnan().all()
    for name in ("out", "x[item]"):
        assert torch.equal(spoiled[name][3:], clean[name][3:])
    for name, first in (("x[user]", 1), ("x[vendor]", 1)):
        assert spoiled[name][0].isnan().any()
        torch.testing.assert_close(spoiled[name][first:], clean[name][first:])


@every_impl
@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_rows_are_zero_and_never_read(op, impl, dtype):
    """With NaN in all dead rows, of gradients too, results are those of a tree without any."""
    capacity = {"user": 8, "vendor": 3, "item": 70}
    tree = three_levels(capacity=capacity)
    call = make(op, tree, {"user": 2, "vendor": 3, "item": 4}, dtype=dtype)
    with poisoned_memory():
        check(call, impl)
        found = results(call, impl)
        for name in call.inputs:
            check(call, impl, [name])
    for name in ("out", "x[user]", "x[item]"):
        level = name[2:-1] if name != "out" else "item"
        assert (found[name][tree.rows(level) :] == 0).all()


@every_op
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("partial_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_partials_cost_a_rounding_a_level(op, dtype, partial_dtype):
    """Errors stay below a rounding of each partial and of the result, and come near it."""
    tree = BroadcastTree.from_counts({"vendor": [4] * 3, "item": [3] * 12}, root="user")
    call = make(
        op, tree, {"user": 40, "vendor": 30, "item": 50}, dtype=dtype, bias=False, M=8, N=16
    )
    unit = torch.finfo(partial_dtype).eps / 2
    bound = torch.finfo(dtype).eps / 2 * np.abs(exact(call)["out"])
    for names in (["user"], ["user", "vendor"]):
        part = Call(**{**vars(call), "level": "item"})
        part.x, part.weight = ({n: t[n] for n in names} for t in (call.x, call.weight))
        bound += unit * np.abs(exact(part)["out"])
    bound += 1e-5  # of sums in float32, whose terms add up to 50 or so

    def error(partial_dtype):
        out = call.run(partial_dtype=partial_dtype).double().numpy()
        return np.abs(out - exact(call)["out"])

    rounded = error(partial_dtype)
    assert (rounded < bound).all()
    assert rounded.max() > bound.mean() / 4
    assert error(None).max() == error(torch.float32).max()
    if dtype == torch.float32:
        assert error(None).max() < rounded.max() / 10


@every_impl
@every_op
def test_padding_k_is_exact(op, impl):
    """Zero columns change neither the result nor the gradients of the rest."""
    tree = three_levels()
    call = make(op, tree, {"user": 5, "vendor": 3, "item": 7}, dtype=torch.float64)
    padded = Call(**vars(call))
    padded.x = {n: torch.cat([t, torch.zeros_like(t[:, :3])], 1) for n, t in call.x.items()}
    padded.weight = {
        n: torch.cat([t, torch.zeros_like(t[:, :3])], 1) for n, t in call.weight.items()
    }
    expected = results(call, impl)
    for name, value in results(padded, impl).items():
        part = value[:, : expected[name].shape[1]] if "[" in name else value
        torch.testing.assert_close(part, expected[name])


@every_op
def test_a_level_below_all_inputs_gets_their_sum(op):
    """`level=` makes the op a broadcast behind the products, on every path of a branching tree."""
    tree = BroadcastTree.from_counts(
        {"vendor": [2, 1], "item": [3, 0, 2], "session": [1, 2]},
        root="user",
        under={"session": "user"},
    )
    for level in ("vendor", "item", "session"):
        check(make(op, tree, {"user": 3}, level=level))
    check(make(op, tree, {"vendor": 2, "user": 3}, level="item"))


@every_op
def test_order_comes_from_the_tree(op):
    """Dicts in any order give the same bits."""
    tree = three_levels().with_table("brand", of="vendor", index=[1, 0, 1])
    call = make(op, tree, {"user": 2, "brand": 3, "vendor": 1, "item": 4})
    expected = call.run()
    call.x = dict(reversed(call.x.items()))
    assert torch.equal(call.run(), expected)
    call.weight = dict(sorted(call.weight.items()))
    assert torch.equal(call.run(), expected)


def wrong_calls():
    x = {"user": torch.ones(3, 2), "item": torch.ones(5, 4)}
    w = {"user": torch.ones(6, 2), "item": torch.ones(6, 4)}
    yield (
        "names differ",
        {**x},
        {"user": w["user"]},
        {},
        TreeError,
        "weights must have inputs' names",
    )
    yield "no names", {}, {}, {}, TreeError, "inputs must name at least one level"
    yield "unknown", {"shop": x["user"]}, {"shop": w["user"]}, {}, TreeError, "'shop'"
    yield "level above", x, w, {"level": "user"}, TreeError, "one path down to 'user'"
    yield (
        "rows",
        {**x, "item": torch.ones(4, 4)},
        w,
        {},
        TreeError,
        r"inputs\[\"item\"\] must have 5",
    )
    yield (
        "rank",
        {**x, "item": torch.ones(5)},
        w,
        {},
        TreeError,
        r"inputs\[\"item\"\] must be \[rows",
    )
    yield (
        "K",
        x,
        {**w, "user": torch.ones(6, 3)},
        {},
        TreeError,
        r"weights\[\"user\"\] must have K = 2",
    )
    yield (
        "N",
        x,
        {**w, "item": torch.ones(5, 4)},
        {},
        TreeError,
        r"weights\[\"item\"\] must have 6 rows",
    )
    yield "bias", x, w, {"bias": torch.ones(5)}, TreeError, r"bias must be \[N\] with N = 6"
    yield (
        "bias dtype",
        x,
        w,
        {"bias": torch.ones(6).double()},
        TypeError,
        "bias must be torch.float32",
    )
    yield "dtypes", {**x, "item": x["item"].half()}, w, {}, TypeError, r"inputs\[\"item\"\] must be"
    yield "integers", {n: t.int() for n, t in x.items()}, w, {}, TypeError, "got torch.int32"
    yield "partial", x, w, {"partial_dtype": torch.int8}, TypeError, "partial_dtype must be"
    yield "impl", x, w, {"impl": "fast"}, ValueError, "impl must be one of"
    yield "device", {**x, "item": x["item"].to("meta")}, w, {}, TreeError, "on the tree's device"
    yield "gluon", x, w, {"impl": "gluon"}, UnsupportedError, 'impl="gluon" cannot run linear'


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "message"),
    [pytest.param(*rest, id=name) for name, *rest in wrong_calls()],
)
def test_errors_name_the_argument(x, w, options, error, message):
    tree = three_levels()
    with pytest.raises(error, match=message):
        ikbo.linear(x, w, tree=tree, **options)


def test_embeddings_of_another_width_are_an_error():
    tree = three_levels()
    x = {"user": torch.ones(3, 2, 8), "item": torch.ones(5, 2, 7)}
    w = {"user": torch.ones(6, 2), "item": torch.ones(6, 2)}
    with pytest.raises(TreeError, match=r'inputs\["item"\] must have N = 8'):
        ikbo.linear_compression(x, w, tree=tree)


@every_op
def test_backward_takes_the_implementation_of_forward(op, monkeypatch):
    call = make(op, three_levels(), {"user": 2, "item": 3})
    expected = results(call, "reference")
    refused = importlib.import_module(f"ikbo_tree.kernels.{op}.torch_impl")
    monkeypatch.delattr(refused, "backward")
    x = call.x["item"].requires_grad_()
    with ikbo.implementation("reference"):
        out = call.run("auto")
    (dx,) = torch.autograd.grad(out, x, call.grad)
    assert torch.equal(dx, expected["x[item]"])


@every_op
def test_no_second_derivative(op):
    """It has none, and says so."""
    call = make(op, three_levels(), {"user": 2, "item": 3})
    x = call.x["item"].requires_grad_()
    (dx,) = torch.autograd.grad(call.run(), x, call.grad.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dx.sum().backward()
