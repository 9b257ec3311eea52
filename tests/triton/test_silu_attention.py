"""The kernels of silu_attention, in the interpreter and on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_trees import CONTRACTS, DTYPES, childless, shuffled, uneven

from ikbo_tree import BroadcastTree, Memory, implementation
from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.silu_attention import triton_kernel
from ikbo_tree.ops.silu_attention import silu_attention
from ikbo_tree.testing import check_op
from ikbo_tree.testing.strategies import trees


def small():
    return uneven(9)


def check(tree, dtype, seed, device):
    # The interpreter takes seconds for a check: there, those that calls differ in most.
    checks = ["values", "isolation", "dead_rows", "canaries"] if INTERPRETED else CONTRACTS
    check_op(
        "silu_attention", tree, impl="triton", dtype=dtype, seed=seed, device=device, checks=checks
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [small, shuffled, childless])
def test_contracts(make, dtype, device):
    for seed in range(1, 2 if INTERPRETED else 30):
        check(make(), dtype, seed, device)


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(tree=trees(max_rows=1000), seed=st.integers(0, 2**20))
def test_contracts_on_random_trees(tree, seed):
    check(tree, (torch.float16, torch.float32, torch.bfloat16)[seed % 3], seed, "cuda")


def users(counts, device):
    return BroadcastTree.from_counts({"item": counts}, root="user").to(device)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_each_subset_of_gradients(wanted, device):
    """Two query heads a key head, packed keys that fill no tile, a bias for each head, a mask."""
    tree, rng = users([3, 0, 20], device), torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 17, 20, 24], device=device)
    mask = (torch.rand(24, generator=rng) < 0.8).to(device)
    shapes = (23, 1, 4, 24), (24, 2, 24), (24, 2, 5), (24, 4)
    values = [torch.randn(shape, generator=rng).to(device) for shape in shapes]
    found = {}
    for impl in ("triton", "reference"):
        leaves = [v.clone().requires_grad_(k in wanted) for k, v in enumerate(values)]
        q, k, v, bias = leaves
        memory = Memory("user", k, v, offsets=offsets, mask=mask, bias=bias)
        out = silu_attention(q, [memory], tree=tree, level="item", impl=impl)
        found[impl] = (out, *torch.autograd.grad(out.square().sum(), [leaves[k] for k in wanted]))
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-4, atol=1e-4)


def test_rows_have_the_same_bits_alone_and_in_a_batch(device):
    rng, counts = torch.Generator().manual_seed(0), [5, 0, 40, 2]
    q = torch.randn(sum(counts), 1, 1, 16, generator=rng).half().to(device)
    k = torch.randn(len(counts), 20, 1, 16, generator=rng).half().to(device)

    def run(q, k, counts):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        memory = {"user": (leaves[1], leaves[1])}
        out = silu_attention(
            leaves[0], memory, tree=users(counts, device), level="item", impl="triton"
        )
        return out, *torch.autograd.grad(out, leaves, out.detach())

    whole, begin = run(q, k, counts), 0
    for at, count in enumerate(counts):
        rows = slice(begin, begin + count)
        alone = run(q[rows], k[at : at + 1], [count])
        for got, want in zip(alone, (whole[0][rows], whole[1][rows], whole[2][[at]]), strict=True):
            assert torch.equal(got, want)
        begin += count


def test_what_it_refuses(device):
    tree, at = users([2], device), {"level": "item", "impl": "triton"}
    for width, dtype, reason in (
        (300, torch.float32, "head dims must be 1 to 256; got 300 and 300"),
        (4, torch.float64, "float32, float16 and bfloat16"),
    ):
        q = torch.ones(2, 1, 1, width, dtype=dtype, device=device)
        k = torch.ones(1, 3, 1, width, dtype=dtype, device=device)
        with pytest.raises(UnsupportedError, match=reason):
            silu_attention(q, {"user": (k, k)}, tree=tree, **at)


@pytest.mark.gpu
def test_nothing_waits(monkeypatch):
    calls = []
    forward = triton_kernel.forward
    monkeypatch.setattr(triton_kernel, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    tree = users([3, 0, 40], "cuda")
    q = torch.randn(43, 1, 2, 64, device="cuda", requires_grad=True)
    k = torch.randn(3, 50, 2, 64, device="cuda", requires_grad=True)

    @implementation("triton")
    def run():
        out = silu_attention(q, {"user": (k, k)}, tree=tree, level="item")
        torch.autograd.grad(out, [q, k], torch.ones_like(out))

    run()
    assert calls == [1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
