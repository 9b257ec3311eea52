"""The attention kernels: values and gradients, for all that the ops take."""

import numpy as np
import pytest
import torch
from attention_device import check
from attention_naive import Call, draw, memory, queries, with_grads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.triton_lib import INTERPRETED
from ikbo_tree.testing.poison import canary_rows, poisoned_memory
from ikbo_tree.testing.strategies import trees

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))
FORMS = ("whole", "padded", "packed")


def cases(names, every, interpreted):
    """Parameters on a GPU, and the fewer ones for which the interpreter's slowness leaves time."""
    return pytest.mark.parametrize(names, interpreted if INTERPRETED else every, ids=str)


@st.composite
def calls(draw_):
    """Any tree and level; up to four memories of its ancestors, tables and itself."""
    tree = draw_(trees(max_rows=9 if INTERPRETED else 60))
    level = draw_(st.sampled_from(tree.levels))
    at = tree.structure.position[level]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    heads = draw_(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    widths = draw_(st.sampled_from([(8, 8), (1, 1), (5, 3), (24, 24)]))
    dtype = draw_(st.sampled_from(DTYPES))
    memories = [
        memory(
            tree,
            name,
            draw_(st.sampled_from(FORMS)),
            keys=draw_(st.sampled_from([0, 1, 4, 20])),
            heads=heads,
            widths=widths,
            bias=draw_(st.sampled_from([None, None, "key", "head"])),
            mask=draw_(st.booleans()),
            dtype=dtype,
            seed=10 * i,
        )
        for i, name in enumerate(draw_(st.lists(st.sampled_from(names), min_size=1, max_size=4)))
    ]
    n = draw_(st.sampled_from([1, 2, 5, 17]))
    q = queries(tree, level, n, heads[0], widths[0], dtype=dtype)
    scale = draw_(st.sampled_from([None, 0.7, -0.3]))
    return with_grads(Call(tree, level, q, memories, scale), lse=draw_(st.booleans()))


@given(call=calls())
@settings(
    max_examples=2 if INTERPRETED else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_tree_against_loops(call):
    device = torch.device("cpu" if INTERPRETED else "cuda")
    with poisoned_memory(), canary_rows():
        check(call, device)


def two_levels(counts=(3, 0, 5), **options):
    return BroadcastTree.from_counts({"item": list(counts)}, root="user", **options)


SIZES = [
    (1, (2, 2), (24, 24)),
    (5, (4, 2), (8, 12)),
    (17, (2, 1), (96, 80)),
    (64, (2, 2), (128, 128)),
    (65, (2, 1), (64, 64)),
    (32, (2, 2), (256, 256)),
    (1, (2, 2), (128, 128)),
    (1, (4, 1), (256, 24)),
]


@cases(
    ("n", "heads", "widths", "dtype"),
    [(*size, dtype) for size in SIZES for dtype in DTYPES],
    [(*SIZES[0], DTYPES[1]), (*SIZES[1], DTYPES[0]), (17, (2, 1), (24, 20), DTYPES[1])],
)
def test_sizes(n, heads, widths, dtype, device):
    """Keys of several blocks and a short last one, at two levels."""
    keys = 34 if INTERPRETED else 300
    options = {"heads": heads, "widths": widths, "dtype": dtype}
    tree = two_levels((2, 0, 3))
    memories = [
        memory(tree, "user", "padded", keys=keys, lengths=[keys, 4, 17], **options),
        memory(tree, "item", "packed", keys=3, seed=1, **options),
    ]
    q = queries(tree, "item", n, heads[0], widths[0], dtype=dtype)
    with poisoned_memory(), canary_rows():
        check(with_grads(Call(tree, "item", q, memories)), device)


@cases("n", [1, 16, 64], [16])
def test_levels_of_one_tree(n, device):
    """More memories than a launch takes, in no order; dead rows; bias and mask."""
    counts = {"vendor": [1, 0, 2], "item": [2, 1, 1]}
    spare = {"user": 4, "vendor": 5, "item": 6}
    tree = BroadcastTree.from_counts(counts, root="user", capacity=spare)
    names = ["vendor", "item", "user", "vendor", "user", "item"][-5 if INTERPRETED else 0 :]
    memories = [
        memory(
            tree,
            name,
            FORMS[i % 3],
            keys=18 if i % 2 else 3,
            bias=[None, "key", "head"][i % 3],
            mask=i == 1,
            seed=10 * i,
        )
        for i, name in enumerate(names)
    ]
    q = queries(tree, "item", n)
    with poisoned_memory(), canary_rows():
        found = check(with_grads(Call(tree, "item", q, memories)), device)
    for name in ("o", "lse", "dq"):
        assert (found[name][tree.rows("item") :] == 0).all()


@cases(
    ("n", "dtype"),
    [(n, dtype) for n in (1, 16, 64) for dtype in DTYPES],
    [(1, DTYPES[0]), (16, DTYPES[1])],
)
def test_rows_in_any_order(n, dtype, device):
    """Unsorted maps and a table: rows are gathered, launches merge."""
    parents = {"vendor": [1, 0, 1], "item": [2, 0, 1, 2]}
    tree = BroadcastTree.from_parents(parents, root="user", root_rows=3)
    tree = tree.with_table("brand", of="item", index=[1, 0, 1, 3], rows=4)
    options = {"keys": 18, "dtype": dtype}
    memories = [
        memory(tree, name, FORMS[i % 3], seed=10 * i, **options)
        for i, name in enumerate(["brand", "user", "vendor"])
    ]
    q = queries(tree, "item", n, dtype=dtype)
    check(with_grads(Call(tree, "item", q, memories)), device)


def test_where_one_key_has_all_weight(device):
    """dS nearly vanishes and a rounded output would show: delta must be exact."""
    tree = two_levels((5,))
    options = {"widths": (16, 16), "dtype": torch.float16}
    m = memory(tree, "user", keys=5, **options)
    q = queries(tree, "item", 3, width=16, dtype=torch.float16)
    m.k[0, 0] = q[0, 0]
    for scale in (0.6,) if INTERPRETED else (0.2, 0.6, 1.5):
        check(with_grads(Call(tree, "item", q, [m], scale)), device)


LENGTHS = [
    ([0, 1, 0, 1], [0, 3, 0, 5]),
    ([0, 2, 0], [5, 7, 3]),
    ([2, 1], [0, 0]),
    ([0, 0], [3, 1]),
    ([], []),
    ([1, 0, 5, 4, 0], [2, 0, 33, 1, 2]),
]


@cases(
    ("n", "counts", "lengths", "form"),
    [(n, *entry, form) for n in (2, 16) for entry in LENGTHS for form in ("padded", "packed")],
    [(2 + 14 * (i % 2), *e, ("padded", "packed")[i % 3 % 2]) for i, e in enumerate(LENGTHS)],
)
def test_empty_segments(n, counts, lengths, form, device):
    tree = two_levels(counts)
    given = np.asarray(lengths, np.int64)
    m = memory(tree, "user", form, keys=max(lengths, default=2), lengths=given)
    with poisoned_memory():
        found = check(with_grads(Call(tree, "item", queries(tree, "item", n), [m])), device)
    if form == "padded":
        for row, count in enumerate(counts):
            if count == 0:
                assert (found["dk0"][row] == 0).all()
                assert (found["dv0"][row] == 0).all()


WANTED = ("q", "k0", "v0", "bias0", "k0 v0", "q v1", "bias1 k0")


@cases(
    ("wanted", "dtype"),
    [(wanted, dtype) for wanted in WANTED for dtype in DTYPES],
    [(wanted, DTYPES[i % 2]) for i, wanted in enumerate(WANTED[:4])],
)
def test_only_the_gradients_asked_for(wanted, dtype, device):
    tree = two_levels((2, 1))
    memories = [
        memory(tree, "user", keys=18, bias="head", dtype=dtype),
        memory(tree, "item", "packed", keys=5, bias="key", seed=9, dtype=dtype),
    ]
    call = with_grads(Call(tree, "item", queries(tree, "item", 2, dtype=dtype), memories))
    check(call, device, wanted=wanted.split())


@cases(
    ("form", "causal", "dtype"),
    [(f, c, dtype) for f in ("padded", "packed") for c in (False, True) for dtype in DTYPES],
    [("padded", True, DTYPES[1]), ("packed", False, DTYPES[0])],
)
def test_self_attention_beside_it(form, causal, dtype, device):
    keys = 34 if INTERPRETED else 300
    tree = two_levels((2, 0, 1), capacity={"user": 4, "item": 5})
    options = {"heads": (2, 1), "widths": (24, 8), "dtype": dtype}
    m = memory(tree, "user", form, keys=keys, lengths=[keys, 3, 1], **options)
    q = queries(tree, "item", 3, 2, 24, dtype=dtype)
    own = draw(*m.k.shape[:-2], 2, 24, dtype=dtype, seed=7)
    own[m.k[..., :1, :1].isnan().expand(own.shape)] = torch.nan
    call = with_grads(Call(tree, "item", q, [m], q_self=own, causal=causal))
    with poisoned_memory(), canary_rows():
        check(call, device)


def test_self_attention_of_a_table(device):
    """Its own queries lie one an entry, whatever order the rows below it are in."""
    tree = two_levels((2, 1)).with_table("brand", of="item", index=[2, 0, 2], rows=4)
    m = memory(tree, "brand", keys=3)
    call = Call(tree, "item", queries(tree, "item", 2), [m], q_self=draw(4, 3, 2, 8, seed=3))
    check(with_grads(call), device)


@pytest.mark.parametrize("before", [17, 64] if INTERPRETED else [17, 300, 1000])
def test_entries_ahead_of_a_packed_memory(before, device):
    """Keys that begin beyond a tile: tiles with numbers below theirs are nobody's."""
    tree = two_levels((2, 0, 1), capacity={"user": 4, "item": 5})
    m = memory(tree, "user", "packed", keys=20, lengths=[20, 3, 1], before=before)
    q = queries(tree, "item", 3)
    own = draw(*m.k.shape[:-2], 2, 8, seed=7)
    own[m.k[..., :1, :1].isnan().expand(own.shape)] = torch.nan
    with poisoned_memory(), canary_rows():
        check(with_grads(Call(tree, "item", q, [m])), device)
        check(with_grads(Call(tree, "item", q, [m], q_self=own, causal=True)), device)
