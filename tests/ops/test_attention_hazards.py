"""`target_attention` on the kinds of input that broke neighbouring libraries."""

from dataclasses import replace

import pytest
import torch
from attention_naive import IMPLS, Call, check, draw, memory, queries, results, with_grads

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing import check_op
from ikbo_tree.testing.poison import canary_rows, poisoned_memory

every_impl = pytest.mark.parametrize("impl", IMPLS)


def items(*counts, **options):
    return BroadcastTree.from_counts({"item": list(counts)}, root="user", **options)


@every_impl
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        ([0, 1, 0, 1], [0, 3, 0, 5]),
        ([0, 2, 0], [5, 7, 3]),
        ([2, 0, 3], [0, 0, 0]),
        ([0, 0], [1, 2]),
    ],
    ids=str,
)
def test_childless_rows_and_rows_without_keys(impl, form, counts, lengths):
    tree = items(*counts)
    user = memory(tree, "user", form, keys=8, lengths=lengths, bias="key")
    call = with_grads(Call(tree, "item", queries(tree, "item"), [user]))
    with poisoned_memory():
        check(call, impl)
        found = results(call, impl)
    if form == "padded":
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if count == 0 or length == 0:
                assert not found["dk0"][row].any()
                assert not found["dv0"][row].any()
    if not any(lengths):
        assert not found["o"].any()
        assert (found["lse"] == -torch.inf).all()
        assert not found["dq"].any()


@every_impl
@pytest.mark.parametrize("second", [[0, 0], [0, 3], [2, 0]], ids=str)
@pytest.mark.parametrize("first", [[0, 0], [0, 3], [2, 0]], ids=str)
def test_empty_partials_of_two_levels(impl, first, second):
    """Merging two results over nothing gives nothing, not NaN."""
    tree = BroadcastTree.from_counts({"vendor": [1, 1], "item": [2, 2]}, root="user")
    memories = [
        memory(tree, "user", "padded", lengths=first),
        memory(tree, "vendor", "packed", lengths=second, seed=1),
    ]
    check(with_grads(Call(tree, "item", queries(tree, "item", 2), memories)), impl)


@every_impl
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]], ids=str)
def test_no_rows_at_all(impl, counts):
    tree = items(*counts, root_rows=len(counts)) if counts else items(root_rows=0)
    for form in ("whole", "padded", "packed"):
        call = with_grads(Call(tree, "item", queries(tree, "item"), [memory(tree, "user", form)]))
        check(call, impl)


@every_impl
def test_all_keys_masked_or_weighed_nothing(impl):
    """A mask, and a bias of -inf, over every key of a row: nothing to attend to."""
    tree = items(2, 3)
    for option in ("mask", "bias"):
        user = memory(tree, "user", heads=(2, 2))
        if option == "mask":
            shown = torch.tensor([[False] * 5, [True] * 5])
            user = replace(user, mask=shown)
        else:
            user = replace(user, bias=torch.tensor([[-torch.inf] * 5, [0.0] * 5]))
        q = queries(tree, "item")
        copies = [
            replace(
                user,
                **{n: x.clone() for n in ("k", "v", "bias") if (x := getattr(user, n)) is not None},
            )
            for _ in range(3)
        ]
        check(with_grads(Call(tree, "item", q, copies)), impl)
        call = with_grads(Call(tree, "item", q, [user]))
        check(call, impl)
        found = results(call, impl)
        assert not found["o"][:2].any()
        assert (found["lse"][:2] == -torch.inf).all()
        assert not any(found[name][0].any() for name in ("dk0", "dv0"))


@every_impl
@pytest.mark.parametrize("lse", [False, True])
def test_nan_of_one_user_stays_there(impl, lse):
    """S = 20: tails of tiles of 16 or 64 would read the next user's keys."""
    tree = items(3, 2, 4)
    memories = [memory(tree, "user", keys=20), memory(tree, "item", "packed", seed=1)]
    call = with_grads(Call(tree, "item", queries(tree, "item", 2), memories), lse=lse)
    clean = results(call, impl)
    memories[0].k[1], memories[0].v[1] = torch.nan, torch.inf
    spoiled = results(call, impl)
    for name in ("o", "lse", "dq"):
        others = torch.tensor([0, 1, 2, 5, 6, 7, 8])
        assert torch.equal(spoiled[name][others], clean[name][others]), name
        assert spoiled[name][3:5].isnan().any(), name
    for name in ("dk0", "dv0"):
        assert torch.equal(spoiled[name][[0, 2]], clean[name][[0, 2]]), name


@every_impl
def test_nan_in_a_query_or_its_gradient_stays_in_its_request(impl):
    tree = items(3, 2)
    call = with_grads(Call(tree, "item", queries(tree, "item"), [memory(tree, "user")]), lse=False)
    clean = results(call, impl)
    call.q[3] = torch.nan
    call.grads["o"][4] = torch.nan
    spoiled = results(call, impl)
    assert torch.equal(spoiled["dq"][:3], clean["dq"][:3])
    for name in ("dk0", "dv0"):
        assert torch.equal(spoiled[name][0], clean[name][0])
        assert spoiled[name][1].isnan().any()


@every_impl
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nobody_reads_what_no_row_owns(impl, form):
    """`memory` has NaN beyond lengths and under masks; their gradient is exactly zero."""
    tree = items(3, 0, 70)
    user = memory(tree, "user", form, keys=20, mask=True, bias="head")
    call = with_grads(Call(tree, "item", queries(tree, "item", 2), [user]))
    check(call, impl)
    found = results(call, impl)
    for name, x in call.inputs.items():
        assert not found[f"d{name}"][x.isnan()].any(), name


@every_impl
@pytest.mark.parametrize("live", [3, 1, 0])
def test_dead_rows(impl, live):
    """At every level NaN in dead rows is never read; their results and gradients are zero."""
    capacity = {"user": 4, "vendor": 5, "item": 9}
    vendors, in_each = [1, 0, 1][:live], [2, 2][: sum([1, 0, 1][:live])]
    tree = BroadcastTree.from_counts(
        {"vendor": vendors, "item": in_each}, root="user", root_rows=live, capacity=capacity
    )
    memories = [
        memory(tree, "user", "packed", bias="key"),
        memory(tree, "vendor", "padded", seed=1),
        memory(tree, "item", "whole", seed=2),
        memory(tree, "item", "packed", seed=3),
    ]
    call = with_grads(Call(tree, "item", queries(tree, "item"), memories))
    with poisoned_memory():
        check(call, impl)
        found = results(call, impl)
    rows = tree.rows("item")
    assert not any(found[name][rows:].any() for name in ("o", "lse", "dq", "dk2"))


def odd_strides(x):
    """The same values with gaps in every dim, in another order of dims."""
    wide = torch.full([2 * n + 1 for n in reversed(x.shape)], torch.nan, dtype=x.dtype)
    view = wide.permute(*reversed(range(x.dim())))[tuple(slice(0, 2 * n, 2) for n in x.shape)]
    return view.copy_(x)


@every_impl
@pytest.mark.parametrize("form", ["whole", "packed"])
def test_strides(impl, form):
    """q = big[:, :, :H]; everything with gaps; the values do not change."""
    tree = items(3, 70, 1)
    user = memory(tree, "user", form, bias="head", mask=True)
    call = with_grads(Call(tree, "item", queries(tree, "item", 2), [user]))
    plain = results(call, impl)
    big = draw(74, 2, 5, 8)
    big[:, :, :2] = call.q
    call.q = big[:, :, :2]
    check(call, impl)
    call.q = odd_strides(call.q)
    call.memories = [
        replace(user, **{n: odd_strides(getattr(user, n)) for n in ("k", "v", "bias")})
    ]
    call.grads = {name: odd_strides(x) for name, x in call.grads.items()}
    found = check(call, impl) and results(call, impl)
    for name, x in plain.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5)


@every_impl
def test_gradients_of_stride_zero_and_slices(impl):
    tree = items(3, 2)
    user = memory(tree, "user")
    q = queries(tree, "item", 2).requires_grad_()
    o, lse = ikbo.target_attention(q, [user], tree=tree, level="item", return_lse=True, impl=impl)
    (summed,) = torch.autograd.grad(o.sum() + lse.sum(), q, retain_graph=True)
    joined = torch.cat([torch.zeros(5, 2, 2, 3), o], dim=3)
    weights = draw(*joined.shape)
    (sliced,) = torch.autograd.grad((joined * weights).sum(), q)
    for gradient, grads in (
        (summed, {"o": torch.ones_like(o), "lse": torch.ones_like(lse)}),
        (sliced, {"o": weights[..., 3:]}),
    ):
        call = Call(tree, "item", q.detach(), [user], grads=grads)
        torch.testing.assert_close(gradient, results(call, "reference")["dq"])


@every_impl
def test_one_user_with_4096_items(impl):
    """Sums of 4,096 bfloat16 gradients do not stop at 256."""
    tree = items(4096)
    k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    q = torch.zeros(4096, 1, 1, 8, dtype=torch.bfloat16)
    ikbo.target_attention(q, {"user": (k, v)}, tree=tree, level="item", impl=impl).sum().backward()
    assert v.grad.unique().tolist() == [4096.0]


@every_impl
def test_skew_beside_single_rows(impl):
    """One user with many items beside many with one, few keys each."""
    tree = items(*[1] * 40, 400, *[1] * 40, 0)
    user = memory(tree, "user", "padded", keys=3, widths=(2, 2))
    check(with_grads(Call(tree, "item", queries(tree, "item", 1, 2, 2), [user]), lse=False), impl)


@every_impl
def test_one_tensor_at_two_levels_and_as_key_and_value(impl):
    tree = BroadcastTree.from_counts({"vendor": [1, 1], "item": [2, 3]}, root="user")
    x = draw(2, 4, 2, 8).requires_grad_()
    q = queries(tree, "item")
    twice = {"user": (x, x), "vendor": (x, x)}
    o = ikbo.target_attention(q, twice, tree=tree, level="item", impl=impl)
    (dx,) = torch.autograd.grad(o, x, torch.ones_like(o))
    apart = [ikbo.Memory(n, x.detach().clone(), x.detach().clone()) for n in ("user", "vendor")]
    call = Call(tree, "item", q, apart, grads={"o": torch.ones_like(o)})
    found = results(call, "reference")
    total = sum(found[name] for name in ("dk0", "dv0", "dk1", "dv1"))
    torch.testing.assert_close(dx, total)


@pytest.mark.parametrize(
    "wanted", [["q"], ["k0"], ["v0"], ["bias0"], ["q", "v1"], ["k1"], []], ids=str
)
@every_impl
def test_each_subset_of_gradients(impl, wanted):
    tree = items(3, 2)
    memories = [memory(tree, "user", bias="key"), memory(tree, "item", seed=1)]
    for lse in (False, True):
        call = with_grads(Call(tree, "item", queries(tree, "item"), memories), lse=lse)
        everything = results(call, impl)
        found = results(call, impl, wanted)
        assert set(found) == {"o", "lse", *(f"d{name}" for name in wanted)}
        for name, x in found.items():
            torch.testing.assert_close(x, everything[name])


@every_impl
def test_gradient_through_the_log_sum_exp_alone(impl):
    tree = items(3, 2)
    call = with_grads(Call(tree, "item", queries(tree, "item", 2), [memory(tree, "user")]))
    del call.grads["o"]
    check(call, impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_and_inside_its_buffers(dtype):
    tree = items(3, 0, 40, *[1] * 9)
    memories = [
        memory(tree, n, f, dtype=dtype) for n, f in (("user", "padded"), ("item", "packed"))
    ]
    call = with_grads(Call(tree, "item", queries(tree, "item", dtype=dtype), memories))
    first = results(call)
    with canary_rows():
        second = results(call)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@every_impl
def test_peaked_softmax_in_16_bits(impl):
    """One key takes nearly all weight: dS nearly cancels, and a rounded output would not do."""
    tree = items(5, 5)
    user = memory(tree, "user", keys=3, widths=(32, 32), dtype=torch.bfloat16)
    q = queries(tree, "item", 2, 2, 32, dtype=torch.bfloat16)
    check(with_grads(Call(tree, "item", q, [user], scale=2.0), lse=False), impl)


@pytest.mark.parametrize("op", ["target_attention", "self_target_attention"])
@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("seed", range(12))
def test_dead_query_rows_below_levels_without_any_row(op, impl, seed):
    """Maps of dead rows say 0; where the level above has no row at all, that is not one."""
    one = BroadcastTree.from_counts({"item": []}, root="user", root_rows=0, capacity={"item": 3})
    two = BroadcastTree.from_counts(
        {"vendor": [], "item": []}, root="user", root_rows=0, capacity={"vendor": 2, "item": 3}
    )
    for tree in (one, two):
        check_op(op, tree, impl=impl, seed=seed)
