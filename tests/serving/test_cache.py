"""`CoarseCache`: every slot holds what its row asked for, whatever came before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import TreeError
from ikbo_tree.serving import CoarseCache

ROWS = st.lists(
    st.none() | st.tuples(st.integers(0, 6) | st.sampled_from("ab"), st.integers(0, 2)), max_size=6
)
STEPS = st.one_of(
    ROWS,
    st.integers(0, 6).map(lambda key: ("invalidate", key)),
    st.just(("clear", None)),
    ROWS.map(lambda rows: ("fails", rows)),
)


@settings(deadline=None)
@given(st.integers(0, 5), st.lists(STEPS, max_size=25))
def test_slots_hold_what_their_rows_asked_for(slots, steps):
    """Against a list of what was written where; failing batches write rubbish."""
    cache, written = CoarseCache(slots * 8 + 7, row_bytes=8), {}
    for step in steps:
        if isinstance(step, tuple) and step[0] == "invalidate":
            had = step[1] in cache
            assert cache.invalidate(step[1]) == had
            assert step[1] not in cache
            continue
        if isinstance(step, tuple) and step[0] == "clear":
            cache.clear()
            assert len(cache) == 0
            continue
        fails, rows = (True, step[1]) if isinstance(step, tuple) else (False, step)
        placed = cache.place(rows)
        assert placed.fresh == sorted(set(placed.fresh))
        assert len(set(placed.slots)) == len(rows)  # no two rows share memory
        assert all(0 < slot <= slots + len(rows) for slot in placed.slots)
        for at in placed.fresh:
            written[placed.slots[at]] = "rubbish" if fails else rows[at] or at
        if fails:
            cache.forget(rows, placed)
        else:
            assert [written[slot] for slot in placed.slots] == [
                row or at for at, row in enumerate(rows)
            ]
        counts = placed.lookups
        assert counts.hits == len(rows) - len(placed.fresh)
        assert counts.hits + counts.misses + counts.unversioned == len(rows)
        assert cache.nbytes == 8 * len(cache) <= slots * 8


def fill(cache, *rows):
    placed = cache.place(rows)
    return [rows[at] for at in placed.fresh]


def test_least_recently_used_goes_first():
    cache = CoarseCache(3, 1)
    fill(cache, ("a", 1), ("b", 1), ("c", 1))
    assert fill(cache, ("a", 1)) == []
    placed = cache.place([("d", 1)])  # b is the oldest
    assert placed.lookups.evicted == 1
    assert [key in cache for key in "abcd"] == [True, False, True, True]
    fill(cache, ("b", 1))
    assert [key in cache for key in "abcd"] == [True, True, False, True]


def test_another_version_is_a_miss_and_takes_the_place():
    cache = CoarseCache(2, 1)
    fill(cache, ("a", 1), ("b", 1))
    placed = cache.place([("a", 2)])
    assert (placed.fresh, placed.lookups.misses, placed.lookups.evicted) == ([0], 1, 0)
    assert fill(cache, ("a", 2), ("b", 1)) == []
    assert fill(cache, ("a", 1)) == [("a", 1)]  # going back is another version, too
    assert len(cache) == 2


@pytest.mark.parametrize("other", ["1", b"1", 2])
def test_versions_of_other_types_differ(other):
    cache = CoarseCache(2, 1)
    fill(cache, ("a", 1))
    assert fill(cache, ("a", other)) == [("a", other)]
    fill(cache, (1, 1))
    assert "1" not in cache


def test_rows_of_one_batch_do_not_push_out_one_another():
    cache = CoarseCache(2, 1)
    fill(cache, ("a", 1), ("b", 1))
    placed = cache.place([("b", 1), ("c", 1), ("d", 1), ("a", 1)])
    assert placed.fresh == [1, 2]
    assert min(placed.slots[1:3]) > 2  # beside the cache
    assert fill(cache, ("a", 1), ("b", 1)) == []
    # A key whose version is old makes room for itself, not for others.
    placed = cache.place([("a", 2), ("c", 1)])
    assert fill(cache, ("a", 2)) == []
    assert len(cache) == 2


def test_a_key_that_comes_twice_is_kept_once():
    """Two rows with equal keys are two rows of a table only if their inputs differ."""
    cache = CoarseCache(4, 1)
    placed = cache.place([("a", 1), ("a", 1), ("a", 2)])
    assert placed.fresh == [0, 1, 2]
    assert (placed.lookups.misses, placed.lookups.unversioned) == (1, 2)
    assert fill(cache, ("a", 1)) == []


def test_no_budget_keeps_nothing():
    cache = CoarseCache(7, 8)
    assert cache.slots == 0
    for _ in range(2):
        assert fill(cache, ("a", 1), ("b", 1)) == [("a", 1), ("b", 1)]
    assert cache.nbytes == 0


@pytest.mark.parametrize(("max_bytes", "row_bytes"), [(-1, 8), (8, 0)])
def test_budgets_are_checked(max_bytes, row_bytes):
    with pytest.raises(TreeError, match="must"):
        CoarseCache(max_bytes, row_bytes)
