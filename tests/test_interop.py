"""Trees from other libraries' ragged data, against the same data as lists."""

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError, interop

LEVELS = ("user", "vendor", "item")
NESTED = [[[1, 2, 3], []], [], [[4]], [[5, 6]]]
NONE = [[], [[], [[]], [[], []]]]
lists_in_lists = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), max_size=5)


def of(nested):
    return BroadcastTree.from_nested(nested, levels=LEVELS)


def records(nested):
    """The same with features at users and vendors."""
    return [
        {"age": 1.0, "vendors": [{"items": items, "name": "x"} for items in vendors]}
        for vendors in nested
    ]


FIELDS = {"vendor": "vendors", "item": "items"}


class TestJagged:
    def test_two_levels(self):
        vendors = torch.nested.nested_tensor(
            [torch.ones(len(v), 4) for v in NESTED], layout=torch.jagged
        )
        items = torch.nested.nested_tensor(
            [torch.ones(len(i)) for v in NESTED for i in v], layout=torch.jagged
        )
        tree = interop.from_jagged({"vendor": vendors, "item": items}, root="user")
        assert tree == of(NESTED)

    def test_values_have_the_rows_of_their_level(self):
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 3, 5]))
        tree = interop.from_jagged({"item": nested}, root="user")
        assert tree.rows("item") == len(nested.values())
        assert tree.offsets("item", of="user").tolist() == [0, 3, 5]

    def test_offsets_that_begin_late(self):
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(9.0), torch.tensor([2, 5, 7]))
        tree = interop.from_jagged({"item": nested}, root="user")
        assert tree.offsets("item", of="user").tolist() == [0, 3, 5]
        assert tree.start("item") == 2

    def test_branches(self):
        one, two = (
            torch.nested.nested_tensor([torch.ones(n) for n in counts], layout=torch.jagged)
            for counts in ([2, 1], [0, 3])
        )
        tree = interop.from_jagged(
            {"item": one, "session": two}, root="user", under={"session": "user"}
        )
        assert tree.offsets("session", of="user").tolist() == [0, 0, 3]

    def test_what_is_refused(self):
        parts = [torch.ones(2, 3), torch.ones(1, 3)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        with pytest.raises(TreeError, match=r'jagged\["item"\] must be a nested tensor of layout'):
            interop.from_jagged({"item": torch.ones(2, 3)}, root="user")
        with warnings.catch_warnings(action="ignore"):
            strided = torch.nested.nested_tensor(parts, layout=torch.strided)
        with pytest.raises(TreeError, match=r"got a nested tensor of layout torch\.strided"):
            interop.from_jagged({"item": strided}, root="user")
        with pytest.raises(TreeError, match="must be ragged in dim 1"):
            interop.from_jagged({"item": nested.transpose(1, 2)}, root="user")
        wide = torch.ones(2, 5, 3)
        holes = torch.nested.narrow(
            wide, 1, torch.tensor([0, 2]), torch.tensor([1, 2]), layout=torch.jagged
        )
        with pytest.raises(TreeError, match=r"must be contiguous: call .contiguous\(\)"):
            interop.from_jagged({"item": holes}, root="user")
        tree = interop.from_jagged({"item": holes.contiguous()}, root="user")
        assert tree.counts("item").tolist() == [1, 2]
        with pytest.raises(TreeError, match=r'\["item"\] must have one entry for each'):
            interop.from_jagged({"vendor": nested, "item": nested}, root="user")


class Jagged:
    """What `from_keyed_jagged` asks of torchrec's `JaggedTensor`."""

    def __init__(self, lengths):
        self._lengths = lengths

    def lengths(self):
        return self._lengths


class KeyedJagged(dict):
    """And of its `KeyedJaggedTensor`: a stand-in where torchrec is not installed."""

    @classmethod
    def of(cls, **lengths):
        return cls({key: Jagged(torch.tensor(x, dtype=torch.int32)) for key, x in lengths.items()})


def keyed_jagged(**lengths):
    """Of torchrec itself, of one batch size or several."""
    torchrec = pytest.importorskip("torchrec")
    flat = torch.tensor([n for x in lengths.values() for n in x], dtype=torch.int32)
    strides = None
    if len({len(x) for x in lengths.values()}) > 1:
        strides = [[len(x)] for x in lengths.values()]
    values = torch.arange(int(flat.sum()))
    return torchrec.KeyedJaggedTensor(
        keys=list(lengths), values=values, lengths=flat, stride_per_key_per_rank=strides
    )


@pytest.mark.parametrize("make", [KeyedJagged.of, keyed_jagged], ids=["stand-in", "torchrec"])
class TestKeyedJagged:
    def test_branches_of_one_batch(self, make):
        features = make(item_ids=[2, 0, 1], clicks=[5, 1, 0])
        levels, under = {"item": "item_ids", "click": "clicks"}, {"click": "user"}
        tree = interop.from_keyed_jagged(features, levels, root="user", under=under)
        counts = {"item": [2, 0, 1], "click": [5, 1, 0]}
        assert tree == BroadcastTree.from_counts(counts, root="user", under=under)

    def test_a_variable_stride(self, make):
        features = make(vendor_ids=[2, 0, 1], item_ids=[4, 0, 3])
        levels = {"vendor": "vendor_ids", "item": "item_ids"}
        tree = interop.from_keyed_jagged(features, levels, root="user")
        counts = {"vendor": [2, 0, 1], "item": [4, 0, 3]}
        assert tree == BroadcastTree.from_counts(counts, root="user")
        features = make(vendor_ids=[2, 0, 2], item_ids=[4, 0, 3, 1])
        tree = interop.from_keyed_jagged(features, levels, root="user")
        assert tree.ancestors("item", of="user").tolist() == [0] * 4 + [2] * 4

    def test_what_is_refused(self, make):
        features = make(item_ids=[2, 0])
        with pytest.raises(TreeError, match=r'levels\["item"\] must be one of the keys'):
            interop.from_keyed_jagged(features, {"item": "items"}, root="user")
        twice = {"vendor": "item_ids", "item": "item_ids"}
        features = make(item_ids=[2, 1])
        with pytest.raises(TreeError, match=r'counts\["item"\]'):
            interop.from_keyed_jagged(features, twice, root="user")


def awkward(nested, **options):
    ak = pytest.importorskip("awkward")
    return interop.from_awkward(ak.Array(nested), **options)


def arrow(nested, kind="list_", **options):
    pa = pytest.importorskip("pyarrow")
    return interop.from_arrow(pa.array(nested, typed(pa, nested, kind)), **options)


def large_arrow(nested, **options):
    return arrow(nested, "large_list", **options)


def arrow_views(nested, **options):
    return arrow(nested, "list_view", **options)


def typed(pa, nested, kind):
    """The type by hand: an empty list has none."""
    of = getattr(pa, kind)
    if nested and isinstance(nested[0], dict):
        vendor = pa.struct({"items": of(pa.int64()), "name": pa.string()})
        return pa.struct({"age": pa.float64(), "vendors": of(vendor)})
    return of(of(of(pa.int64())))


def polars(nested, **options):
    pl = pytest.importorskip("polars")
    dtype = pl.List(pl.List(pl.List(pl.Int64)))
    if nested and isinstance(nested[0], dict):
        vendor = pl.Struct({"items": pl.List(pl.Int64), "name": pl.String})
        dtype = pl.Struct({"age": pl.Float64, "vendors": pl.List(vendor)})
    return interop.from_polars(pl.Series(nested, dtype=dtype), **options)


every_library = pytest.mark.parametrize(
    "build", [awkward, arrow, large_arrow, arrow_views, polars], ids=lambda f: f.__name__
)


@every_library
class TestLists:
    @pytest.mark.parametrize("nested", [NESTED, *NONE], ids=str)
    def test_lists_in_lists(self, build, nested):
        deeper = [[[[i] for i in items] for items in vendors] for vendors in nested]
        assert build(deeper, levels=LEVELS) == of(nested)
        tree = BroadcastTree.from_nested(nested, levels=LEVELS[:2])
        assert build(deeper, levels=LEVELS[:2]) == tree
        assert build(deeper, levels=LEVELS[:1]).rows("user") == len(nested)

    @settings(max_examples=25)
    @given(nested=lists_in_lists)
    def test_any_lists(self, build, nested):
        deeper = [[[[i] for i in items] for items in vendors] for vendors in nested]
        assert build(deeper, levels=LEVELS) == of(nested)

    @pytest.mark.parametrize("nested", [NESTED, *NONE[1:]], ids=str)
    def test_records_on_the_way(self, build, nested):
        assert build(records(nested), levels=LEVELS, fields=FIELDS) == of(nested)

    def test_nulls_are_refused(self, build):
        deeper = [[[[1]], None], []]
        with pytest.raises(TreeError, match=r"a list in every row above level 'item'.*got 1 null"):
            build(deeper, levels=LEVELS)
        with pytest.raises(TreeError, match="a list in every row above level 'vendor'"):
            build([None, [[[1]]]], levels=LEVELS)
        assert build([[[[1], None]]], levels=LEVELS).rows("item") == 2  # a row, whatever it holds

    def test_records_that_are_null_or_lack_the_field(self, build):
        broken = records(NESTED)
        broken[2]["vendors"][0] = None
        with pytest.raises(TreeError, match="in every row above level 'item'"):
            build(broken, levels=LEVELS, fields=FIELDS)
        with pytest.raises(TreeError, match=r'fields\["vendor"\] must be a field of the rows'):
            build(records(NESTED), levels=LEVELS, fields={"vendor": "shops"})
        with pytest.raises(TreeError, match=r'fields\["vendor"\] must be a field of the rows'):
            build([[[[1]]]], levels=LEVELS, fields=FIELDS)
        with pytest.raises(TreeError, match="must hold lists, the rows of level 'vendor'; got"):
            build(records(NESTED), levels=LEVELS)

    def test_what_is_refused(self, build):
        with pytest.raises(TreeError, match="must hold lists, the rows of level 'slot'"):
            build([[[[1]]]], levels=("user", "vendor", "item", "offer", "slot"))
        with pytest.raises(TreeError, match="levels must name at least one level; got none"):
            build([[[[1]]]], levels=())
        with pytest.raises(TreeError, match=r"fields must name levels below the root"):
            build([[[[1]]]], levels=LEVELS, fields={"user": "x"})


class TestSlicesAndFixedSizes:
    def test_awkward(self):
        ak = pytest.importorskip("awkward")
        array = ak.Array(NESTED)
        assert interop.from_awkward(array[1:], levels=LEVELS) == of(NESTED[1:])
        assert interop.from_awkward(array[[3, 0]], levels=LEVELS) == of([NESTED[3], NESTED[0]])
        regular = ak.from_numpy(torch.zeros(2, 3, 4).numpy(), regulararray=True)
        assert interop.from_awkward(regular, levels=LEVELS) == of([[[0] * 4] * 3] * 2)
        names = ak.Array([["ab", "c"], []])
        assert interop.from_awkward(names, levels=("user", "item")).rows("item") == 2
        with pytest.raises(
            TreeError, match="must hold lists, the rows of level 'item'; got string"
        ):
            interop.from_awkward(names, levels=LEVELS)

    def test_arrow(self):
        pa = pytest.importorskip("pyarrow")
        column = pa.array(NESTED, typed(pa, NESTED, "list_").value_type)
        assert interop.from_arrow(column[1:], levels=LEVELS) == of(NESTED[1:])
        chunks = pa.chunked_array([column[2:], column[:2], column[:0]])
        assert interop.from_arrow(chunks, levels=LEVELS) == of(NESTED[2:] + NESTED[:2])
        none = pa.chunked_array([], column.type)
        assert interop.from_arrow(none, levels=LEVELS) == of([])
        fixed = pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int64(), 2), 1))
        assert interop.from_arrow(fixed[1:], levels=LEVELS) == of([[[3, 4]], [[5, 6]]])
        struct = pa.array(records(NESTED))
        sliced = interop.from_arrow(struct[2:], levels=LEVELS, fields=FIELDS)
        assert sliced == of(NESTED[2:])
        with pytest.raises(TreeError, match="column must be a pyarrow Array or ChunkedArray"):
            interop.from_arrow(NESTED, levels=LEVELS)

    def test_polars(self):
        pl = pytest.importorskip("polars")
        series = pl.Series(NESTED, dtype=pl.List(pl.List(pl.Int64)))
        assert interop.from_polars(series[1:], levels=LEVELS) == of(NESTED[1:])
        joined = pl.concat([series[2:], series[:2]], rechunk=False)
        assert interop.from_polars(joined, levels=LEVELS) == of(NESTED[2:] + NESTED[:2])
        fixed = pl.Series([[[1, 2]], [[3, 4]]], dtype=pl.Array(pl.Array(pl.Int64, 2), 1))
        assert interop.from_polars(fixed, levels=LEVELS) == of([[[1, 2]], [[3, 4]]])
        with pytest.raises(TreeError, match="series must be a polars Series; got list"):
            interop.from_polars(NESTED, levels=LEVELS)


@pytest.mark.slow
def test_a_missing_library_is_one_sentence_and_none_is_imported_before(tmp_path):
    code = """
        import sys
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"awkward", "polars", "pyarrow"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Hidden())
        from ikbo_tree import interop
        for build in (interop.from_awkward, interop.from_polars, interop.from_arrow):
            try:
                build([[1]], levels=("user", "item"))
            except ImportError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f'this needs {name}, which is not installed: pip install "ikbo-tree[interop]"'
        for name in ("awkward", "polars", "pyarrow")
    ]
