"""Key columns as callers have them, turned into integers that are equal where the keys are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.build import loops
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.integers import LIMIT, first
from ikbo_tree.mapping.layout import Int32

_RULE = "must be a 1-D column of integers, strings or categories"


class Column(NamedTuple):
    """A column of keys.

    Attributes:
        codes: int64 [n], equal where the keys are.
        values: the key of each code, or, where the keys are integers (`raw`), the keys of the rows.
        raw: the codes are the keys themselves (those past 2^63 - 1 less 2^64).
        kind: `"integers"`, `"strings"` or `"bytes"`.
    """

    codes: NDArray[np.int64]
    values: NDArray[Any]
    raw: bool
    kind: str

    def keys(self, rows: Any = slice(None)) -> NDArray[Any]:
        """The keys of some rows (an index array or a slice)."""
        keys: NDArray[Any] = self.values[rows if self.raw else self.codes[rows]]
        return keys


def number(keys: NDArray[np.int64], parents: Int32 | None = None) -> tuple[Int32, Int32]:
    """Numbers the distinct (parent, key) in order of first appearance.

    Args:
        keys: int64 [n].
        parents: int32 [n], not negative; None: all the same.

    Returns:
        codes: [n], the number of each row.
        first: [numbers], the row where each first appears.
    """
    codes = np.empty(keys.size, dtype=np.int32)
    rows = np.empty(keys.size, dtype=np.int32)
    above = np.empty(0, dtype=np.int32) if parents is None else parents
    count = loops().number_keys(keys, above, codes, rows)
    return codes, rows[:count].copy()


def column(argument: str, value: Any, *, encode: bool = True) -> Column:
    """A column from what a caller gave.

    Args:
        argument: its name in the caller's words.
        value: 1-D. Integers of any dtype; strings as lists, NumPy arrays (fixed width, object,
            `StringDType`) or Arrow arrays; bytes likewise; Arrow dictionaries, pandas categoricals
            and series.
        encode: False where only the keys are wanted: the codes of strings may all be 0 then.

    Raises:
        TreeError: floats, bools, nulls, mixed types, another rank, more than 2^31 - 1 entries.
    """
    library = type(value).__module__.partition(".")[0]
    if library == "pyarrow":
        made = _from_arrow(argument, value, encode)
    elif library == "pandas":
        made = _from_pandas(argument, value, encode)
    else:
        made = _from_numpy(argument, value, encode)
    if made.codes.size > LIMIT:
        raise TreeError(argument, "must have at most 2^31 - 1 entries", str(made.codes.size))
    return made


def _from_numpy(argument: str, value: Any, encode: bool = True) -> Column:
    if isinstance(value, (str, bytes, dict, set)) or value is None:
        raise TreeError(argument, _RULE, type(value).__name__)
    try:
        array = np.asarray(value)
        if isinstance(value, Sequence) and array.dtype.kind in "USO":
            # np.asarray turns [1, "a"] into ["1", "a"]: keep what the entries are.
            array = np.empty(len(value), dtype=object)
            array[:] = value
    except (ValueError, TypeError, OverflowError) as error:
        raise TreeError(argument, _RULE, f"{type(value).__name__} ({error})") from error
    if array.ndim != 1:
        raise TreeError(argument, _RULE, f"shape {list(array.shape)}")
    kind = array.dtype.kind
    if kind in "iu" or (not array.size and isinstance(value, Sequence)):
        return _from_integers(array)
    if kind in "US":
        return _from_fixed_width(array) if encode else _not_encoded(array, kind == "U")
    if kind in "OT":
        return _from_objects(argument, array, encode)
    raise TreeError(argument, _RULE, f"dtype {array.dtype}")


def _from_integers(array: NDArray[Any]) -> Column:
    codes = np.ascontiguousarray(array).astype(np.int64, copy=False)
    return Column(codes, array, True, "integers")


def _from_fixed_width(array: NDArray[Any]) -> Column:
    """Numbers strings by their bytes, eight at a time, each below the number of those before it."""
    kind = "strings" if array.dtype.kind == "U" else "bytes"
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    width = array.dtype.itemsize
    data = array.view(np.uint8).reshape(array.size, width)
    if kind == "strings" and width:
        points = array.view(np.uint32).reshape(array.size, width // 4)
        if points.max(initial=0) < 256:
            data = points.astype(np.uint8)
    padded = np.zeros((array.size, -(-max(data.shape[1], 1) // 8) * 8), dtype=np.uint8)
    padded[:, : data.shape[1]] = data
    words = padded.view(np.int64)
    codes, rows = number(np.ascontiguousarray(words[:, 0]))
    for i in range(1, words.shape[1]):
        codes, rows = number(np.ascontiguousarray(words[:, i]), codes)
    return Column(codes.astype(np.int64), array[rows], False, kind)


def _not_encoded(array: NDArray[Any], strings: bool) -> Column:
    zeros = np.broadcast_to(np.int64(0), array.size)
    return Column(zeros, array, True, "strings" if strings else "bytes")


def _from_objects(argument: str, array: NDArray[Any], encode: bool) -> Column:
    entries = array.tolist()
    wanted = bytes if entries and isinstance(entries[0], bytes) else str
    if not all(issubclass(kind, wanted) for kind in set(map(type, entries))):
        at = next(i for i, key in enumerate(entries) if not isinstance(key, wanted))
        raise TreeError(argument, _RULE, f"{entries[at]!r} at position {at}")
    if not encode:
        return _not_encoded(array, wanted is str)
    distinct = dict.fromkeys(entries)
    for code, key in enumerate(distinct):
        distinct[key] = code
    codes = np.fromiter(map(distinct.__getitem__, entries), dtype=np.int64, count=len(entries))
    values = np.empty(len(distinct), dtype=object)
    values[:] = list(distinct)
    return Column(codes, values, False, "strings" if wanted is str else "bytes")


def _from_categories(argument: str, codes: NDArray[Any], categories: NDArray[Any]) -> Column:
    """Codes into categories, which may hold one key twice (Arrow's may)."""
    at = first(codes < 0)
    if at >= 0:
        raise TreeError(argument, "must hold no null", f"one at position {at}")
    of = _from_numpy(f"categories of {argument}", categories)
    places = codes.astype(np.int64)
    return Column(of.codes[places], of.values[places] if of.raw else of.values, of.raw, of.kind)


def _decoded(value: Any) -> NDArray[Any]:
    """An Arrow array as a NumPy array: integers, or objects."""
    if type(value).__name__ == "ChunkedArray":
        return np.asarray(value.to_numpy())
    return np.asarray(value.to_numpy(zero_copy_only=False))


def _from_arrow(argument: str, value: Any, encode: bool) -> Column:
    import pyarrow as pa

    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        raise TreeError(argument, _RULE, type(value).__name__)
    if value.null_count:
        at = first(value.is_null().to_numpy(zero_copy_only=False))
        raise TreeError(argument, "must hold no null", f"one at position {at}")
    types = pa.types
    if types.is_integer(value.type):
        return _from_integers(np.asarray(value))
    if types.is_string_view(value.type):
        value = value.cast(pa.large_string())
    if types.is_binary_view(value.type):
        value = value.cast(pa.large_binary())
    if any(
        is_kind(value.type)
        for is_kind in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
            types.is_fixed_size_binary,
        )
    ):
        if not encode:
            strings = types.is_string(value.type) or types.is_large_string(value.type)
            return _not_encoded(_decoded(value), strings)
        value = value.dictionary_encode()
    if not types.is_dictionary(value.type):
        raise TreeError(argument, _RULE, f"type {value.type}")
    if isinstance(value, pa.ChunkedArray):
        chunks = value.unify_dictionaries().chunks or [pa.array([], value.type)]
        value = pa.concat_arrays(chunks)
    if value.dictionary.null_count:
        raise TreeError(argument, "must hold no null", "one in its dictionary")
    return _from_categories(argument, _decoded(value.indices), _decoded(value.dictionary))


def _from_pandas(argument: str, value: Any, encode: bool) -> Column:
    import pandas as pd

    if getattr(value, "ndim", 0) != 1:
        raise TreeError(argument, _RULE, type(value).__name__)
    array = getattr(value, "array", value)
    if isinstance(array, pd.Categorical):
        return _from_categories(argument, np.asarray(array.codes), array.categories.to_numpy())
    at = first(np.asarray(pd.isna(array)))
    if at >= 0:
        raise TreeError(argument, "must hold no null", f"one at position {at}")
    plain = array.to_numpy(dtype=getattr(array.dtype, "numpy_dtype", None))
    return _from_numpy(argument, plain, encode)
