"""The matrix kernels of `linear` and `linear_compression`: strides, isolation, batch invariance."""

import numpy as np
import pytest
import torch
from linear_device import check, moved, three_levels
from linear_naive import OPS, make, results

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.testing import check_op


def same_bits(a, b):
    """On a GPU; the interpreter multiplies by BLAS, whose bits depend on where in a tile a row is.

    Some processors' do, others' do not. Then rows are still those of the same request.
    """
    if torch.equal(a, b):
        return True
    return INTERPRETED and torch.allclose(
        a, b, rtol=1e-5 if a.dtype == torch.float32 else 2e-3, atol=1e-5
    )


DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_op
@every_dtype
def test_strided_arguments(op, dtype, device):
    """Column views, transposed weights and gradients of stride 0 are no special case."""
    tree = three_levels(capacity={"user": 3, "vendor": 4, "item": 9})
    call = make(op, tree, {"user": 20, "vendor": 3, "item": 17}, dtype=dtype, M=9, N=20)
    plain = results(moved(call, device), "triton")
    strided = moved(call, device)
    strided.x = {n: torch.cat([t, t], 1)[:, : t.shape[1]] for n, t in strided.x.items()}
    user = strided.x["user"].transpose(0, -1).contiguous()
    strided.x["user"] = user.transpose(0, -1)
    strided.weight = {n: t.t().contiguous().t() for n, t in strided.weight.items()}
    if strided.bias is not None:
        strided.bias = torch.stack([strided.bias] * 2, 1)[:, 0]
    strided.grad = strided.grad.t().contiguous().t() if op == "linear" else strided.grad
    strided.grad = torch.cat([strided.grad, strided.grad], 1)[:, : call.grad.shape[1]]
    for name, value in results(strided, "triton").items():
        torch.testing.assert_close(value, plain[name])
    ones = torch.ones((), dtype=dtype)
    call.grad = ones.expand(call.grad.shape)
    check(call, device)


@every_op
def test_nan_and_infinity_stay_in_their_request(op, device):
    """Dead columns of tiles are zero on both sides, and rows never meet."""
    call = moved(make(op, three_levels(), {"user": 2, "vendor": 3, "item": 20}), device)
    clean = results(call, "triton")
    for name, row, fault in (("user", 0, np.nan), ("vendor", 1, np.inf), ("item", 2, -np.inf)):
        call.x[name][row] = fault
    call.grad[1] = torch.nan  # user 0, vendor 0
    spoiled = results(call, "triton")
    for name, first in (("out", 3), ("x[item]", 3), ("x[user]", 1), ("x[vendor]", 1)):
        assert torch.equal(spoiled[name][first:], clean[name][first:]), name


@every_op
@every_dtype
def test_a_request_has_the_same_bits_in_any_batch(op, dtype, device):
    """Alone, first, last, in the middle, and under a capacity (contract 4)."""
    rng = np.random.default_rng(3)
    many = 4 if INTERPRETED else 65

    def tree_of(requests, **options):
        vendors = [c for c, _ in requests]
        items = [i for _, below in requests for i in below]
        return BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user", **options)

    def request():
        below = [int(i) for i in rng.integers(0, 4, rng.integers(0, 4))]
        return len(below), below

    one = (3, [2, 0, 3])
    widths = {"user": 8, "vendor": 8, "item": 17}
    alone = make(op, tree_of([one]), widths, dtype=dtype, M=8, N=8, seed=1)
    expected = results(moved(alone, device), "triton")
    others = [request() for _ in range(many - 1)]
    for at in (0, many // 2, many - 1):
        batch = [*others[:at], one, *others[at:]]
        before, between = tree_of(others[:at]) if at else None, tree_of(batch)
        capacity = {n: between.rows(n) + 5 for n in between.levels}
        for tree in (between, tree_of(batch, capacity=capacity)):
            call = make(op, tree, widths, dtype=dtype, M=8, N=8, seed=2)
            call.weight, call.bias = alone.weight, alone.bias
            rows = {}
            for name in tree.levels:
                first = before.rows(name) if before is not None else 0
                rows[name] = slice(first, first + alone.tree.rows(name))
                call.x[name][rows[name]] = alone.x[name]
            call.grad[rows["item"]] = alone.grad
            found = results(moved(call, device), "triton")
            assert same_bits(found["out"][rows["item"]], expected["out"])
            for name in tree.levels:
                got = found[f"x[{name}]"][rows[name]]
                assert same_bits(got, expected[f"x[{name}]"]), (name, at)


@every_op
@every_dtype
@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 8))
def test_every_contract(op, dtype, seed, device):
    """On an unsorted tree with a table, and on one with dead rows and a childless user."""
    shuffled = BroadcastTree.from_parents(
        {"vendor": [1, 0, 1], "item": [2, 0, 1, 2, 0]}, root="user", root_rows=2
    ).with_table("brand", of="item", index=[1, 0, 1, 1, 0])
    spare = BroadcastTree.from_counts(
        {"item": [0, 2]}, root="user", capacity={"user": 3, "item": 5}
    )
    for tree in (shuffled, spare):
        check_op(op, tree, impl="triton", dtype=dtype, seed=seed, device=device)
