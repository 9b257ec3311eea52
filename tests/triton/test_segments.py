import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_trees import CONTRACTS, DTYPES, TREES

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.config import segment_tile
from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.common.triton_segments import segment_sum
from ikbo_tree.ops.segments import broadcast, reduce, segment_softmax
from ikbo_tree.testing.check import check_op
from ikbo_tree.testing.strategies import trees

OPS = ("broadcast", "reduce", "segment_softmax")


def gpu_only(*values):
    """Test parameters that take too long in the interpreter, or are wrong there."""
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values]


REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", TREES)
@pytest.mark.parametrize("op", OPS)
def test_contracts(op, make, dtype, device):
    tree = make()
    for seed in range(1 if INTERPRETED else 12):
        check_op(op, tree, impl="triton", dtype=dtype, seed=seed, device=device, checks=CONTRACTS)


@settings(max_examples=4 if INTERPRETED else 40, deadline=None, derandomize=INTERPRETED)
@given(tree=trees(max_rows=30 if INTERPRETED else 3000), seed=st.integers(0, 2**20))
@pytest.mark.parametrize("op", OPS)
def test_contracts_on_random_trees(op, tree, seed):
    device = "cpu" if INTERPRETED else "cuda"
    dtype = (torch.float16, torch.float32, torch.bfloat16)[seed % (2 if INTERPRETED else 3)]
    check_op(op, tree, impl="triton", dtype=dtype, seed=seed, device=device, checks=CONTRACTS)


def naive(x, counts, op):
    """Float64 rows of segments in row order, by a loop; and each row's softmax."""
    x = x.double().numpy()
    ends = np.cumsum(counts)
    out = []
    for end, count in zip(ends, counts, strict=True):
        part = x[end - count : end]
        if op == "softmax":
            e = np.exp(part - part.max(0)) if count else part
            out.extend(e / e.sum(0))
        elif op == "sum" or count == 0:
            out.append(part.sum(0))
        elif op == "logsumexp":
            out.append(np.log(np.exp(part - part.max(0)).sum(0)) + part.max(0))
        else:
            out.append(getattr(part, op)(0))
    return torch.from_numpy(np.array(out))


def boundary_counts(width, itemsize):
    """Short, cut, and combined segments, at and beside every threshold."""
    tile = segment_tile(width, itemsize)
    return [1, tile.short, tile.short + 1, 2, tile.piece, tile.piece + 1, 3, 2 * tile.piece + 5]


@pytest.mark.parametrize("width", [64, *gpu_only(1, 433)])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_segments_of_boundary_lengths(op, width, device):
    counts = boundary_counts(width, 4)
    tree = BroadcastTree.from_counts({"item": counts}, root="user").to(device)
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(1))
    y = reduce(x.to(device), tree=tree, level="item", to="user", op=op, impl="triton").cpu()
    # A sum in float32 is off by up to eps times the sum of absolutes for every addition in a row:
    # lanes add one row in `step_rows`, then are added in a tree.
    tile = segment_tile(width, 4)
    additions = tile.piece // tile.rows + np.log2(tile.step_rows) + len(counts)
    scale = naive(x.abs(), counts, "sum" if op == "sum" else "max")
    bound = torch.finfo(torch.float32).eps * (additions + 4) * scale
    assert ((y - naive(x, counts, op)).abs() <= bound).all()


@pytest.mark.parametrize("width", [64, *gpu_only(1)])
def test_softmax_of_boundary_lengths(width, device):
    counts = boundary_counts(width, 4)
    tree = BroadcastTree.from_counts({"item": counts}, root="user").to(device)
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(1))
    p = segment_softmax(x.to(device), tree=tree, level="item", of="user", impl="triton").cpu()
    want = naive(x, counts, "softmax")
    # exp is off by 2 ulp and by its argument's rounding, up to 16 here; the sum by additions.
    assert ((p - want).abs() <= 64 * torch.finfo(torch.float32).eps * want).all()


def gradients(op, x, tree, g, impl):
    x = x.detach().requires_grad_()
    if op == "softmax":
        y = segment_softmax(x, tree=tree, level="item", of="user", impl=impl)
    else:
        y = reduce(x, tree=tree, level="item", to="user", op=op, impl=impl)
    return torch.autograd.grad(y, x, g.to(y))[0]


@pytest.mark.parametrize("op", [*REDUCTIONS, "softmax"])
def test_gradients_of_long_segments(op, device):
    """Against the float64 reference; max and min with ties in every column."""
    counts = boundary_counts(64, 4)[:6]
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), 64, generator=generator)
    if op in ("max", "min"):
        x = x.round()
    rows = sum(counts) if op == "softmax" else len(counts)
    g = torch.randn(rows, 64, generator=generator)
    got = gradients(op, x.to(device), tree.to(device), g.to(device), "triton").cpu()
    want = gradients(op, x.double(), tree, g, "reference")
    scale = want.abs().amax(0).clamp(min=g.abs().max() / max(counts))
    assert ((got - want).abs() <= 64 * torch.finfo(torch.float32).eps * scale).all()


def request(counts, before, after, spare, x, filler):
    """A request's rows among others' rows, as a tree's tensor."""
    tree = BroadcastTree.from_counts(
        {"item": [*before, *counts, *after]},
        root="user",
        capacity={
            "user": len(before) + len(counts) + len(after) + spare,
            "item": sum(before) + sum(counts) + sum(after) + spare,
        },
    )
    lead = filler[: sum(before)]
    tail = filler[sum(before) : sum(before) + sum(after)]
    dead = torch.full((spare, x.shape[1]), float("nan"), dtype=x.dtype)
    return tree, torch.cat((lead, x, tail, dead))


@pytest.mark.parametrize("width", [64, *gpu_only(3)])
@pytest.mark.parametrize("op", ["sum", "softmax", *gpu_only("mean", "max", "min", "logsumexp")])
def test_bits_do_not_depend_on_the_batch(op, width, device):
    tile = segment_tile(width, 2)
    counts = [5, tile.short + 3, 0, tile.piece + 7]
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16
    x = torch.randn(sum(counts), width, generator=generator).to(dtype)
    filler = torch.randn(3 * tile.short + 100, width, generator=generator).to(dtype)
    g = torch.randn(sum(counts) if op == "softmax" else len(counts), width, generator=generator)
    others = [3, 0, tile.short + 2, 1]
    places = [((), (), 0), ((), others, 0), (others, (), 5), (others, [1] * 9, 70), ((), (), 130)]
    seen = []
    for before, after, spare in places:
        tree, rows = request(counts, before, after, spare, x, filler)
        rows, tree = rows.to(device).requires_grad_(), tree.to(device)
        if op == "softmax":
            y = segment_softmax(rows, tree=tree, level="item", of="user", impl="triton")
            start, size = sum(before), sum(counts)
        else:
            y = reduce(rows, tree=tree, level="item", to="user", op=op, impl="triton")
            start, size = len(before), len(counts)
        upstream = torch.zeros_like(y)
        upstream[start : start + size] = g.to(y)
        dx = torch.autograd.grad(y, rows, upstream)[0]
        bits = y.detach()[start : start + size], dx[sum(before) : sum(before) + sum(counts)]
        seen.append([part.cpu().view(torch.int16) for part in bits])
    for forward, backward in seen[1:]:
        assert torch.equal(forward, seen[0][0])
        assert torch.equal(backward, seen[0][1])


def test_one_long_segment_beside_many_of_one_row(device):
    long, many = (3000, 70) if INTERPRETED else (100_000, 1000)
    counts = [1] * (many // 2) + [long] + [1] * (many // 2)
    tree = BroadcastTree.from_counts({"item": counts}, root="user").to(device)
    x = torch.randn(sum(counts), 8, dtype=torch.float64).round()
    y = segment_sum(x.float().to(device), tree.route("item", "user"))
    # Of small integers: exact in any order.
    want = torch.stack([part.sum(0) for part in x.split(counts)])
    assert torch.equal(y.cpu().double(), want)


def test_a_gradient_of_ones_is_counted_in_float32(device):
    rows = 2500 if INTERPRETED else 4096
    tree = BroadcastTree.from_counts({"item": [rows]}, root="user").to(device)
    x = torch.ones(1, 4, dtype=torch.float16, device=device, requires_grad=True)
    y = broadcast(x, tree=tree, level="user", to="item", impl="triton")
    assert (torch.autograd.grad(y.sum(), x)[0] == rows).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.int64])
def test_broadcast_of_other_dtypes(dtype, device):
    tree = BroadcastTree.from_counts({"item": [2, 0, 3]}, root="user").to(device)
    x = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=dtype, device=device)
    y = broadcast(x, tree=tree, level="user", to="item", impl="triton")
    assert y.tolist() == x[[0, 0, 2, 2, 2]].tolist()


def test_float64_is_refused_when_asked_for_by_name(device):
    tree = BroadcastTree.from_counts({"item": [2]}, root="user").to(device)
    x = torch.ones(2, 1, dtype=torch.float64, device=device)
    with pytest.raises(UnsupportedError, match="float64"):
        reduce(x, tree=tree, level="item", to="user", impl="triton")
    assert reduce(x, tree=tree, level="item", to="user").item() == 2
