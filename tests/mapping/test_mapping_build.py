"""Counts and parents to packed maps, side tables, any pair of levels."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapping_naive import Naive, capacities, check_maps, check_packed, naive_trees

from ikbo_tree.mapping import build, first_trees
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.structure import Structure

CHAIN = Structure.build("user", ("vendor", "item"), None)
PAIR = Structure.build("user", ("item",), None)
ROOT = Structure.build("user", (), None)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_parents_give_the_maps_of_the_naive_tree(data):
    naive = data.draw(naive_trees())
    capacity = data.draw(capacities(naive.rows))
    packed = naive.pack(capacity)
    if capacity is None:
        assert packed.capacity == packed.rows
    else:
        wanted = [n if c is None else c for n, c in zip(naive.rows, capacity, strict=True)]
        assert packed.capacity == tuple(wanted)
    check_packed(packed, naive)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_counts_give_the_maps_of_the_naive_tree(data):
    naive = data.draw(naive_trees(in_order=True))
    capacity = data.draw(capacities(naive.rows))
    counts = [naive.counts(level) for level in range(1, len(naive.rows))]
    packed = build.pack_counts(naive.structure, counts, naive.root_rows, capacity=capacity)
    check_packed(packed, naive)
    np.testing.assert_array_equal(packed.buffer, naive.pack(capacity).buffer)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_process_s_first_trees_equal_later_ones(data):
    naive = data.draw(naive_trees(in_order=True))
    capacity = data.draw(capacities(naive.rows))
    counts = [naive.counts(level) for level in range(1, len(naive.rows))]
    damage = data.draw(st.sampled_from(["none", "short", -1, 2**31, 2**62]))
    if damage != "none" and any(len(c) for c in counts):
        at = data.draw(st.sampled_from([i for i, c in enumerate(counts) if len(c)]))
        last = [] if damage == "short" else [damage]
        counts[at] = [*list(counts[at])[:-1], *last]

    def packed():
        poisoned = lambda n: np.full(n, -7, np.int32)  # noqa: E731
        arguments = (naive.structure, counts, naive.root_rows)
        try:
            found = build.pack_counts(*arguments, capacity=capacity, allocate=poisoned)
        except TreeError as error:
            return str(error)
        return found.rows, found.capacity, found.buffer.tolist()

    later = packed()
    with mock.patch.object(build, "_counting", return_value=first_trees):
        assert packed() == later


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("depth", [8, 9, 12])
def test_deep_trees_carry_neighbours_and_compose_the_rest(depth, in_order):
    rng = np.random.default_rng(depth)
    names = [f"level{i}" for i in range(depth)]
    structure = Structure.build(names[0], tuple(names[1:]), None)
    assert len(structure.pairs) == (28 if depth == 8 else depth - 1)
    parents, rows = [[]], 3
    for _ in range(depth - 1):
        below = rng.integers(0, rows, 9).tolist()
        parents.append(sorted(below) if in_order else below)
        rows = 9
    naive = Naive(structure, parents, 3)
    check_packed(naive.pack(), naive)
    check_packed(naive.pack([n + 2 for n in naive.rows]), naive)


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_long_and_short_runs_are_filled_to_their_ends(counts, dead):
    rows = sum(counts)
    capacity = [len(counts) + 1, rows + dead]
    canary = np.full(len(counts) + rows * 2 + dead + 200, -7, dtype=np.int32)

    def allocate(n):
        return canary[50 : 50 + n]

    packed = build.pack_counts(PAIR, [counts], None, capacity=capacity, allocate=allocate)
    expected = [row for row, n in enumerate(counts) for _ in range(n)]
    assert packed.maps(1, 0).index.tolist() == expected + [0] * dead
    end = 50 + len(packed.buffer)
    assert (canary[:50] == -7).all()
    assert (canary[end:] == -7).all()


def test_the_example_of_the_docstring():
    packed = build.pack_counts(PAIR, [[2, 1]], None)
    assert packed.buffer.tolist() == [2, 3, 0, 0, 1, 0, 2, 3]
    assert packed.sizes == (2, 3, 3)


def test_a_million_rows():
    rng = np.random.default_rng(0)
    vendors = rng.integers(0, 20, 10_000)
    items = rng.multinomial(1_000_000, rng.dirichlet(np.ones(vendors.sum())))
    packed = build.pack_counts(CHAIN, [vendors, items], None)
    above = np.repeat(np.arange(len(items)), items)
    np.testing.assert_array_equal(packed.maps(2, 1).index, above)
    user = np.repeat(np.arange(len(vendors)), vendors)[above]
    np.testing.assert_array_equal(packed.maps(2, 0).index, user)
    edges = np.searchsorted(user, np.arange(len(vendors) + 1))
    np.testing.assert_array_equal(packed.maps(2, 0).offsets, edges)


@pytest.mark.parametrize(
    "make",
    [
        np.int64,
        np.int32,
        np.int16,
        np.uint8,
        np.uint64,
        ">i4",
        ">i8",
        list,
        tuple,
    ],
)
def test_any_integer_dtype_and_strides(make):
    parents, counts = [1, 0, 1, 0], [3, 0]
    if make in (list, tuple):
        given_parents, given_counts = make(parents), make(counts)
    else:
        wide = np.stack([np.array(parents), np.full(4, 99)], axis=1).astype(make)
        given_parents = wide[:, 0]
        assert given_parents.strides == (2 * wide.itemsize,)
        given_counts = np.array(counts[::-1]).astype(make)[::-1]
        given_counts.flags.writeable = False
    packed = build.pack_parents(PAIR, [given_parents], 2)
    check_packed(packed, Naive(PAIR, [[], parents], 2))
    packed = build.pack_counts(PAIR, [given_counts], 2)
    check_packed(packed, Naive(PAIR, [[], [0, 0, 0]], 2))


def test_arrays_are_taken_as_they_are_where_they_fit():
    for dtype in (np.int64, np.int32):
        array = np.array([1, 0], dtype=dtype)
        assert build.as_integers("x", array) is array
        array.flags.writeable = False
        copy = build.as_integers("x", array)
        assert copy is not array
        assert copy.flags.carray
    unaligned = np.frombuffer(b"\0" + np.array([5, 6]).tobytes(), dtype=np.uint8)[1:].view(np.int64)
    assert not unaligned.flags.aligned
    assert build.as_integers("x", unaligned).flags.carray
    assert build.as_integers("x", unaligned).tolist() == [5, 6]
    assert build.as_integers("x", []).dtype == np.int64


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([0.5, 1.0], "dtype float64"),
        (np.array([0, 1], dtype=np.float32), "dtype float32"),
        (np.empty(0), "dtype float64"),
        ([True, False], "dtype bool"),
        (np.array([0, None], dtype=object), "dtype object"),
        ([[0], [1]], r"shape \[2, 1\]"),
        (np.array(3), r"shape \[\]"),
        (7, r"shape \[\]"),
        (["a"], "dtype <U1"),
        ([[0], [1, 2]], "list"),
        ([2**70], "dtype object"),
        ("12", "str"),
        (None, "NoneType"),
        ({0: 1}, "dict"),
        (np.array(["2020"], dtype="M8[Y]"), "dtype datetime64"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(value, got):
    with pytest.raises(TreeError, match=rf"^thing must be a 1-D array of integers; got {got}"):
        build.as_integers("thing", value)


def test_unsigned_entries_past_int64_are_refused_not_wrapped():
    with pytest.raises(TreeError, match=r"thing must fit int64; got 9223372036854775813 at .* 1"):
        build.as_integers("thing", np.array([1, 2**63 + 5], dtype=np.uint64))


@pytest.mark.parametrize(
    ("structure", "counts", "root_rows", "message"),
    [
        (CHAIN, [[2, 1], [3, 0]], None, r'counts\["item"\] .* 3 rows of \'vendor\'; got 2 entries'),
        (CHAIN, [[2, 1], [3, 0, 1, 1]], None, r'counts\["item"\] must have .* got 4 entries'),
        (CHAIN, [[2, 1], [1, 1, 1]], 3, r'counts\["vendor"\] must have .* got 2 entries'),
        (CHAIN, [[2, 1], [1, -4, 1]], None, r'counts\["item"\] must not be negative; got -4 .* 1'),
        (CHAIN, [[-1, 1], []], None, r'counts\["vendor"\] must not be negative; got -1 at .* 0'),
        (PAIR, [[2**30, 2**30]], None, r"add up to at most 2\^31 - 1 rows; got 2147483648"),
        (PAIR, [[2**62, 2**62, 2**62]], None, rf"at most 2\^31 - 1 rows; got {3 * 2**62}"),
        (PAIR, [[1.0]], None, r'counts\["item"\] must be a 1-D array of integers'),
        (PAIR, [[1]], -1, r"root_rows must be from 0 to 2\^31 - 1; got -1"),
        (PAIR, [[1]], True, r"root_rows must be an integer; got True"),
        (PAIR, [[1]], 1.0, r"root_rows must be an integer; got 1.0"),
        (ROOT, [], None, r"root_rows must be given where no level is below the root; got None"),
    ],
)
def test_wrong_counts_name_argument_rule_and_what_came(structure, counts, root_rows, message):
    with pytest.raises(TreeError, match=message):
        build.pack_counts(structure, counts, root_rows)


@pytest.mark.parametrize(
    ("parents", "root_rows", "message"),
    [
        ([0, 2], 2, r'parents\["item"\] .* rows of \'user\', from 0 to 1; got 2 at position 1'),
        ([1, 0, -1], 2, r'parents\["item"\] must be rows .* got -1 at position 2'),
        ([0], 0, r"must be empty: \'user\' has no rows; got 0 at position 0"),
        (np.array([0, 2**40]), 2, r"got 1099511627776 at position 1"),
        (np.array([0.0]), 2, r'parents\["item"\] must be a 1-D array of integers; got dtype float'),
        ([0], 2**31, r"root_rows must be from 0 to"),
    ],
)
def test_wrong_parents_name_argument_rule_and_what_came(parents, root_rows, message):
    with pytest.raises(TreeError, match=message):
        build.pack_parents(PAIR, [parents], root_rows)


def test_capacity_must_cover_the_rows():
    with pytest.raises(TreeError, match=r'capacity\["item"\] must be at least .* 3 rows; got 2'):
        build.pack_counts(PAIR, [[2, 1]], None, capacity=[2, 2])
    with pytest.raises(TreeError, match=r'capacity\["user"\] must be an integer; got 2.5'):
        build.pack_parents(PAIR, [[1, 0]], 2, capacity=[2.5, None])


def test_trailing_childless_parents_stay():
    packed = build.pack_counts(PAIR, [[1, 0, 5, 4, 0]], None)
    assert packed.rows == (5, 10)
    assert packed.maps(1, 0).offsets.tolist() == [0, 1, 1, 6, 10, 10]


@pytest.mark.parametrize("capacity", [None, [4]])
def test_a_tree_of_one_level(capacity):
    for pack in (build.pack_counts, build.pack_parents):
        check_packed(pack(ROOT, [], 3, capacity=capacity), Naive(ROOT, [[]], 3))
        check_packed(pack(ROOT, [], 0, capacity=capacity), Naive(ROOT, [[]], 0))


@pytest.mark.parametrize(
    ("offsets", "counts", "start"),
    [
        ([10, 12, 15, 16], [2, 3, 1], 10),
        ([0, 2, 5, 6], [2, 3, 1], 0),
        ([0], [], 0),
        ([7], [], 7),
        ([0, 0, 0], [0, 0], 0),
        (np.array([0, 200, 255], dtype=np.uint8), [200, 55], 0),
        (np.array([2**40, 2**40 + 2]), [2], 2**40),
        (np.array([[0, 9], [2, 9]], dtype=np.int16)[:, 0], [2], 0),
    ],
)
def test_offsets_are_rebased(offsets, counts, start):
    found, at = build.counts_from_offsets("offsets", offsets)
    assert (found.tolist(), at) == (counts, start)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, 2], r'offsets\["item"\] must not decrease; got 2 after 4 at position 2'),
        ([], r"must have at least one entry"),
        ([-3, 0], r"must not be negative; got -3"),
        ([0.0, 1.0], r"must be a 1-D array of integers"),
    ],
)
def test_wrong_offsets(offsets, message):
    with pytest.raises(TreeError, match=message):
        build.counts_from_offsets('offsets["item"]', offsets)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_table_maps_of_a_level_and_all_below(data):
    naive = data.draw(naive_trees())
    packed = naive.pack(data.draw(capacities(naive.rows)))
    of = data.draw(st.integers(0, len(naive.rows) - 1))
    table_rows = data.draw(st.integers(1, 5))
    extra = data.draw(st.integers(0, 2))
    n = naive.rows[of]
    index = data.draw(st.lists(st.integers(0, table_rows - 1), min_size=n, max_size=n))
    tables = build.table_maps(
        packed, "brand", of, np.array(index, np.int16), table_rows, capacity=table_rows + extra
    )
    assert tables.buffer[0] == table_rows
    assert sum(tables.sizes) == len(tables.buffer)
    lineage = naive.structure.lineage
    assert tables.levels == tuple(i for i in range(len(lineage)) if i == of or of in lineage[i])
    for level in tables.levels:
        expected = [index[row] for row in naive.ancestors(level, of)]
        check_maps(
            tables.maps(level),
            expected,
            packed.rows[level],
            packed.capacity[level],
            table_rows,
            table_rows + extra,
        )


@pytest.mark.parametrize(
    ("index", "rows", "capacity", "message"),
    [
        ([0, 1, 0], 2, None, r'index of table "brand" must have .* 2 rows of \'vendor\'; got 3'),
        ([0, 2], 2, None, r"must be rows of the table, from 0 to 1; got 2 at position 1"),
        ([0, -1], 2, None, r"got -1 at position 1"),
        ([0, 0], 0, None, r"must be empty: the table has no rows"),
        ([0, 1], 2, 1, r"must be at least the table's 2 rows; got 1"),
        ([0.0, 1.0], 2, None, r"must be a 1-D array of integers"),
        ([0, 1], -1, None, r'rows of table "brand" must be from 0'),
    ],
)
def test_wrong_tables(index, rows, capacity, message):
    packed = build.pack_counts(CHAIN, [[2], [1, 1]], None)
    with pytest.raises(TreeError, match=message):
        build.table_maps(packed, "brand", 1, index, rows, capacity=capacity)


def test_pairs_that_are_none():
    structure = Structure.build("user", ("item", "session"), {"session": "user"})
    packed = build.pack_counts(structure, [[1], [1]], None)
    with pytest.raises(KeyError):
        build.compose(packed, 2, 1)
    with pytest.raises(KeyError):
        build.compose(packed, 0, 0)


def test_the_given_memory_is_used():
    made = []

    def allocate(n):
        made.append(np.full(n, -7, dtype=np.int32))
        return made[-1]

    packed = build.pack_counts(CHAIN, [[2, 1], [3, 0, 2]], None, allocate=allocate)
    assert packed.buffer is made[0]
    check_packed(packed, Naive(CHAIN, [[], [0, 0, 1], [0, 0, 0, 2, 2]], 2))
    packed = build.pack_parents(CHAIN, [[1, 0], [1, 0]], 2, capacity=[3, 3, 3], allocate=allocate)
    assert packed.buffer is made[1]
    check_packed(packed, Naive(CHAIN, [[], [1, 0], [1, 0]], 2))
    tables = build.table_maps(packed, "brand", 2, [0, 0], 1, allocate=allocate)
    assert tables.buffer is made[2]
    assert (tables.buffer >= 0).all()
