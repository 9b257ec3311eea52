"""The matrix kernels of `linear` and `linear_compression`: values and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_device import check, moved, three_levels
from linear_naive import OPS, exact, flat, make, results

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.gemm_forms import Tile
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.kernels.common.triton_pieces import split
from ikbo_tree.kernels.common.triton_products import chunk_rows
from ikbo_tree.testing.budget import assert_within_budget
from ikbo_tree.testing.poison import canary_rows, poisoned_memory
from ikbo_tree.testing.strategies import trees

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@st.composite
def calls(draw):
    """Any tree; any names on one of its paths; the result at the finest of them or below."""
    tree = draw(trees(max_rows=12 if INTERPRETED else 60))
    leaf = draw(st.sampled_from(tree.levels))
    at = tree.structure.position[leaf]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return make(
        draw(st.sampled_from(OPS)),
        tree,
        {name: draw(st.sampled_from([0, 1, 8, 17])) for name in chosen},
        level=leaf if draw(st.booleans()) else None,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=draw(st.booleans()),
        M=draw(st.sampled_from([1, 18])),
        N=draw(st.sampled_from([1, 24])),
    )


@given(call=calls())
@settings(
    max_examples=8 if INTERPRETED else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_tree_against_loops(call):
    device = torch.device("cpu" if INTERPRETED else "cuda")
    with poisoned_memory(), canary_rows():
        check(call, device)


@every_op
@every_dtype
def test_three_levels(op, dtype, device):
    """Several tiles each way, short last ones, every form of operand; NaN in dead rows."""
    capacity = None if dtype == torch.float32 else {"user": 5, "vendor": 4, "item": 40}
    tree = three_levels(capacity=capacity)
    call = make(op, tree, {"user": 37, "vendor": 16, "item": 33}, dtype=dtype, M=41, N=40)
    with poisoned_memory(), canary_rows():
        found = check(call, device)
    for name in ("out", "x[user]", "x[item]"):
        level = name[2:-1] if name != "out" else "item"
        assert (found[name][tree.rows(level) :] == 0).all()


@every_op
@pytest.mark.parametrize(
    "counts",
    [
        {"item": [0, 1, 0, 1]},
        {"item": []},
        {"vendor": [1, 0, 5, 0], "item": [0, 0, 2, 0, 1, 0]},
        {"vendor": [0, 0], "item": []},
    ],
    ids=str,
)
def test_empty_segments_and_levels(op, counts, device):
    first = next(iter(counts))
    tree = BroadcastTree.from_counts(counts, root="user", root_rows=len(counts[first]))
    widths = {"user": 3, **dict.fromkeys(counts, 2)}
    with poisoned_memory():
        check(make(op, tree, widths, dtype=torch.float16), device)


@every_op
def test_four_tables_beside_two_levels(op, device):
    """All of them join at one stage: more than a kernel adds at a time."""
    tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    for name, index in (
        ("a", [0, 2, 1, 0, 2]),
        ("b", [1, 1, 0, 0, 1]),
        ("c", [0] * 5),
        ("d", [1] * 5),
    ):
        tree = tree.with_table(name, of="item", index=index)
    call = make(
        op, tree, {"user": 4, "a": 5, "b": 3, "c": 2, "d": 1, "item": 6}, dtype=torch.float16
    )
    check(call, device)


@every_op
def test_a_long_segment_in_sixteen_bits(op, device):
    """A sum over a segment beyond float16's range is no infinity on its way to a gradient."""
    rows = 70
    tree = BroadcastTree.from_counts({"item": [rows, 1]}, root="user")
    call = make(op, tree, {"user": 2, "item": 1}, dtype=torch.float16, M=1, N=1, bias=False)
    for tensor in call.inputs.values():
        tensor.fill_(2**-8)
    call.grad.fill_(1024)
    found = check(call, device)
    assert found["x[user]"][0].flatten()[0].item() == 1024 * rows / 2**8


@every_op
def test_gradients_asked_for_alone(op, device):
    call = moved(make(op, three_levels(), {"user": 2, "item": 3}), device)
    everything = results(call, "triton")
    names = list(call.inputs)
    for wanted in (names[:1], names[1:2], names[2:3], names[-1:]):
        for name, value in results(call, "triton", wanted).items():
            if name == "bias":  # summed at whatever level is summed anyway
                torch.testing.assert_close(value, everything[name])
            else:
                assert torch.equal(value, everything[name])


@every_op
def test_rounded_partials(op, device):
    tree = three_levels()
    call = make(op, tree, {"user": 20, "vendor": 16, "item": 8}, M=8, N=16)
    right = exact(call)["out"]
    near = flat(call)["out"]
    kept = moved(call, device).run("triton").cpu()
    rounded = moved(call, device).run("triton", partial_dtype=torch.float16).cpu()
    assert_within_budget(kept, right, near)
    error = np.abs(rounded.double().numpy() - right).max()
    assert np.abs(kept.double().numpy() - right).max() < error / 10
    # Two partials are rounded, each no larger than 6 times the largest sum.
    assert error < 2 * torch.finfo(torch.float16).eps / 2 * 6 * np.abs(right).max()


def test_two_pieces_have_sixteen_bits(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5000, generator=generator) * 10 ** torch.randint(-30, 38, (5000,))
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -1e-45])
    x = torch.cat([special, wide]).to(device)
    high, low = split(x).float()
    assert torch.equal(low[1:5], torch.zeros(4, device=device))
    assert torch.equal(high[[1, 2]], x[[1, 2]])
    assert high[3].isnan()
    normal = x[6:].abs() > 1e-30
    error = (high.double() + low.double() - x.double()).abs()[6:][normal]
    assert (error <= 2.0**-16 * x[6:].abs()[normal]).all()
    half = torch.randn(1000, generator=generator).half().to(device)
    assert torch.equal(split(half).float().sum(0), half.float())


@pytest.mark.parametrize("rows", [1, 15, 64, 1000, 1024, 100_000])
@pytest.mark.parametrize("tiles", [1, 16, 28, 400])
@pytest.mark.parametrize("step", [1, 64])
def test_chunks_cover_all_rows(rows, tiles, step):
    chunk = chunk_rows(rows, tiles, 132, step)
    assert chunk % step == 0 or chunk >= rows
    assert -(-rows // chunk) * tiles <= max(4 * 132, tiles)


def test_tiles_fit_small_products():
    tile = Tile(BM=128, BN=256, BK=64, warps=8, stages=4, parts=4, short=True)
    small = tile.fitted(20, 30)
    assert (small.BM, small.BN, small.warps, small.parts) == (32, 32, 4, 1)
    assert tile.fitted(433, 256) == tile
    assert (tile.last_rows(433), tile.last_rows(512), tile.last_rows(500)) == (64, 128, 128)
    with pytest.raises(ValueError, match="power of two"):
        Tile(BM=96, BN=64, BK=16, warps=4, stages=1)


def test_what_it_refuses(device):
    tree = three_levels().to(device)
    x = {"item": torch.zeros(5, 2, dtype=torch.float64, device=device)}
    weight = {"item": torch.zeros(3, 2, dtype=torch.float64, device=device)}
    with pytest.raises(ikbo.UnsupportedError, match="float32, float16 and bfloat16"):
        ikbo.linear(x, weight, tree=tree, impl="triton")
