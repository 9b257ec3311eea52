"""`linear` on Hopper: values and gradients, isolation, batch invariance."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_device import moved, three_levels
from linear_naive import check, exact, flat, make, results

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing import check_op
from ikbo_tree.testing.budget import assert_within_budget
from ikbo_tree.testing.poison import canary_rows, poisoned_memory
from ikbo_tree.testing.strategies import trees

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

OP = "linear"
DTYPES = (torch.float16, torch.bfloat16)
PARTIALS = (None, torch.float16, torch.bfloat16)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def held(call, **options):
    """Result and gradients on the device against their budgets."""
    with poisoned_memory(), canary_rows():
        return check(call, "gluon", device="cuda", **options)


def chain(depth, rows=70, **options):
    """A tree of so many levels of about as many rows, with childless rows at each."""
    counts, above = {}, rows
    for level in range(1, depth):
        below = [(2, 0, 1)[i % 3] for i in range(above)]
        counts[f"level{level}"], above = below, sum(below)
    return BroadcastTree.from_counts(counts, root="level0", root_rows=rows, **options)


@st.composite
def calls(draw):
    """Any tree; any names on one of its paths; the result at the finest of them or below."""
    tree = draw(trees(max_rows=300))
    leaf = draw(st.sampled_from(tree.levels))
    at = tree.structure.position[leaf]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return make(
        OP,
        tree,
        {name: draw(st.sampled_from([0, 1, 8, 17, 64, 130])) for name in chosen},
        level=leaf if draw(st.booleans()) else None,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=draw(st.booleans()),
        N=draw(st.sampled_from([1, 8, 24, 70])),
    )


@given(call=calls())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_against_loops(call):
    held(call)


@every_dtype
@pytest.mark.parametrize(
    ("widths", "N"),
    [
        ({"user": 1178, "item": 866}, 433),
        ({"user": 20, "item": 511}, 466),
        ({"user": 512, "item": 512}, 512),
        ({"user": 1, "item": 65}, 1),
        ({"user": 128, "item": 64}, 64),
        ({"user": 65, "item": 1}, 520),
        ({"user": 300, "item": 200}, 128),
    ],
    ids=str,
)
def test_awkward_sizes(dtype, widths, N):
    tree = BroadcastTree.from_counts({"item": [3, 1, 0, 9, 150]}, root="user")
    held(make(OP, tree, widths, dtype=dtype, N=N))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("spare", [None, 67])
@pytest.mark.parametrize("N", [72, 256, 259])
def test_depth(depth, spare, N):
    """NaN in dead rows, zeros in those of the result; trees deeper than one launch."""
    plain = chain(depth)
    capacity = None if spare is None else {n: plain.rows(n) + spare for n in plain.levels}
    tree = chain(depth, capacity=capacity)
    widths = {name: 20 + 30 * i for i, name in enumerate(tree.levels)}
    call = make(OP, tree, widths, dtype=torch.float16, N=N)
    held(call)
    out = moved(call, "cuda").run("gluon")
    assert (out[tree.rows(tree.levels[-1]) :] == 0).all()


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
def test_empty_segments_and_levels(counts):
    first = next(iter(counts))
    tree = BroadcastTree.from_counts(counts, root="user", root_rows=len(counts[first]))
    held(make(OP, tree, {"user": 3, **dict.fromkeys(counts, 2)}, dtype=torch.float16, N=8))


@pytest.mark.parametrize("partial_dtype", PARTIALS, ids=str)
def test_five_tables_beside_two_levels(partial_dtype):
    """All of them join at one stage: more than a level adds, and more than a launch takes."""
    tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    for i, name in enumerate("abcde"):
        index = [(i + row) % 3 for row in range(5)]
        tree = tree.with_table(name, of="item", index=index)
    widths = {"user": 4, "a": 5, "b": 3, "c": 2, "d": 1, "e": 70, "item": 6}
    call = make(OP, tree, widths, dtype=torch.float16, N=264)
    if partial_dtype is None:
        held(call)
    else:
        rounded(call, partial_dtype, partials=8)


@every_dtype
@pytest.mark.parametrize("N", [24, 9])
def test_strided_arguments(dtype, N):
    """Column views, transposed weights, misaligned storage: copied where they must be."""
    tree = three_levels(capacity={"user": 3, "vendor": 4, "item": 9})
    call = make(OP, tree, {"user": 20, "vendor": 3, "item": 17}, dtype=dtype, N=N)
    plain = results(moved(call, "cuda"), "gluon")
    strided = moved(call, "cuda")
    strided.x = {n: torch.cat([t, t], 1)[:, : t.shape[1]] for n, t in strided.x.items()}
    strided.x["user"] = strided.x["user"].t().contiguous().t()
    item = strided.x["item"]
    shifted = item.new_empty(item.numel() + 1)[1:].view_as(item)
    strided.x["item"] = shifted.copy_(item)
    strided.weight = {n: t.t().contiguous().t() for n, t in strided.weight.items()}
    strided.bias = torch.stack([strided.bias] * 2, 1)[:, 0]
    for name, value in results(strided, "gluon").items():
        if name == "out":
            assert torch.equal(value, plain[name])
        else:
            torch.testing.assert_close(value, plain[name])


def rounded(call, partial_dtype, *, partials):
    """Within one rounding more for each partial that is handed on."""
    right = exact(call)["out"]
    got = moved(call, "cuda").run("gluon", partial_dtype=partial_dtype).double().cpu().numpy()
    unit = torch.finfo(partial_dtype).eps / 2
    own = torch.finfo(call.grad.dtype).eps / 2
    # No partial is larger than 6 times the largest sum.
    assert np.abs(got - right).max() < (partials * 6 * unit + 2 * own) * np.abs(right).max()


@pytest.mark.parametrize("partial_dtype", PARTIALS[1:], ids=str)
def test_rounded_partials(partial_dtype):
    tree = three_levels()
    call = make(OP, tree, {"user": 20, "vendor": 160, "item": 8}, N=512, dtype=torch.float16)
    kept = moved(call, "cuda").run("gluon").cpu()
    assert_within_budget(kept, exact(call)["out"], flat(call)["out"])
    rounded(call, partial_dtype, partials=2)


@pytest.mark.parametrize("N", [72, 265])
def test_nan_and_infinity_stay_in_their_request(N):
    """Rows of a tile never meet, whichever request they belong to."""
    widths = {"user": 2, "vendor": 70, "item": 20}
    call = moved(make(OP, three_levels(), widths, dtype=torch.float16, N=N), "cuda")
    clean = results(call, "gluon")
    for name, row, fault in (("user", 0, np.nan), ("vendor", 1, np.inf), ("item", 2, -np.inf)):
        call.x[name][row] = fault
    call.grad[1] = torch.nan  # user 0, vendor 0
    spoiled = results(call, "gluon")
    for name, first in (("out", 3), ("x[item]", 3), ("x[user]", 1), ("x[vendor]", 1)):
        assert torch.equal(spoiled[name][first:], clean[name][first:]), name


@every_dtype
@pytest.mark.parametrize("partial_dtype", PARTIALS, ids=str)
@pytest.mark.parametrize("N", [8, 9, 256, 512], ids=str)
def test_a_request_has_the_same_bits_in_any_batch(dtype, partial_dtype, N):
    """Alone, first, last, in the middle, under a capacity, whichever levels are done in time."""
    rng = np.random.default_rng(3)
    many = 65

    def tree_of(requests, **options):
        vendors = [c for c, _ in requests]
        items = [i for _, below in requests for i in below]
        return BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user", **options)

    def request():
        below = [int(i) for i in rng.integers(0, 9, rng.integers(0, 4))]
        return len(below), below

    one = (3, [2, 0, 3])
    widths = {"user": 80, "vendor": 8, "item": 17}
    alone = make(OP, tree_of([one]), widths, dtype=dtype, N=N, seed=1)
    expected = moved(alone, "cuda").run("gluon", partial_dtype=partial_dtype)
    others = [request() for _ in range(many - 1)]
    for at in (0, many // 2, many - 1):
        batch = [*others[:at], one, *others[at:]]
        before, between = tree_of(others[:at]) if at else None, tree_of(batch)
        capacity = {n: between.rows(n) + 5 for n in between.levels}
        for tree in (between, tree_of(batch, capacity=capacity)):
            call = make(OP, tree, widths, dtype=dtype, N=N, seed=2)
            call.weight, call.bias = alone.weight, alone.bias
            for name in tree.levels:
                first = before.rows(name) if before is not None else 0
                rows = slice(first, first + alone.tree.rows(name))
                call.x[name][rows] = alone.x[name]
            found = moved(call, "cuda").run("gluon", partial_dtype=partial_dtype)
            assert torch.equal(found[rows], expected), at


@every_dtype
def test_every_contract(dtype):
    """On an unsorted tree with a table, and on one with dead rows and a childless user."""
    shuffled = BroadcastTree.from_parents(
        {"vendor": [1, 0, 1], "item": [2, 0, 1, 2, 0]}, root="user", root_rows=2
    ).with_table("brand", of="item", index=[1, 0, 1, 1, 0])
    spare = BroadcastTree.from_counts(
        {"item": [0, 2]}, root="user", capacity={"user": 3, "item": 5}
    )
    for tree in (shuffled, spare):
        for seed in range(6):
            check_op(OP, tree, impl="gluon", dtype=dtype, seed=seed, device="cuda")


def test_what_it_refuses(device):
    tree = three_levels().to(device)

    def run(dtype):
        x = {"item": torch.zeros(5, 2, dtype=dtype, device=device)}
        weight = {"item": torch.zeros(3, 2, dtype=dtype, device=device)}
        return ikbo.linear(x, weight, tree=tree, impl="gluon")

    assert not run(torch.float16).any()
    with pytest.raises(ikbo.UnsupportedError, match="float16 and bfloat16"):
        run(torch.float32)
