"""The kernels of add, mul, gate and film, in the interpreter and on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_trees import CONTRACTS, DTYPES, TREES

from ikbo_tree import BroadcastTree, implementation
from ikbo_tree.kernels.common.config import segment_tile
from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.modulate import triton_kernel
from ikbo_tree.kernels.modulate.op import modulate
from ikbo_tree.kernels.modulate.triton_gradients import TILE_BYTES_OF
from ikbo_tree.ops.elementwise import add, film, gate, mul
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees

OPS = ("add", "mul", "gate", "film")


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


def users(counts, device):
    return BroadcastTree.from_counts({"item": counts}, root="user").to(device)


@pytest.mark.parametrize("width", [64, pytest.param(433, marks=pytest.mark.gpu)])
def test_segments_of_boundary_lengths(width, device):
    """Short, cut and combined segments, at and beside every threshold, against float64."""
    tile = segment_tile(width, TILE_BYTES_OF)
    counts = [1, tile.short, tile.short + 1, 2, tile.piece, tile.piece + 1, 0, 2 * tile.piece + 5]
    tree, rng = users(counts, device), torch.Generator().manual_seed(0)
    x, grad = (torch.randn(sum(counts), width, generator=rng) for _ in range(2))
    scale, shift = (torch.randn(len(counts), width, generator=rng) for _ in range(2))
    leaves = [t.to(device).requires_grad_() for t in (x, scale, shift)]
    out = film(*leaves, tree=tree, level="item", of="user", impl="triton")
    found = torch.autograd.grad(out, leaves, grad.to(device))
    index = torch.repeat_interleave(torch.tensor(counts))
    wide = [t.double().requires_grad_() for t in (x, scale, shift)]
    exact = wide[0] * wide[1][index] + wide[2][index]
    theirs = torch.autograd.grad(exact, wide, grad.double())
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.cpu().double(), exact, rtol=2 * eps, atol=8 * eps)
    torch.testing.assert_close(found[0].cpu().double(), theirs[0], rtol=eps, atol=0)
    # Each addition is off by half an eps of what was added up by then, some sqrt(rows) large.
    additions = tile.piece // tile.rows + len(counts) + 16
    rows = torch.tensor(counts).unsqueeze(1)
    for got, want in zip(found[1:], theirs[1:], strict=True):
        assert ((got.cpu().double() - want).abs() <= eps * additions * 4 * rows.sqrt()).all()


def test_rows_have_the_same_bits_alone_and_in_a_batch(device):
    rng = torch.Generator().manual_seed(0)
    counts = [5, 0, 700, 2, 40]
    x = torch.randn(sum(counts), 24, generator=rng).half().to(device)
    y = torch.randn(len(counts), 24, generator=rng).half().to(device)
    begin = 0

    def run(x, y, counts):
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        out = film(x, y, y, tree=users(counts, device), level="item", of="user", impl="triton")
        return out, *torch.autograd.grad(out, [x, y], out.detach())

    whole = run(x, y, counts)
    for user, count in enumerate(counts):
        items = slice(begin, begin + count)
        alone = run(x[items], y[user : user + 1], [count])
        for got, want in zip(
            alone, (whole[0][items], whole[1][items], whole[2][[user]]), strict=True
        ):
            assert torch.equal(got, want)
        begin += count


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_each_subset_of_gradients(wanted, device):
    tree, rng = users([3, 0, 40], device), torch.Generator().manual_seed(0)
    values = [torch.randn(n, 6, generator=rng).to(device) for n in (43, 3, 3)]
    found = {}
    for impl in ("triton", "torch"):
        leaves = [v.clone().requires_grad_(k in wanted) for k, v in enumerate(values)]
        out = film(*leaves, tree=tree, level="item", of="user", impl=impl)
        found[impl] = torch.autograd.grad(out.square().sum(), [leaves[k] for k in wanted])
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-5, atol=1e-5)


def test_derivatives_of_any_order(device):
    tree = users([3, 0, 2], device)
    x = torch.randn(5, 2, device=device, requires_grad=True)
    y = torch.randn(3, 2, device=device, requires_grad=True)
    found = []
    for impl in ("triton", "torch"):
        out = mul({"user": y, "item": x}, tree=tree, impl=impl)
        dx, dy = torch.autograd.grad(out.pow(3).sum(), [x, y], create_graph=True)
        found.append(torch.autograd.grad(dx.sin().sum() + dy.square().sum(), [x, y]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_what_it_refuses(device):
    tree = users([2], device)
    x, y = (torch.ones(n, 3, dtype=torch.float64, device=device) for n in (2, 1))
    with pytest.raises(UnsupportedError, match="float32, float16 and bfloat16"):
        gate(x.double(), y, tree=tree, level="item", of="user", impl="triton")
    route = tree.route("item", "user")
    with pytest.raises(UnsupportedError, match='impl="gluon" cannot run modulate'):
        modulate(x, y, None, *route, x.dtype, "gluon")


@pytest.mark.gpu
def test_nothing_waits(monkeypatch):
    calls = []
    forward = triton_kernel.forward
    monkeypatch.setattr(triton_kernel, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    tree = users([3, 0, 40], "cuda")
    x = torch.randn(43, 64, device="cuda", requires_grad=True)
    y = torch.randn(3, 64, device="cuda", requires_grad=True)

    @implementation("triton")
    def run():
        at = {"tree": tree, "level": "item", "of": "user"}
        pair = {"user": y, "item": x}
        out = add(pair, tree=tree) + mul(pair, tree=tree) + gate(x, y, **at) + film(x, y, y, **at)
        torch.autograd.grad(out, [x, y], torch.ones_like(out))

    run()
    assert len(calls) == 4
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
