"""What the host makes of a call of `linear` for the Hopper kernel, run by an emulation of it."""

import itertools

import pytest
import torch
from gluon.emulator import box, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_naive import check, make

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.linear import gluon_sm90
from ikbo_tree.kernels.linear.gluon_config import BK, TILES, Tile, choose
from ikbo_tree.kernels.linear.gluon_kernel import stages_kernel
from ikbo_tree.kernels.linear.gluon_schedule import place, tile_count
from ikbo_tree.testing.poison import canary_rows, poisoned_memory
from ikbo_tree.testing.strategies import trees

OP = "linear"
LEVELS = 4


class Launch:
    """One launch: the kernel's arguments, tile after tile, counters and all.

    Partials lie in row order here; order inside a tile and barriers are the kernel's own.
    """

    def __init__(self):
        self.forms = []

    def __call__(self, kernel, grid, *args, FORM, num_warps):
        assert kernel is stages_kernel
        self.FORM = FORM
        self.forms.append(FORM)
        self.given = given = dict(zip(stages_kernel.arg_names, args, strict=False))
        rows = self.values("rows", LEVELS)
        counts = self.values("live", LEVELS)
        self.lives = [n if c is None else int(c) for n, c in zip(rows, counts, strict=True)]
        assert 1 <= grid[0] <= sum(tile_count(n, FORM.column_blocks) for n in rows)
        assert not given["work_ptr"].any()
        for number in itertools.count():
            level, row, column = place.fn(number, *self.lives, FORM.column_blocks)
            if level < 0:
                break
            for block in (row, row + 64):
                if block < self.lives[level]:
                    self.block(level, block, column)
        if FORM.result >= 0:
            first = -(-self.lives[FORM.result] // 64) * 64
            for block in range(first, rows[FORM.result], 64):
                for n in range(0, FORM.column_blocks * FORM.BN, 64):
                    self.put(block, n, torch.zeros(64, 64))
        given["work_ptr"].zero_()

    def values(self, name, n):
        return [self.given[f"{name}_{i}"] for i in range(n)]

    def block(self, level, row, column):
        FORM, given = self.FORM, self.given
        x, w = given[f"x_{level}"], given[f"w_{level}"]
        steps = given[f"steps_{level}"]
        assert steps >= 2
        n0, live = column * FORM.BN, self.lives[level]
        acc = torch.zeros(64, FORM.BN)
        for k in range(steps):
            left, right = box(x, [row, k * BK]), box(w, [n0, k * BK])
            if k == steps - 1:
                left, right = left[:, : FORM.k_tail], right[:, : FORM.k_tail]
            acc += left @ right.mT
        acc[live - row :] = torch.nan  # dead rows may hold anything
        if level == FORM.biased:
            N = given["units"] * FORM.unit
            assert given["bias_ptr"].shape[0] == -(-N // 8) * 8
            bias = given["bias_ptr"][n0 : n0 + FORM.BN].float()
            acc += torch.nn.functional.pad(bias, (0, FORM.BN - len(bias)))
        partial = given["partial_ptr"]
        mine = torch.arange(row, min(row + 64, live))
        for edge, (slot, turn, producer) in enumerate(FORM.edges):
            assert turn < FORM.join <= 3
            if slot == level:
                self.check_finished(producer)
                index = given[f"index_{edge}"]
                parents = mine if index is None else index[mine].long()
                acc[: len(mine)] += partial[
                    given[f"base_{edge}"] + parents, n0 : n0 + FORM.BN
                ].float()
        if level == FORM.result:
            self.put(row, n0, acc.nan_to_num(0.0) if live < row + 64 else acc)
        else:
            at = given[f"own_{level}"] + row
            partial[at : at + len(mine), n0 : n0 + FORM.BN] = acc[: len(mine)].to(partial.dtype)
            given["work_ptr"][2 + level, 0] += 1

    def check_finished(self, producer):
        """A level before this one, which the counter says is done; or an earlier launch's."""
        if producer >= 0:
            target = -(-self.lives[producer] // 64) * self.FORM.column_blocks
            assert self.given["work_ptr"][2 + producer, 0] == target

    def put(self, row, n, values):
        out = self.given["out"]
        if self.FORM.described:
            put(out, [row, n], values)
        else:
            N = self.given["units"] * self.FORM.unit
            part = out[row : row + len(values), n : min(N, n + values.shape[1])]
            part.copy_(values[: part.shape[0], : part.shape[1]])


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    launched = Launch()
    monkeypatch.setattr(gluon_sm90, "unsupported", lambda *args: None)
    monkeypatch.setattr(gluon_sm90, "launch", launched)
    monkeypatch.setattr(gluon_sm90, "prepare", prepare)
    return launched


def prepare(work, weights):
    work.zero_()
    copies = [w.new_empty((w.shape[0], -(-w.shape[1] // 8) * 8)) for w in weights]
    return [c[:, : w.shape[1]].copy_(w) for c, w in zip(copies, weights, strict=True)]


def held(call, **options):
    with poisoned_memory(), canary_rows():
        check(call, "gluon", wanted=[], **options)


@st.composite
def calls(draw):
    """Any tree; any names on one of its paths; the result at the finest of them or below."""
    tree = draw(trees(max_rows=200))
    leaf = draw(st.sampled_from(tree.levels))
    at = tree.structure.position[leaf]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return make(
        OP,
        tree,
        {name: draw(st.sampled_from([0, 1, 8, 17, 64, 70, 130])) for name in chosen},
        level=leaf if draw(st.booleans()) else None,
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        bias=draw(st.booleans()),
        N=draw(st.sampled_from([1, 8, 72, 130, 300])),
    )


@given(call=calls())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_tree(call):
    held(call)


@pytest.mark.parametrize("depth", [1, 4, 5, 9])
@pytest.mark.parametrize("N", [8, 9])
def test_depth(depth, N, emulated):
    counts, rows = {}, 70
    for level in range(1, depth):
        below = [(2, 0, 1)[i % 3] for i in range(rows)]
        counts[f"level{level}"], rows = below, sum(below)
    sizes = [70, *(sum(below) for below in counts.values())]
    names = ["level0", *counts]
    capacity = {n: size + 67 for n, size in zip(names, sizes, strict=True)}
    for options in ({}, {"capacity": capacity}):
        tree = BroadcastTree.from_counts(counts, root="level0", root_rows=70, **options)
        widths = {name: 20 + 30 * i for i, name in enumerate(tree.levels)}
        held(make(OP, tree, widths, dtype=torch.float16, N=N))
    assert len(emulated.forms) == 2 * -(-depth // LEVELS)
    assert all(form.described == (N == 8) for form in emulated.forms)


@pytest.mark.parametrize("tables", [1, 3, 4, 5, 8])
def test_tables_beside_two_levels(tables):
    tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    names = [f"table{i}" for i in range(tables)]
    for i, name in enumerate(names):
        tree = tree.with_table(name, of="item", index=[(i + row) % 3 for row in range(5)])
    widths = {"user": 4, **{name: 1 + i for i, name in enumerate(names)}, "item": 6}
    held(make(OP, tree, widths, dtype=torch.float16, N=16))


@pytest.mark.parametrize("levels", [1, 2, 6])
def test_the_bias_is_added_once_and_never_rounded_with_a_partial(levels, emulated):
    names = [f"level{i}" for i in range(levels)]
    counts = {name: [2, 1, 1] if i == 0 else [1] * 4 for i, name in enumerate(names[1:])}
    tree = BroadcastTree.from_counts(counts, root="level0", root_rows=3)
    call = make(OP, tree, dict.fromkeys(names, 0), dtype=torch.bfloat16, N=8)
    for partial_dtype in (None, torch.bfloat16):
        emulated.forms.clear()
        with poisoned_memory():
            out = call.run("gluon", partial_dtype=partial_dtype)
        assert torch.equal(out, call.bias.expand(out.shape)), "of nothing but the bias"
        adding = [(i, form.biased) for i, form in enumerate(emulated.forms) if form.biased >= 0]
        last = len(emulated.forms) - 1
        assert adding == [(0, 0) if partial_dtype is None else (last, emulated.forms[-1].result)]


def test_operands_of_any_strides():
    """Column views, transposed and misaligned storage, a stride of 0; odd K and odd N."""
    tree = BroadcastTree.from_counts({"vendor": [2, 1], "item": [1, 0, 2]}, root="user")
    call = make(OP, tree, {"user": 20, "vendor": 5, "item": 17}, dtype=torch.float16, N=9)
    user, vendor, item = (call.x[n] for n in ("user", "vendor", "item"))
    call.x["user"] = user.t().contiguous().t()
    call.x["vendor"] = vendor[:1].expand(vendor.shape)
    call.x["item"] = item.new_empty(item.numel() + 1)[1:].view_as(item).copy_(item)
    call.weight["user"] = call.weight["user"].t().contiguous().t()
    call.weight["item"] = torch.cat([call.weight["item"]] * 2, 1)[:, :17]
    call.bias = torch.stack([call.bias] * 2, 1)[:, 0]
    held(call)


def test_rows_on_aligned_addresses_are_not_copied(emulated):
    tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    call = make(OP, tree, {"user": 8, "item": 16}, dtype=torch.float16, N=8)
    wide = torch.cat([call.x["item"]] * 2, 1)
    call.x["item"] = wide[:, 16:]
    held(call)
    assert emulated.given["x_0"].base is call.x["user"]
    assert emulated.given["x_1"].base.data_ptr() == call.x["item"].data_ptr()
    assert emulated.given["w_1"].base.data_ptr() == call.weight["item"].data_ptr()


LIVES = [[1], [128], [129], [0, 0], [130, 7], [300, 0], [0, 3], [1, 400, 9], [2, 0, 0, 128]]


@pytest.mark.parametrize("lives", LIVES, ids=str)
@pytest.mark.parametrize("column_blocks", [1, 2, 3])
def test_every_tile_has_one_number(lives, column_blocks):
    padded = [*lives, *[0] * (LEVELS - len(lives))]
    count = sum(tile_count(n, column_blocks) for n in lives)
    found = [place.fn(n, *padded, column_blocks) for n in range(count)]
    assert found == [
        (level, row, column)
        for level, rows in enumerate(lives)
        for row in range(0, rows, 128)
        for column in range(column_blocks)
    ], "coarse levels first, column blocks of the same rows side by side"
    for beyond in (count, count + 1, count + 1000):
        assert place.fn(beyond, *padded, column_blocks)[0] == -1


def test_tiles_follow_the_width_alone():
    assert [choose(N, 4).BN for N in (1, 64, 72, 128, 136, 256, 384, 512, 1000)] == [
        64, 64, 128, 128, 256, 256, 128, 256, 256,
    ]  # fmt: skip
    assert choose(256, 2).prefetch == 2
    assert choose(256, 4).prefetch == 1, "whole float32 partials do not fit beside accumulators"
    for BN, tile in TILES.items():
        assert tile.BN == BN
    for wrong in ({"BN": 96, "stages": 4}, {"BN": 64, "stages": 3}):
        with pytest.raises(ValueError, match="must be"):
            Tile(**wrong)
