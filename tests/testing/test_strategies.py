"""Trees of all kinds are drawn, shrink to the smallest, and print as Python that builds them."""

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree
from ikbo_tree.testing import tree_code, with_capacity
from ikbo_tree.testing.strategies import LEVELS, counts, trees

PLAIN = settings(database=None, derandomize=True, deadline=None)


def built(code):
    return eval(code, {"BroadcastTree": BroadcastTree})


@given(trees())
def test_code_builds_the_same_tree(tree):
    assert built(tree_code(tree)) == tree


@given(trees(capacity=False), st.integers(0, 3))
def test_capacity_changes_no_row(tree, extra):
    padded = with_capacity(tree, dict.fromkeys((*tree.levels, *tree.tables), extra))
    for name in (*tree.levels, *tree.tables):
        assert padded.rows(name) == tree.rows(name)
        assert padded.capacity(name) == tree.rows(name) + extra
    for level in tree.levels[1:]:
        rows = tree.rows(level)
        assert padded.parents(level)[:rows].tolist() == tree.parents(level).tolist()


@given(
    trees(max_depth=2, branching=False, unsorted=False, tables=False, capacity=False, max_rows=50)
)
def test_limits_are_kept(tree):
    assert tree.levels in (LEVELS[:1], LEVELS[:2])
    assert tree.is_sorted
    assert not tree.tables
    assert tree.live("user") is None
    assert max(map(tree.rows, tree.levels)) <= 50


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), counts(n, 100))))
def test_counts_fit_their_rows_and_budget(drawn):
    rows, given_counts = drawn
    assert len(given_counts) == rows
    assert min(given_counts, default=0) >= 0
    assert sum(given_counts) <= 100


def test_every_kind_of_tree_is_drawn():
    seen = Counter()

    @settings(PLAIN, max_examples=300, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(trees())
    def look(tree):
        below = tree.levels[1:]
        seen["depth", len(tree.levels)] += 1
        seen["unsorted"] += not tree.is_sorted
        seen["table"] += bool(tree.tables)
        seen["dead rows"] += any(tree.rows(n) < tree.capacity(n) for n in tree.levels)
        seen["branching"] += len({tree.parent(level) for level in below}) < len(below)
        seen["no root rows"] += tree.rows("user") == 0
        seen["no leaves"] += bool(below) and tree.rows(below[-1]) == 0
        seen["thousands"] += any(tree.rows(level) > 1000 for level in below)
        for level in below:
            fan_out = tree.counts(level)[: tree.rows(tree.parent(level))].tolist()
            seen["childless first"] += fan_out[:1] == [0] and sum(fan_out) > 0
            seen["childless last"] += fan_out[-1:] == [0] and sum(fan_out) > 0
            seen["skewed"] += len(fan_out) > 1 and max(fan_out) > 20 * (min(fan_out) + 1)
            seen["one row, one child"] += fan_out == [1]

    look()
    kinds = {("depth", n) for n in range(1, 6)} | {
        "unsorted", "table", "dead rows", "branching", "no root rows", "no leaves", "thousands",
        "childless first", "childless last", "skewed", "one row, one child",
    }  # fmt: skip
    assert {kind for kind in kinds if seen[kind] < 3} == set()


@pytest.mark.parametrize(
    ("condition", "smallest"),
    [
        (lambda t: True, 'BroadcastTree.from_counts({}, root="user", root_rows=0)'),
        (
            lambda t: any((t.counts(level) > 64).any() for level in t.levels[1:]),
            'BroadcastTree.from_counts({"vendor": [65]}, root="user")',
        ),
        (
            lambda t: not t.is_sorted,
            'BroadcastTree.from_parents({"vendor": [1, 0]}, root="user", root_rows=2)',
        ),
        (
            lambda t: bool(t.tables) and t.rows(t.table_level("brand")) > 1,
            'BroadcastTree.from_counts({}, root="user", root_rows=2)'
            '.with_table("brand", of="user", index=[0, 0], rows=1)',
        ),
    ],
)
def test_shrinks_to_the_smallest_tree(condition, smallest):
    assert (
        tree_code(find(trees(), condition, settings=settings(PLAIN, max_examples=200))) == smallest
    )


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ([], "[]"),
        ([3, 0, 2], "[3, 0, 2]"),
        ([2, 0] * 500, "[2, 0] * 500"),
        ([1] * 40 + [7], "[1] * 40 + [7]"),
        ([9, 8] + [0] * 30, "[9, 8] + [0] * 30"),
    ],
)
def test_long_lists_are_written_short(values, source):
    tree = BroadcastTree.from_counts({"item": values}, root="user", root_rows=len(values))
    assert f'"item": {source}}}' in tree_code(tree)
    assert built(tree_code(tree)) == tree


@pytest.mark.slow
def test_without_hypothesis_only_its_users_ask_for_it():
    code = """
        import sys
        sys.modules["hypothesis"] = None
        from ikbo_tree import BroadcastTree
        from ikbo_tree.testing import check_op
        check_op("reduce", BroadcastTree.from_counts({"item": [1]}, root="user"))
        try:
            import ikbo_tree.testing.strategies
        except ImportError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 'pip install "ikbo-tree[testing]"' in run.stdout
