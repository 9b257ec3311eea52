"""`target_attention`: values and gradients against loops, for all it takes."""

import numpy as np
import pytest
import torch
from attention_naive import DTYPES, IMPLS, Call, check, draw, expected, memory, queries, with_grads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing import oracles
from ikbo_tree.testing.poison import poisoned_memory
from ikbo_tree.testing.strategies import trees

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def three_levels(**options):
    counts = {"vendor": [2, 1, 0, 3], "item": [3, 0, 2, 70, 1, 1]}
    return BroadcastTree.from_counts(counts, root="user", **options)


@st.composite
def calls(draw_):
    """Any tree and level; up to four memories of its ancestors, tables and itself."""
    tree = draw_(trees(max_rows=60))
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
            draw_(st.sampled_from(["whole", "padded", "packed"])),
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
    q = queries(tree, level, draw_(st.sampled_from([1, 2, 5])), heads[0], widths[0], dtype=dtype)
    scale = draw_(st.sampled_from([None, 0.7, -0.3]))
    return with_grads(Call(tree, level, q, memories, scale), lse=draw_(st.booleans()))


@every_impl
@given(call=calls())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_against_loops(impl, call):
    with poisoned_memory():
        check(call, impl)


@every_impl
@every_dtype
@pytest.mark.parametrize(
    ("n", "heads", "widths"),
    [(1, (2, 2), (24, 24)), (5, (2, 2), (96, 96)), (64, (2, 1), (8, 8)), (65, (4, 2), (8, 12))],
    ids=str,
)
def test_sizes(impl, dtype, n, heads, widths):
    tree = BroadcastTree.from_counts({"item": [3, 0, 5]}, root="user")
    options = {"heads": heads, "widths": widths, "dtype": dtype}
    memories = [
        memory(tree, "user", "padded", keys=20, lengths=[20, 4, 17], **options),
        memory(tree, "item", "packed", keys=3, seed=1, **options),
    ]
    q = queries(tree, "item", n, heads[0], widths[0], dtype=dtype)
    check(with_grads(Call(tree, "item", q, memories)), impl)


def test_agrees_with_the_shared_oracle():
    """Two oracles written apart from each other, `oracles` and `attention_naive`, say the same."""
    tree = three_levels()
    options = {"heads": (4, 2), "dtype": torch.float64}
    memories = [
        memory(tree, "user", "packed", bias="head", **options),
        memory(tree, "vendor", "padded", mask=True, seed=1, **options),
    ]
    call = Call(tree, "item", queries(tree, "item", 3, 4, dtype=torch.float64), memories)
    owned = [
        oracles.OracleMemory(
            m.level,
            *(
                None if x is None else x.numpy()
                for x in (m.k, m.v, m.lengths, m.offsets, m.bias, m.mask)
            ),
        )
        for m in memories
    ]
    o, lse = oracles.target_attention(tree, call.q.numpy(), owned, "item")
    exact, _ = expected(call)
    np.testing.assert_allclose(o, exact["o"], rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(lse, exact["lse"], rtol=1e-13)


@every_impl
def test_levels_in_any_order_and_mapping_form(impl):
    tree = three_levels()
    user, vendor = memory(tree, "user"), memory(tree, "vendor", seed=1)
    q = queries(tree, "item")
    pairs = {m.level: (m.k, m.v) for m in (vendor, user)}
    given = ikbo.target_attention(q, pairs, tree=tree, level="item", impl=impl)
    check_call = with_grads(Call(tree, "item", q, [user, vendor]), lse=False)
    check(check_call, impl)
    listed = ikbo.target_attention(q, [vendor, user], tree=tree, level="item", impl=impl)
    assert torch.equal(given, listed)


@every_impl
def test_unsorted_tree(impl):
    """[1, 0, 1, 0] and a table: rows are gathered in order and results put back."""
    parents = {"vendor": [1, 0, 1, 0], "item": [3, 3, 0, 2, 1, 0, 3]}
    tree = BroadcastTree.from_parents(parents, root="user", root_rows=2)
    tree = tree.with_table("brand", of="vendor", index=[2, 0, 2, 1])
    names = ("user", "vendor", "brand", "item")
    memories = [memory(tree, name, "padded", seed=i) for i, name in enumerate(names)]
    check(with_grads(Call(tree, "item", queries(tree, "item", 3), memories)), impl)


@pytest.mark.parametrize("counts", [[90], [170, 0, 1, 99], [40] * 5, list(range(1, 25))], ids=str)
@pytest.mark.parametrize("form", ["whole", "padded", "packed"])
def test_every_way_of_cutting(counts, form, monkeypatch):
    """Long segments in blocks, runs of equal ones, many small ones gathered by size."""
    from ikbo_tree.kernels.target_attention import engine, folded

    monkeypatch.setattr(engine, "CPU_ROWS", 1 << 9)
    monkeypatch.setattr(engine, "ROWS_SHARE", 10**9)
    monkeypatch.setattr(engine, "CPU_KEYS", 1 << 10)
    monkeypatch.setattr(folded, "ALONE", 1 << 8)
    monkeypatch.setattr(folded, "CALL_FLOPS", 1 << 10)
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    heads, widths = (2, 1), (4, 4)
    q = queries(tree, "item", 2, 2, 4)
    memories = [
        memory(tree, "user", form, keys=9, heads=heads, widths=widths),
        memory(tree, "user", form, keys=7, heads=heads, widths=widths, bias="head", seed=5),
    ]
    check(with_grads(Call(tree, "item", q, memories), lse=False))
    check(with_grads(Call(tree, "item", q, memories[:1]), lse=False))


def test_extra_memory_does_not_grow():
    """A flat call holds every row's copy of K and V; this one holds its results and little more."""
    from harness import cpu_peak_mb

    tree = BroadcastTree.from_counts({"item": [64] * 8}, root="user")
    q, k, v = draw(512, 1, 2, 64), draw(8, 256, 2, 64), draw(8, 256, 2, 64)
    index = tree.ancestors("item", of="user")

    def flat():
        copies = (x[index].transpose(1, 2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *copies)

    def ours():
        return ikbo.target_attention(q, {"user": (k, v)}, tree=tree, level="item")

    assert 16 * cpu_peak_mb(ours) < cpu_peak_mb(flat)
