"""Whole models on trees that hypothesis draws: with empty and childless rows, with a capacity."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.sizes import TINY
from models.zoo import ZOO

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing.strategies import counts

pytestmark = pytest.mark.slow


def deep(entry):
    return any(level == "vendor" for level in [*entry.levels.values(), *entry.compact.values()])


@st.composite
def trees(draw, deep):
    """A tree with at least one item and one without capacity; how many rows are spare."""
    users = draw(st.integers(1, 5))
    below, rows = {}, users
    for level in ("vendor", "item") if deep else ("item",):
        own = draw(counts(rows, 60))
        if not sum(own):
            own[draw(st.integers(0, rows - 1))] = draw(st.integers(1, 3))
        below[level], rows = own, sum(own)
    levels = {"user": users, **{level: sum(own) for level, own in below.items()}}
    spare = {level: draw(st.integers(0, 4)) for level in levels}
    capacity = {level: n + spare[level] for level, n in levels.items()}
    return tuple(
        BroadcastTree.from_counts(below, root="user", capacity=c) for c in (None, capacity)
    )


@functools.cache
def rewritten(name, padded):
    entry = ZOO[name]
    model = entry.build(TINY[name]).double()
    below = {"vendor": [2, 0, 3], "item": [4, 0, 3, 1, 9]} if deep(entry) else {"item": [4, 0, 13]}
    tree = BroadcastTree.from_counts(below, root="user")
    capacity = {"user": 4, "item": 20} if padded else None
    return model, ikbo.rewrite(
        model,
        entry.inputs(TINY[name], tree, 0, dtype=torch.float64),
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=BroadcastTree.from_counts(below, root="user", capacity=capacity),
        profit=False,
        check_seconds=0,
    )[0]


def with_spare(x, rows):
    filling = torch.nan if x.is_floating_point() else x.dtype == torch.bool or 10**6
    return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), filling)])


@pytest.mark.parametrize("padded", [False, True], ids=["as_they_are", "with_capacity"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_same_scores(name, padded):
    entry = ZOO[name]
    model, fast = rewritten(name, padded)

    @given(trees(deep(entry)), st.integers(0, 9))
    def check(pair, seed):
        alone, whole = pair
        tree = whole if padded else alone
        own = entry.compact_inputs(TINY[name], alone, seed, torch.float64)
        given = {
            n: with_spare(x, tree.capacity(entry.takes[n].level))
            for n, x in own.items()
            if entry.takes[n].kind not in ("map", "counts")
        }
        with torch.inference_mode():
            found = fast(**given, tree=tree)
            expected = model(**entry.expand(own, alone))
        live = alone.rows("item")
        torch.testing.assert_close(found[:live], expected, rtol=1e-9, atol=1e-9)
        assert not found[live:].any()

    check()
