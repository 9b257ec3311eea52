"""What the host makes of a call for the Hopper kernel, run by an emulation of its launches."""

import pytest
import torch
from gluon.emulator import Launch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_naive import check, make

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.linear_compression import gluon_sm90
from ikbo_tree.testing.poison import canary_rows, poisoned_memory
from ikbo_tree.testing.strategies import trees

OP = "linear_compression"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(gluon_sm90, "unsupported", lambda *args: None)
    emulated = Launch()
    monkeypatch.setattr(
        gluon_sm90, "launch", lambda _, grid, *args, **options: emulated[grid](*args, **options)
    )
    monkeypatch.setattr(gluon_sm90, "prepare", prepare)


def prepare(work, weights):
    work.zero_()
    copies = [w.new_empty((w.shape[0], -(-w.shape[1] // 8) * 8)) for w in weights]
    return [c[:, : w.shape[1]].copy_(w) for c, w in zip(copies, weights, strict=True)]


def held(call):
    with poisoned_memory(), canary_rows():
        check(call, "gluon", wanted=[])


@st.composite
def calls(draw):
    """Any tree; any names on one of its paths; the result at the finest of them or below."""
    tree = draw(trees(max_rows=20))
    leaf = draw(st.sampled_from(tree.levels))
    at = tree.structure.position[leaf]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return make(
        OP,
        tree,
        {name: draw(st.sampled_from([0, 1, 17, 70, 130])) for name in chosen},
        level=leaf if draw(st.booleans()) else None,
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        M=draw(st.sampled_from([1, 18, 65, 150])),
        N=draw(st.sampled_from([8, 72])),
    )


@given(call=calls())
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_tree(call):
    held(call)


@pytest.mark.parametrize("depth", [1, 4, 5, 9])
def test_depth(depth):
    counts, rows = {}, 3
    for level in range(1, depth):
        below = [0 if i == 1 else 2 - i % 2 for i in range(rows)]
        counts[f"level{level}"], rows = below, sum(below)
    sizes = [3, *(sum(below) for below in counts.values())]
    names = ["level0", *counts]
    capacity = {n: size + 2 for n, size in zip(names, sizes, strict=True)}
    for options in ({}, {"capacity": capacity}):
        tree = BroadcastTree.from_counts(counts, root="level0", root_rows=3, **options)
        widths = {name: 20 + 30 * i for i, name in enumerate(tree.levels)}
        held(make(OP, tree, widths, dtype=torch.float16, M=70, N=72))


@pytest.mark.parametrize("tables", [1, 3, 4, 5, 8])
def test_tables_beside_two_levels(tables):
    tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    names = [f"table{i}" for i in range(tables)]
    for i, name in enumerate(names):
        tree = tree.with_table(name, of="item", index=[(i + row) % 3 for row in range(5)])
    widths = {"user": 4, **{name: 1 + i for i, name in enumerate(names)}, "item": 6}
    held(make(OP, tree, widths, dtype=torch.float16, M=70, N=16))


def test_operands_of_any_strides():
    """Column views, transposed and misaligned storage, a stride of 0."""
    tree = BroadcastTree.from_counts({"vendor": [2, 1], "item": [1, 0, 2]}, root="user")
    call = make(OP, tree, {"user": 20, "vendor": 5, "item": 17}, dtype=torch.float16, M=9, N=24)
    user, vendor, item = (call.x[n] for n in ("user", "vendor", "item"))
    call.x["user"] = user.transpose(0, -1).contiguous().transpose(0, -1)
    call.x["vendor"] = vendor[:1].expand(vendor.shape)
    call.x["item"] = item.new_empty(item.numel() + 1)[1:].view_as(item).copy_(item)
    call.weight["user"] = call.weight["user"].t().contiguous().t()
    call.weight["item"] = torch.cat([call.weight["item"]] * 2, 1)[:, :17]
    held(call)
