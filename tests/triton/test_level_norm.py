"""The kernels of layer_norm and rms_norm, in the interpreter and on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_trees import CONTRACTS, DTYPES, TREES

from ikbo_tree import BroadcastTree, implementation
from ikbo_tree.kernels.common.config import segment_tile
from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.level_norm import triton_kernel
from ikbo_tree.kernels.level_norm.config import LIMIT
from ikbo_tree.kernels.level_norm.op import level_norm
from ikbo_tree.ops.norms import layer_norm, rms_norm
from ikbo_tree.testing import check_op
from ikbo_tree.testing.cases_composed import flat_norm
from ikbo_tree.testing.strategies import trees

OPS = ("layer_norm", "rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", TREES)
@pytest.mark.parametrize("op", OPS)
def test_contracts(op, make, dtype, device):
    tree = make()
    for seed in range(3 if INTERPRETED else 20):
        check_op(op, tree, impl="triton", dtype=dtype, seed=seed, device=device, checks=CONTRACTS)


@settings(max_examples=4 if INTERPRETED else 40, deadline=None, derandomize=INTERPRETED)
@given(tree=trees(max_rows=30 if INTERPRETED else 3000), seed=st.integers(0, 2**20))
@pytest.mark.parametrize("op", OPS)
def test_contracts_on_random_trees(op, tree, seed):
    device = "cpu" if INTERPRETED else "cuda"
    dtype = (torch.float16, torch.float32, torch.bfloat16)[seed % (2 if INTERPRETED else 3)]
    check_op(op, tree, impl="triton", dtype=dtype, seed=seed, device=device, checks=CONTRACTS)


def users(counts, device, **options):
    return BroadcastTree.from_counts({"item": counts}, root="user", **options).to(device)


def both(x, weight, bias, tree, impl="triton"):
    """Results of both norms, side by side."""
    layer = layer_norm(x, weight, bias, tree=tree, impl=impl)
    return torch.cat([layer, rms_norm(x, weight, tree=tree, impl=impl)], dim=1)


def test_segments_of_boundary_lengths(device):
    """Short, cut and combined segments, at and beside every threshold, against float64."""
    width, own = 64, 3
    tile = segment_tile(width, 4)
    counts = [1, tile.short, tile.short + 1, 2, tile.piece, tile.piece + 1, 0, 2 * tile.piece + 5]
    rng, items = torch.Generator().manual_seed(0), sum(counts)
    shapes = [(len(counts), width), (items, own), (width + own,), (width + own,)]
    values = [torch.randn(shape, generator=rng) for shape in shapes]
    grad = torch.randn(items, 2 * (width + own), generator=rng)
    leaves = [v.to(device).requires_grad_() for v in values]
    x = {"user": leaves[0], "item": leaves[1]}
    out = both(x, *leaves[2:], users(counts, device))
    found = torch.autograd.grad(out, leaves, grad.to(device))
    wide = [v.double().requires_grad_() for v in values]
    whole = torch.cat([wide[0][torch.repeat_interleave(torch.tensor(counts))], wide[1]], dim=1)
    norms = [
        flat_norm("layer_norm", whole, *wide[2:], 1e-5),
        flat_norm("rms_norm", whole, wide[2], None, 1e-6),
    ]
    exact = torch.cat(norms, dim=1)
    theirs = torch.autograd.grad(exact, wide, grad.double())
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.cpu().double(), exact, rtol=16 * eps, atol=16 * eps)
    torch.testing.assert_close(found[1].cpu().double(), theirs[1], rtol=64 * eps, atol=64 * eps)
    # Each addition is off by half an eps of what was added up by then, some sqrt(rows) large.
    additions = tile.piece // tile.rows + len(counts) + 64
    rows = torch.tensor(counts).unsqueeze(1)
    assert ((found[0].cpu().double() - theirs[0]).abs() <= 8 * eps * additions * rows.sqrt()).all()
    for got, want in zip(found[2:], theirs[2:], strict=True):
        assert ((got.cpu().double() - want).abs() <= 8 * eps * additions * items**0.5).all()


def test_rows_have_the_same_bits_alone_and_in_a_batch(device):
    rng, counts = torch.Generator().manual_seed(0), [5, 0, 700, 2, 40]
    items = sum(counts)
    user = torch.randn(len(counts), 24, generator=rng).half().to(device)
    item = torch.randn(items, 40, generator=rng).half().to(device)
    weight, bias = (torch.randn(64, generator=rng).half().to(device) for _ in range(2))
    grad = torch.randn(items, 128, generator=rng).half().to(device)

    def run(user, item, counts, grad):
        leaves = [user.clone().requires_grad_(), item.clone().requires_grad_()]
        x = {"user": leaves[0], "item": leaves[1]}
        out = both(x, weight, bias, users(counts, device))
        return out, *torch.autograd.grad(out, leaves, grad)

    whole, begin = run(user, item, counts, grad), 0
    for at, count in enumerate(counts):
        rows = slice(begin, begin + count)
        alone = run(user[at : at + 1], item[rows], [count], grad[rows])
        for got, want in zip(alone, (whole[0][rows], whole[1][[at]], whole[2][rows]), strict=True):
            assert torch.equal(got, want)
        begin += count


@pytest.mark.parametrize("offset", [1000.0, 4000.0])
def test_a_mean_far_larger_than_the_deviation(offset, device):
    rng, counts = torch.Generator().manual_seed(0), [3, 0, 40]
    user, item = (
        offset + torch.randint(-128, 128, shape, generator=rng) / 64 for shape in ((3, 60), (43, 5))
    )
    grad = torch.randn(43, 65, generator=rng)
    leaves = [x.to(device).requires_grad_() for x in (user, item)]
    out = layer_norm(
        dict(zip(("user", "item"), leaves, strict=True)), tree=users(counts, device), impl="triton"
    )
    found = torch.autograd.grad(out, leaves, grad.to(device))
    wide = [x.double().requires_grad_() for x in (user, item)]
    whole = torch.cat([wide[0][torch.repeat_interleave(torch.tensor(counts))], wide[1]], dim=1)
    exact = flat_norm("layer_norm", whole, None, None, 1e-5)
    theirs = torch.autograd.grad(exact, wide, grad.double())
    # One rounding of the mean, 2^-24 of it, and 4 for luck; a sum of 40 rows has more of them.
    allowed = 4 * offset * 2.0**-24
    assert (out.cpu() - exact).abs().max() < allowed
    for got, want in zip(found, theirs, strict=True):
        assert (got.cpu() - want).abs().max() < 16 * allowed


def test_dead_rows_and_no_eps(device):
    """1 / sqrt(0) at rows that do not count must not reach the weight's gradient."""
    tree = users([2, 1], device, capacity={"user": 4, "item": 6})
    weight = torch.ones(3, device=device, requires_grad=True)
    x = {"user": torch.randn(4, 1, device=device), "item": torch.randn(6, 2, device=device)}
    for op in (layer_norm, rms_norm):
        out = op(x, weight, tree=tree, eps=0.0, impl="triton")
        assert (out[3:] == 0).all()
        (dw,) = torch.autograd.grad(out.square().sum(), weight)
        assert dw.isfinite().all()


def test_columns_of_wider_tensors_and_a_gradient_of_one_number(device):
    tree, rng = users([3, 0, 40], device), torch.Generator().manual_seed(0)
    wide = [torch.randn(n, 30, generator=rng).to(device) for n in (3, 43)]
    found = []
    for impl in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in wide]
        x = {"user": leaves[0][:, 3:20], "item": leaves[1][:, 1:6]}
        out = both(x, None, None, tree, impl)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_it_refuses(device):
    tree = users([2], device)
    x = {"user": torch.ones(1, 3, device=device), "item": torch.ones(2, LIMIT, device=device)}
    with pytest.raises(UnsupportedError, match="a row has 8196 columns"):
        layer_norm(x, tree=tree, impl="triton")
    x = {name: torch.ones(n, 3, dtype=torch.float64, device=device) for name, n in
         (("user", 1), ("item", 2))}  # fmt: skip
    with pytest.raises(UnsupportedError, match="float32, float16 and bfloat16"):
        rms_norm(x, tree=tree, impl="triton")
    with pytest.raises(UnsupportedError, match='impl="gluon" cannot run level_norm'):
        rms_norm(x, tree=tree, impl="gluon")


def test_a_second_derivative_raises(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    out = layer_norm({"item": x}, tree=users([2, 1], device), impl="triton")
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no derivative of its own"):
        dx.sum().backward()


@pytest.mark.gpu
def test_nothing_waits(monkeypatch):
    calls = []
    forward = triton_kernel.forward
    monkeypatch.setattr(triton_kernel, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    tree = users([3, 0, 40], "cuda")
    x = {"user": torch.randn(3, 64, device="cuda", requires_grad=True)}
    x["item"] = torch.randn(43, 64, device="cuda", requires_grad=True)
    weight = torch.ones(128, device="cuda", requires_grad=True)

    @implementation("triton")
    def run():
        out = both(x, weight, weight, tree, "auto")
        torch.autograd.grad(out, [*x.values(), weight], torch.ones_like(out))

    run()
    assert len(calls) == 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_graph_captured_at_capacity_serves_smaller_trees():
    """The live counts and maps are read on the device; dead rows hold NaN."""
    capacity = {"user": 8, "item": 300}
    full = users([37] * 8, "cuda", capacity=capacity)
    static = [t.clone() for t in full.route("item", "user") if t is not None]
    names = [k for k, t in enumerate(full.route("item", "user")) if t is not None]
    route = Route(*(static[names.index(k)] if k in names else None for k in range(5)))
    x = [torch.randn(n, 48, device="cuda", requires_grad=True) for n in (8, 300)]
    weight = torch.randn(96, device="cuda", requires_grad=True)
    grad = torch.randn(300, 96, device="cuda")

    def step(x, route):
        maps = ([route[k], None] for k in range(3))
        out = level_norm(x, weight, None, *maps, route.live_fine, 1e-5, True, "triton")
        return out, *torch.autograd.grad(out, [*x, weight], grad)

    step(x, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(x, route)
    for counts in ([37] * 8, [3, 0, 200, 1], [1], [0, 0], []):
        smaller = users(counts, "cuda", capacity=capacity).route("item", "user")
        for mine, at in zip(static, names, strict=True):
            mine.copy_(smaller[at])
        with torch.no_grad():
            for part, live in zip(x, (len(counts), sum(counts)), strict=True):
                part.normal_()
                part[live:] = float("nan")
            grad.normal_()
            grad[sum(counts) :] = float("nan")
            for result in found:
                result.fill_(float("nan"))
        graph.replay()
        again = step([part.detach().clone().requires_grad_() for part in x], smaller)
        for got, want in zip(found, again, strict=True):
            assert torch.equal(got, want)
            assert not got.isnan().any()
