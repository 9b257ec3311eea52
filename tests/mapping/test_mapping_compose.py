"""Several trees as one, and parts of a tree, against naive loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapping_naive import Naive, capacities, check_packed, naive_trees, structures

from ikbo_tree.mapping import compose
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.structure import Structure

CHAIN = Structure.build("user", ("vendor", "item"), None)


def joined(trees):
    """The oracle of `concat`."""
    first = trees[0]
    parents = [[] for _ in first.parents]
    rows = [0] * len(first.parents)
    for tree in trees:
        for level, above in enumerate(first.structure.parent):
            if above >= 0:
                parents[level] += [rows[above] + p for p in tree.parents[level]]
        rows = [a + b for a, b in zip(rows, tree.rows, strict=True)]
    return Naive(first.structure, parents, rows[0])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_concat_puts_one_tree_after_the_other(data):
    structure = data.draw(structures(5))
    trees = data.draw(st.lists(naive_trees(structure, most_rows=5), min_size=1, max_size=4))
    packed = [tree.pack(data.draw(capacities(tree.rows))) for tree in trees]
    whole = joined(trees)
    capacity = data.draw(capacities(whole.rows))
    check_packed(compose.concat(packed, capacity=capacity), whole)


def test_concat_of_deep_trees():
    rng = np.random.default_rng(0)
    structure = Structure.build("l0", tuple(f"l{i}" for i in range(1, 10)), None)
    trees = [
        Naive(structure, [[], *(rng.integers(0, 4, 4).tolist() for _ in range(9))], 4)
        for _ in range(3)
    ]
    check_packed(compose.concat([tree.pack() for tree in trees]), joined(trees))


def test_concat_uses_the_given_memory_and_keeps_sorted_trees_sorted():
    tree = Naive(CHAIN, [[], [0, 0, 2], [1, 1, 2]], 3)
    memory = np.full(200, -7, dtype=np.int32)
    packed = compose.concat([tree.pack(), tree.pack()], allocate=lambda n: memory[:n])
    assert packed.sorted
    assert packed.buffer.base is memory
    check_packed(packed, joined([tree, tree]))


def test_concat_refuses_nothing_and_other_structures():
    with pytest.raises(TreeError, match="trees must hold at least one tree; got none"):
        compose.concat([])
    tree = Naive(CHAIN, [[], [0], [0]], 1).pack()
    star = Structure.build("user", ("vendor", "item"), {"item": "user"})
    with pytest.raises(TreeError, match=r"trees\[1\] must have the levels of trees\[0\]"):
        compose.concat([tree, Naive(star, [[], [0], [0]], 1).pack()])


def test_concat_refuses_more_rows_than_int32_counts():
    structure = Structure.build("user", (), None)
    huge = Naive(structure, [[]], 1).pack()._replace(rows=(2**30,))
    with pytest.raises(TreeError, match=r"trees must have at most 2\^31 - 1 rows; got 2147483648"):
        compose.concat([huge, huge])


def selected(tree, level, rows):
    """The oracle of `select`: kept rows of each level, new parents."""
    structure = tree.structure
    kept = [None] * len(structure.levels)
    kept[level] = list(rows)
    for above in structure.lineage[level]:
        kept[above] = sorted({tree.ancestor(level, row, above) for row in rows})
    for i, above in enumerate(structure.parent):
        if kept[i] is None:
            kept[i] = [row for p in kept[above] for row in tree.below(i, above, p)]
    parents = [[]] + [
        [kept[above].index(tree.parents[i][row]) for row in kept[i]]
        for i, above in enumerate(structure.parent)
        if above >= 0
    ]
    return Naive(structure, parents, len(kept[0])), kept


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_select_keeps_what_belongs_to_the_rows(data):
    tree = data.draw(naive_trees())
    packed = tree.pack(data.draw(capacities(tree.rows)))
    level = data.draw(st.integers(0, len(tree.rows) - 1))
    rows = data.draw(st.permutations(range(tree.rows[level])))
    rows = rows[: data.draw(st.integers(0, len(rows)))]
    part, origins = compose.select(packed, level, np.array(rows, dtype=np.int16))
    expected, kept = selected(tree, level, rows)
    check_packed(part, expected)
    assert [origin.tolist() for origin in origins] == kept
    assert all(origin.dtype == np.int32 for origin in origins)


def test_select_of_some_vendors():
    structure = Structure.build("user", ("vendor", "item", "session"), {"session": "user"})
    tree = Naive(structure, [[], [0, 0, 1], [0, 0, 1, 2], [0, 1, 1]], 3)
    part, origins = compose.select(tree.pack(), 1, [2, 0])
    assert [origin.tolist() for origin in origins] == [[0, 1], [2, 0], [3, 0, 1], [0, 1, 2]]
    check_packed(part, Naive(structure, [[], [1, 0], [0, 1, 1], [0, 1, 1]], 2))


def test_select_of_a_deep_tree():
    rng = np.random.default_rng(1)
    structure = Structure.build("l0", tuple(f"l{i}" for i in range(1, 10)), None)
    tree = Naive(structure, [[], *(rng.integers(0, 6, 6).tolist() for _ in range(9))], 6)
    for level in (0, 4, 9):
        expected, kept = selected(tree, level, [5, 2, 3])
        part, origins = compose.select(tree.pack(), level, [5, 2, 3])
        check_packed(part, expected)
        assert [origin.tolist() for origin in origins] == kept


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], r"select\(\) must be rows of 'vendor', from 0 to 2; got 3 at position 1"),
        ([-1], r"got -1 at position 0"),
        ([2, 1, 0, 1, 2], r"select\(\) must be distinct; got 1 at positions 1 and 3"),
        ([1.0], r"must be a 1-D array of integers; got dtype float64"),
        ([[1]], r"must be a 1-D array of integers; got shape \[1, 1\]"),
    ],
)
def test_wrong_selections(rows, message):
    # A dead row is no row: the capacity of 5 must not make 3 one.
    tree = Naive(CHAIN, [[], [0, 0, 1], [0]], 2).pack([2, 5, 5])
    with pytest.raises(TreeError, match=message):
        compose.select(tree, 1, rows, argument="select()")


def test_a_selection_of_nothing_from_an_empty_level():
    tree = Naive(CHAIN, [[], [], []], 2).pack()
    part, origins = compose.select(tree, 1, [])
    assert part.rows == (0, 0, 0)
    assert [origin.size for origin in origins] == [0, 0, 0]
    with pytest.raises(TreeError, match="must be empty: 'vendor' has no rows; got 0"):
        compose.select(tree, 1, [0])
