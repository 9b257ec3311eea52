"""The attention kernels: batch invariance, isolation, strides, long segments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_device import check, moved
from attention_naive import Call, draw, memory, queries, results, with_grads

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.target_attention import triton_backward, triton_kernel

DTYPES = (torch.float16,) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
KEYS = 40 if INTERPRETED else 700
WIDTH = 8 if INTERPRETED else 64

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(x):
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b):
    return torch.equal(bits(a.cpu()), bits(b.cpu()))


def request(seed, *, vendors, items, n, dtype):
    """Tensors of one root row with everything below it."""
    rng = np.random.default_rng(seed)
    below = rng.multinomial(items, [1 / vendors] * vendors) if vendors else np.zeros(0, int)
    made = {"vendor": [vendors], "item": below.tolist()}
    tree = BroadcastTree.from_counts(made, root="user")
    options = {"widths": (WIDTH, WIDTH), "dtype": dtype, "heads": (2, 1)}
    user = memory(tree, "user", "padded", keys=KEYS, seed=seed, bias="head", **options)
    vendor = memory(tree, "vendor", "padded", keys=20, seed=seed + 1, **options)
    q = queries(tree, "item", n, 2, WIDTH, dtype=dtype, seed=seed + 2)
    return with_grads(Call(tree, "item", q, [user, vendor]), seed=seed + 3)


def together(requests, capacity=0):
    """The requests as one call, under a capacity with NaN in dead rows."""
    counts = {
        "vendor": [r.tree.rows("vendor") for r in requests],
        "item": [int(c) for r in requests for c in r.tree.counts("item")],
    }
    spare = None
    if capacity:
        spare = {"user": len(requests) + 1, "vendor": sum(counts["vendor"]) + 2}
        spare["item"] = sum(counts["item"]) + capacity
    tree = BroadcastTree.from_counts(counts, root="user", capacity=spare)

    def joined(parts, level):
        x = torch.cat(parts)
        full = x.new_full(
            (tree.capacity(level), *x.shape[1:]), torch.nan if x.is_floating_point() else 1
        )
        full[: len(x)] = x
        return full

    memories = []
    for i, level in enumerate(("user", "vendor")):
        given = [r.memories[i] for r in requests]
        fields = {
            name: joined([getattr(m, name) for m in given], level)
            for name in ("k", "v", "bias", "lengths")
            if getattr(given[0], name) is not None
        }
        memories.append(ikbo.Memory(level, **fields))
    q = joined([r.q for r in requests], "item")
    grads = {name: joined([r.grads[name] for r in requests], "item") for name in ("o", "lse")}
    return Call(tree, "item", q, memories, grads=grads)


def part(found, requests, at):
    """What belongs to one of the requests."""
    start = {
        level: sum(r.tree.rows(level) for r in requests[:at])
        for level in ("user", "vendor", "item")
    }
    level_of = {"k0": "user", "v0": "user", "bias0": "user", "k1": "vendor", "v1": "vendor"}
    cut = {}
    for name, x in found.items():
        level = level_of.get(name.removeprefix("d"), "item")
        rows = requests[at].tree.rows(level)
        cut[name] = x[start[level] : start[level] + rows]
    return cut


@every_dtype
@pytest.mark.parametrize("n", [1, 17] if INTERPRETED else [1, 5, 64, 65])
def test_a_request_has_the_same_bits_in_any_batch(n, dtype, device):
    """Alone, first, last, in the middle, and under capacities (contract 4)."""
    options = {"n": n, "dtype": dtype}
    one = request(1, vendors=2, items=3 if INTERPRETED else 9, **options)
    many = 1 if INTERPRETED else 64
    rng = np.random.default_rng(n)
    others = [
        request(
            10 + 5 * i,
            vendors=int(rng.integers(0, 3)),
            items=int(rng.integers(0, 3 if INTERPRETED else 9)),
            **options,
        )
        for i in range(many)
    ]
    alone = results(moved(one, device), "triton")
    for at, capacity in ((many, 3),) if INTERPRETED else ((0, 0), (many // 2, 3), (many, 40)):
        batch = [*others[:at], one, *others[at:]]
        found = results(moved(together(batch, capacity), device), "triton")
        for name, x in part(found, batch, at).items():
            assert same(x, alone[name]), f"{name} at {at} under {capacity}"


@every_dtype
def test_programs_that_share_work_change_no_bits(monkeypatch, dtype, device):
    """Chunks of keys and pieces of long segments, by one program or by several."""
    items = 40 if INTERPRETED else 20_000
    tree = BroadcastTree.from_counts({"item": [items, 2]}, root="user")
    options = {"widths": (WIDTH, WIDTH), "dtype": dtype}
    m = memory(tree, "user", keys=KEYS, bias="key", **options)
    few = BroadcastTree.from_counts({"item": [3, 2]}, root="user")
    calls = [
        with_grads(Call(tree, "item", queries(tree, "item", 1, 2, WIDTH, dtype=dtype), [m])),
        with_grads(Call(few, "item", queries(few, "item", 1, 2, WIDTH, dtype=dtype), [m])),
    ]
    shared = [results(moved(call, device), "triton") for call in calls]
    monkeypatch.setattr(triton_kernel, "WORKSPACE", 0)
    monkeypatch.setattr(triton_backward, "WORKSPACE", 0)
    for call, found in zip(calls, shared, strict=True):
        for name, x in results(moved(call, device), "triton").items():
            assert same(x, found[name]), name
    if INTERPRETED:
        check(calls[0], device, found=shared[0])


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nan_stays_in_its_segment(form, device):
    """Tails are masked on both sides: a neighbour's NaN comes through none of them."""
    tree = BroadcastTree.from_counts({"item": [2, 3, 1]}, root="user")
    m = memory(tree, "user", form, keys=20, lengths=[20, 20, 3])
    call = moved(with_grads(Call(tree, "item", queries(tree, "item", 6), [m])), device)
    clean = results(call, "triton")
    keys = slice(20, 40) if form == "padded" else slice(23, 43)
    for name in ("k", "v", "o") if INTERPRETED else ("k", "v", "q", "o"):
        x = (
            call.q
            if name == "q"
            else call.grads["o"]
            if name == "o"
            else getattr(call.memories[0], name)
        )
        kept = x.clone()
        if name in ("q", "o"):
            x[2:5] = torch.nan
        else:
            (x.flatten(0, 1) if form == "padded" else x)[keys] = torch.inf
        spoiled = results(call, "triton")
        x.copy_(kept)
        for result, value in spoiled.items():
            expected = clean[result]
            if result in ("o", "lse", "dq"):
                away = torch.tensor([0, 1, 5], device=device)
                assert torch.equal(value[away], expected[away]), (name, result)
                continue
            value, expected = (
                y.flatten(0, 1) if form == "padded" else y for y in (value, expected)
            )
            outside = torch.ones(len(value), dtype=torch.bool, device=device)
            outside[keys] = False
            equal = (value == expected) | (value.isnan() & expected.isnan())
            assert equal[outside].all(), (name, result)


def test_any_strides(device):
    """Fused projections, transposed heads, gradients of stride 0 and of every other row."""
    tree = BroadcastTree.from_counts({"item": [2, 0, 3]}, root="user")
    kv = draw(3, 18, 2, 2, 8)
    plain = ikbo.Memory("user", kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous())
    q = draw(5, 3, 2, 8, seed=4)
    call = with_grads(Call(tree, "item", q, [plain]))
    call.grads["o"] = torch.ones(()).expand(5, 3, 2, 8)
    expected = check(call, device)
    there = moved(call, device)
    fused = kv.to(device)
    views = [
        (fused[:, :, 0], fused[:, :, 1]),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in fused.unbind(2)),
        tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in fused.unbind(2)),
    ]
    other_q = [
        there.q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([there.q, there.q], 1)[:, 0],
        torch.cat([there.q, there.q], 2)[:, :, :2],
    ]
    wide = there.grads["o"].contiguous()
    other_do = [
        there.grads["o"],
        torch.stack([wide, wide], 1)[:, 0],
        wide.transpose(1, 3).contiguous().transpose(1, 3),
    ]
    for (k, v), q, do in zip(views, other_q, other_do, strict=True):
        strided = replace(
            there, q=q.detach(), memories=[ikbo.Memory("user", k.detach(), v.detach())]
        )
        strided.grads = there.grads | {"o": do}
        for name, x in results(strided, "triton").items():
            assert torch.equal(x, expected[name]), name


def test_rows_far_apart(device):
    """Offsets past 2^31: rows of K, V and q a gigantic stride apart, in memory that has few."""
    if INTERPRETED:
        stride, dtype = 4096, torch.float32
    else:
        stride, dtype = 2**30 + 64, torch.float16
        if torch.cuda.mem_get_info()[0] < 24 * 2**30:
            pytest.skip("needs 24 GiB")
    tree = BroadcastTree.from_counts({"item": [1, 0, 2]}, root="user").to(device)
    buffer = torch.empty(3 * stride, dtype=dtype, device=device)

    def far(x):
        spread = buffer.as_strided(x.shape, (stride, *x.stride()[1:]))
        spread.copy_(x)
        return spread

    k, v = draw(2, 3, 18, 2, 16, dtype=dtype).to(device)
    q = draw(3, 2, 2, 16, dtype=dtype, seed=3).to(device)
    call = Call(tree, "item", q, [ikbo.Memory("user", k, v)])
    near = replace(call)
    near.grads = {"o": draw(3, 2, 2, 16, dtype=dtype, seed=5).to(device)}
    want = results(near, "triton")
    apart = replace(near, memories=[ikbo.Memory("user", far(k), v)])
    for name, x in results(apart, "triton").items():
        assert torch.equal(x, want[name]), name
    apart = replace(near, q=far(q))
    for name, x in results(apart, "triton").items():
        assert torch.equal(x, want[name]), name


def test_what_it_refuses(device):
    """An explicit choice that cannot be kept raises, with the reason."""
    tree = BroadcastTree.from_counts({"item": [2]}, root="user").to(device)
    k = torch.zeros(1, 3, 1, 300, device=device)
    with pytest.raises(ikbo.UnsupportedError, match="head dims must be 1 to 256; got 300"):
        ikbo.target_attention(
            torch.zeros(2, 1, 1, 300, device=device),
            {"user": (k, k)},
            tree=tree,
            level="item",
            impl="triton",
        )
    k = torch.zeros(1, 3, 1, 8, device=device, dtype=torch.float64)
    with pytest.raises(ikbo.UnsupportedError, match="float64"):
        ikbo.target_attention(
            torch.zeros(2, 1, 1, 8, device=device, dtype=torch.float64),
            {"user": (k, k)},
            tree=tree,
            level="item",
            impl="triton",
        )
