"""Request logs to parents and keys, against a dictionary and a loop."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree.mapping.columns import column, number
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.keys import group_keys


def naive(columns, root_rows=None):
    """Parents and keys by level: a row is the tuple of keys from the root down."""
    levels = list(columns)
    entries = list(zip(*columns.values(), strict=True))
    paths = []
    for depth in range(1, len(levels)):
        known = [(key,) for key in root_rows] if root_rows and depth == 1 else []
        paths.append(list(dict.fromkeys([*known, *(entry[:depth] for entry in entries)])))
    rows = [{path: i for i, path in enumerate(level)} for level in paths]
    parents = [
        [rows[depth - 1][path[:-1]] for path in paths[depth]] for depth in range(1, len(paths))
    ]
    if paths:
        parents.append([rows[-1][entry[:-1]] for entry in entries])
    keys = {level: [path[-1] for path in paths[i]] for i, level in enumerate(levels[:-1])}
    keys[levels[-1]] = [entry[-1] for entry in entries]
    return parents, keys


def check(found, columns, root_rows=None):
    parents, keys = naive(columns, root_rows)
    assert found.levels == tuple(columns)
    assert [p.tolist() for p in found.parents] == parents
    assert all(p.dtype == np.int32 for p in found.parents)
    assert {level: k.tolist() for level, k in found.keys.items()} == keys
    assert found.root_rows == len(keys[found.levels[0]])
    for level, (ids, index) in found.shared.items():
        distinct = list(dict.fromkeys(keys[level]))
        assert ids.tolist() == distinct
        assert index.tolist() == [distinct.index(key) for key in keys[level]]
        assert index.dtype == np.int32


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_logs(data):
    depth = data.draw(st.integers(1, 4))
    n = data.draw(st.integers(0, 12))
    pool = data.draw(
        st.sampled_from([[0, 1, 2], [-(2**63), 2**63 - 1, 5, 2**40], ["a", "", "ab\x00c", "日本"]])
    )
    names = [f"level{i}" for i in range(depth)]
    columns = {
        name: data.draw(st.lists(st.sampled_from(pool), min_size=n, max_size=n)) for name in names
    }
    root_rows = None
    if depth > 1 and n and data.draw(st.booleans()):
        root_rows = data.draw(st.permutations(pool))
    shared = data.draw(st.lists(st.sampled_from(names), unique=True))
    rows = {names[0]: root_rows} if root_rows else None
    check(group_keys(columns, rows=rows, shared=shared), columns, root_rows)


def strings(keys):
    return [f"key{key}" if key % 2 else f"ключ{key}" for key in keys]


FORMS = {
    "list": lambda keys: keys,
    "int64": np.array,
    "strided": lambda keys: np.repeat(np.array(keys), 2)[::2],
    "big-endian": lambda keys: np.array(keys, dtype=">i4"),
    "uint8": lambda keys: np.array(keys, dtype=np.uint8),
    "int16 read-only": lambda keys: np.frombuffer(np.array(keys, np.int16).tobytes(), np.int16),
    "pandas": pd.Series,
    "pandas index": pd.Index,
    "pandas nullable": lambda keys: pd.Series(keys, dtype="Int32"),
    "pandas arrow": lambda keys: pd.Series(keys, dtype="int64[pyarrow]"),
    "pandas categorical": lambda keys: pd.Series(keys, dtype="category", index=keys),
    "arrow": pa.array,
    "arrow dictionary": lambda keys: pa.array(keys).dictionary_encode(),
    "arrow chunks": lambda keys: pa.chunked_array([keys[:3], keys[3:]]),
}
STRING_FORMS = {
    "list": lambda keys: keys,
    "tuple": tuple,
    "U": np.array,
    "U strided": lambda keys: np.repeat(np.array(keys), 3)[::3],
    "U big-endian": lambda keys: np.array(keys).astype(">U9"),
    "object": lambda keys: np.array(keys, dtype=object),
    "StringDType": lambda keys: np.array(keys, dtype=np.dtypes.StringDType()),
    "pandas": pd.Series,
    "pandas object": lambda keys: pd.Series(keys, dtype=object),
    "pandas arrow": lambda keys: pd.Series(keys, dtype=pd.ArrowDtype(pa.string())),
    "categorical": lambda keys: pd.Categorical(keys, categories=[*sorted(set(keys)), "unused"]),
    "arrow": pa.array,
    "arrow large": lambda keys: pa.array(keys, pa.large_string()),
    "arrow view": lambda keys: pa.array(keys, pa.string_view()),
    "arrow dictionary": lambda keys: pa.array(keys).dictionary_encode(),
    "arrow chunks": lambda keys: pa.chunked_array([keys[:3], keys[3:]]),
    "arrow dictionaries": lambda keys: pa.chunked_array(
        [pa.array(keys[:3]).dictionary_encode(), pa.array(keys[3:]).dictionary_encode()]
    ),
    "arrow slice": lambda keys: pa.array(["x", *keys])[1:],
}
LOG = {"user": [7, 3, 7, 7, 0, 3], "vendor": [1, 1, 2, 1, 1, 1], "item": [4, 5, 6, 4, 4, 9]}
KNOWN = [0, 12, 7, 3]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_integer_keys(form):
    make = FORMS[form]
    columns = {level: make(keys) for level, keys in LOG.items()}
    found = group_keys(columns, rows={"user": make(KNOWN)}, shared=["vendor"])
    check(found, LOG, KNOWN)
    check(group_keys(columns, rows={"user": KNOWN}), LOG, KNOWN)
    check(group_keys({**LOG, "vendor": columns["vendor"]}), LOG)


@pytest.mark.parametrize("form", STRING_FORMS)
def test_forms_of_string_keys(form):
    make = STRING_FORMS[form]
    log = {level: strings(keys) for level, keys in LOG.items()}
    columns = {level: make(keys) for level, keys in log.items()}
    check(group_keys(columns, rows={"user": make(strings(KNOWN))}, shared=log), log, strings(KNOWN))
    check(group_keys(columns, rows={"user": strings(KNOWN)}), log, strings(KNOWN))
    check(group_keys(columns), log)
    mixed = {**LOG, "user": log["user"]}
    check(group_keys({**LOG, "user": columns["user"]}), mixed)


@pytest.mark.parametrize(
    "make",
    [
        lambda keys: np.array(keys, dtype="S11"),
        lambda keys: keys,
        lambda keys: pa.array(keys, pa.binary()),
        lambda keys: pa.array(keys, pa.large_binary()),
        lambda keys: pa.array(keys, pa.binary(4)),
        lambda keys: pa.array(keys, pa.binary_view()),
    ],
)
def test_bytes(make):
    log = {level: [f"k{key:03}".encode() for key in keys] for level, keys in LOG.items()}
    columns = {level: make(keys) for level, keys in log.items()}
    check(group_keys(columns), log)
    check(group_keys(columns, shared=log), log)


def test_long_strings_that_differ_late():
    keys = ["x" * 40 + tail for tail in ("a", "b", "a", "", "ü")]
    check(group_keys({"user": np.array(keys), "item": range(5)}), {"user": keys, "item": range(5)})


def test_characters_that_agree_in_their_low_bits_differ():
    keys = ["a", "\u0461", "a", "\U00010061"]
    check(group_keys({"user": np.array(keys), "item": range(4)}), {"user": keys, "item": range(4)})


def test_an_arrow_dictionary_may_hold_a_key_twice():
    twice = pa.DictionaryArray.from_arrays([0, 1, 2, 0], ["a", "b", "a"])
    check(group_keys({"u": twice, "i": [0] * 4}), {"u": ["a", "b", "a", "a"], "i": [0] * 4})
    ints = pa.DictionaryArray.from_arrays([0, 1, 2, 0], [8, 9, 8])
    check(group_keys({"u": ints, "i": [0] * 4}), {"u": [8, 9, 8, 8], "i": [0] * 4})


def test_hashed_ids_of_64_bits():
    ids = np.array([2**64 - 1, 5, 2**63, 5], dtype=np.uint64)
    found = group_keys({"user": ids, "item": [0, 1, 2, 3]})
    assert found.keys["user"].dtype == np.uint64
    check(found, {"user": ids.tolist(), "item": [0, 1, 2, 3]})
    known = [5, 2**63, 2**64 - 1]
    rows = {"user": np.array(known, dtype=np.uint64)}
    check(
        group_keys({"user": ids, "item": [0, 1, 2, 3]}, rows=rows),
        {"user": ids.tolist(), "item": [0, 1, 2, 3]},
        known,
    )
    with pytest.raises(TreeError, match="must not meet negative keys with keys past"):
        group_keys({"user": ids, "item": [0, 1, 2, 3]}, rows={"user": [5, -1, -(2**63)]})


@pytest.mark.parametrize("n", [255, 256, 257, 40_000])
def test_numbers_across_blocks_and_growing_tables(n):
    rng = np.random.default_rng(n)
    for keys, parents in (
        (rng.permutation(n), None),
        (rng.integers(0, 50, n) << 40, rng.integers(0, n, n).astype(np.int32)),
        (np.zeros(n, dtype=np.int64), np.arange(n, dtype=np.int32)),
        (np.arange(n) << 32, np.zeros(n, dtype=np.int32)),
        (np.full(n, -1), None),
    ):
        codes, first = number(keys, parents)
        above = [0] * n if parents is None else parents.tolist()
        seen = {}
        expected = [
            seen.setdefault(pair, len(seen)) for pair in zip(above, keys.tolist(), strict=True)
        ]
        assert codes.tolist() == expected
        assert [expected[i] for i in first.tolist()] == list(range(len(seen)))
        assert all(expected.index(code) == i for code, i in enumerate(first[:50].tolist()))


def test_an_empty_log_with_known_users():
    found = group_keys({"user": [], "item": []}, rows={"user": ["a", "b"]})
    assert found.root_rows == 2
    assert [p.tolist() for p in found.parents] == [[]]
    assert found.keys["user"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([0.5], "dtype float64"),
        (np.array([1.0, np.nan]), "dtype float64"),
        ([True], "dtype bool"),
        (np.array(["2020"], dtype="M8[D]"), "dtype datetime64"),
        ([1, "a"], "1 at position 0"),
        (["a", None], "None at position 1"),
        (["a", b"a"], "b'a' at position 1"),
        (np.array(["a", np.nan], dtype=object), "nan at position 1"),
        ([["a"], ["b"]], r"\['a'\] at position 0"),
        (np.zeros((2, 2), int), r"shape \[2, 2\]"),
        ("abc", "str"),
        (None, "NoneType"),
        (pa.array([1.5]), "type double"),
        (pa.array([True]), "type bool"),
        (pa.scalar(3), "Int64Scalar"),
        (pd.Series([0.5]), "dtype float64"),
        (pd.Series([True]), "dtype bool"),
        (pd.DataFrame({"a": [1]}), "DataFrame"),
        (pd.Series([0.5, 1.5], dtype="category"), "dtype float64"),
        (pa.array([0.5]).dictionary_encode(), "dtype float64"),
    ],
)
def test_what_is_no_key_is_refused(value, got):
    rule = r'keys\["user"\] must be a 1-D column of integers, strings or categories; got '
    for encode in (True, False):
        with pytest.raises(TreeError, match=rule + got):
            column('keys["user"]', value, encode=encode)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (pa.array([1, None]), "one at position 1"),
        (pa.array(["a", "b", None]), "one at position 2"),
        (pa.array(["a", None]).dictionary_encode(), "one at position 1"),
        (pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None])), "one in its dictionary"),
        (pd.Categorical(["a", None]), "one at position 1"),
        (pd.Series([1, None], dtype="Int64"), "one at position 1"),
        (pd.Series(["a", None]), "one at position 1"),
    ],
)
def test_nulls_are_refused(value, got):
    for encode in (True, False):
        with pytest.raises(TreeError, match=rf'keys\["user"\] must hold no null; got {got}'):
            column('keys["user"]', value, encode=encode)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": {}}, "keys must have a column for at least one level; got none"),
        (
            {"columns": {"u": [1], "i": [1, 2]}},
            r'keys\["i"\] must be as long as keys\["u"\], 1; got 2',
        ),
        ({"rows": {"item": [1]}}, "rows must name the root 'user' alone.*; got 'item'"),
        ({"rows": {"x": [1]}}, "rows must name the root 'user'; got 'x'"),
        ({"columns": {"u": [1]}, "rows": {"u": [1]}}, "rows must not be given for a tree of one"),
        (
            {"rows": {"user": [7, 3]}},
            r'rows\["user"\] must hold every key.*none that is .*0.*, .* 4',
        ),
        ({"rows": {"user": [0, 3, 7, 3]}}, r'rows\["user"\] must be distinct; .*3.* 1 and 3'),
        ({"rows": {"user": ["7"]}}, r'rows\["user"\] must hold integers.*; got strings'),
        ({"rows": {"user": [0.5]}}, r'rows\["user"\] must be a 1-D column'),
        (
            {"shared": ["brand"]},
            r"shared must name levels of \['user', 'vendor', 'item'\]; got 'brand'",
        ),
    ],
)
def test_wrong_logs(arguments, message):
    with pytest.raises(TreeError, match=message):
        group_keys(**{"columns": LOG, **arguments})
