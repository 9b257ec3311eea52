"""Counts and keys to maps, beside NumPy, torch and pandas: `python benchmarks/bench_mapping.py`.

Everything runs on one thread. The workloads:

- `map-1k`: 15 users, 1,024 items, three levels; `map-1m`: the same shape a thousand times larger
  (68 items a user, 8 vendors a user). `map-1m-long` has 1,000 items a vendor, `map-1m-single` one
  or two. Counts to offsets and index of every two levels, and the schedule of 64-row tiles of items
  below one user.
- `map-1m-unsorted`: the same from parents in random order, inverse orders included.
- `keys-1m...`: 1,000,000 rows of a log in random order, three key columns.
- `first-tree`: fresh processes.

`ikbo-tree` is a whole `BroadcastTree`, `ikbo-mapping` what of it happens in `ikbo_tree.mapping`, to
which the baselines compare. The baselines check nothing that they are given; ours checks it all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import typer
from harness import Results, Timing, cpu_ceilings, cpu_name, interleaved

import ikbo_tree as ikbo
from ikbo_tree.mapping import build, keys, plans
from ikbo_tree.mapping.structure import Structure

TILE_ROWS = 64
STRUCTURE = Structure.build("user", ("vendor", "item"), None)


def numpy_maps(vendors: Any, items: Any) -> tuple[Any, ...]:
    """Offsets and index of (vendor, user), (item, vendor), (item, user), and tiles, in NumPy."""
    vendor_offsets = np.zeros(len(vendors) + 1, dtype=np.int32)
    np.cumsum(vendors, out=vendor_offsets[1:])
    item_offsets = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(items, out=item_offsets[1:])
    user_offsets = item_offsets[vendor_offsets]
    lengths = np.diff(user_offsets)
    users = np.arange(len(vendors), dtype=np.int32)
    vendor_user = np.repeat(users, vendors)
    item_vendor = np.repeat(np.arange(len(items), dtype=np.int32), items)
    item_user = np.repeat(users, lengths)
    maps = (vendor_user, vendor_offsets, item_vendor, item_offsets, item_user, user_offsets)
    tiles = (lengths + (TILE_ROWS - 1)) // TILE_ROWS
    segment = np.repeat(users, tiles)
    ends = np.cumsum(tiles, dtype=np.int32)
    within = np.arange(len(segment), dtype=np.int32) - (ends - tiles)[segment]
    start = user_offsets[segment] + within * TILE_ROWS
    rows = np.minimum(user_offsets[1:][segment] - start, TILE_ROWS)
    return (*maps, segment, start, rows)


def torch_maps(vendors: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in torch, by `repeat_interleave`; its result is int64, which it makes fastest."""
    total = int(items.sum())
    vendor_offsets = torch.zeros(len(vendors) + 1, dtype=torch.int64)
    torch.cumsum(vendors, 0, out=vendor_offsets[1:])
    item_offsets = torch.zeros(len(items) + 1, dtype=torch.int64)
    torch.cumsum(items, 0, out=item_offsets[1:])
    user_offsets = item_offsets[vendor_offsets]
    lengths = user_offsets.diff()
    vendor_user = torch.repeat_interleave(vendors, output_size=len(items))
    item_vendor = torch.repeat_interleave(items, output_size=total)
    item_user = torch.repeat_interleave(lengths, output_size=total)
    maps = (vendor_user, vendor_offsets, item_vendor, item_offsets, item_user, user_offsets)
    tiles = (lengths + (TILE_ROWS - 1)) // TILE_ROWS
    segment = torch.repeat_interleave(tiles)
    within = torch.arange(len(segment)) - (tiles.cumsum(0) - tiles)[segment]
    start = user_offsets[segment] + within * TILE_ROWS
    rows = (user_offsets[1:][segment] - start).clamp_max(TILE_ROWS)
    return (*maps, segment, start, rows)


def our_maps(vendors: Any, items: Any) -> tuple[Any, ...]:
    """The same in `ikbo_tree.mapping`."""
    packed = build.pack_counts(STRUCTURE, (vendors, items), None)
    return packed, plans.cut_segments(packed.maps(2, 0).offsets, TILE_ROWS)


def our_tree(vendors: Any, items: Any) -> ikbo.BroadcastTree:
    """A whole tree, without a schedule."""
    return ikbo.BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user")


def check_maps(vendors: Any, items: Any) -> None:
    """Raises unless all contenders give the same."""
    packed, tiles = our_maps(vendors, items)
    expected = numpy_maps(vendors, items)
    found = [*packed.maps(1, 0)[:2], *packed.maps(2, 1)[:2], *packed.maps(2, 0)[:2], *tiles]
    other = torch_maps(torch.from_numpy(vendors), torch.from_numpy(items))
    for one, two, three in zip(found, expected, other, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(three.numpy(), two)


def counts_of(users: int, vendors: int, items: int) -> tuple[Any, Any]:
    """Uneven random counts: `vendors` a user on average, `items` in all."""
    rng = np.random.default_rng(0)
    per_user = rng.integers(vendors // 2, vendors + vendors // 2 + 1, users)
    weights = rng.dirichlet(np.full(int(per_user.sum()), 2.0))
    return per_user, rng.multinomial(items, weights)


def bench_counts(results: Results, name: str, counts: tuple[Any, Any], rounds: int) -> None:
    """One workload of counts."""
    check_maps(*counts)
    tensors = tuple(torch.from_numpy(array) for array in counts)
    timings = interleaved(
        {
            "ikbo-mapping": partial(our_maps, *counts),
            "numpy": partial(numpy_maps, *counts),
            "torch-repeat-interleave": partial(torch_maps, *tensors),
            "ikbo-tree": partial(our_tree, *counts),
        },
        rounds,
    )
    report(results, name, timings, "ikbo-mapping", {"ikbo-tree": "BroadcastTree.from_counts"})


def numpy_parents(vendor_user: Any, item_vendor: Any, users: int) -> tuple[Any, ...]:
    """Index, offsets and order of every two levels from parents in any order, in NumPy."""
    maps = []
    for index, rows in (
        (vendor_user, users),
        (item_vendor, len(vendor_user)),
        (vendor_user[item_vendor], users),
    ):
        offsets = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(np.bincount(index, minlength=rows), out=offsets[1:])
        maps += [index, offsets, np.argsort(index, kind="stable").astype(np.int32)]
    return tuple(maps)


def bench_parents(results: Results, name: str, counts: tuple[Any, Any], rounds: int) -> None:
    """Parents in random order."""
    rng = np.random.default_rng(1)
    above = [rng.permutation(np.repeat(np.arange(len(c), dtype=np.int32), c)) for c in counts]
    users = len(counts[0])

    def ours() -> Any:
        return build.pack_parents(STRUCTURE, above, users)

    fields = list(ours().fields().values())[1:]
    for one, two in zip(fields, numpy_parents(*above, users), strict=True):
        np.testing.assert_array_equal(one, two)
    timings = interleaved(
        {"ikbo-mapping": ours, "numpy": partial(numpy_parents, *above, users)}, rounds
    )
    report(results, name, timings, "ikbo-mapping")


def log_of(users: int, vendors: int, rows: int) -> dict[str, Any]:
    """A log in random order: sparse 62-bit ids, some 16 vendors a user, Zipf within it."""
    rng = np.random.default_rng(2)
    user = rng.integers(0, users, rows)
    vendor = (user * 7919 + np.minimum(rng.zipf(1.5, rows), 40) * 31) % vendors
    item = rng.integers(0, 300_000, rows)
    ids = rng.integers(0, 2**62, 300_000)
    return {"user": ids[user], "vendor": ids[::-1][vendor], "item": ids[item]}


def pandas_maps(frame: Any) -> tuple[Any, Any]:
    """Parents of vendors and items: one `ngroup` a level above the leaf, first rows of vendors."""
    user = frame.groupby("user", sort=False).ngroup().to_numpy()
    vendor = frame.groupby(["user", "vendor"], sort=False).ngroup().to_numpy()
    first = np.full(vendor.max() + 1, len(vendor), dtype=np.int64)
    first[vendor[::-1]] = np.arange(len(vendor) - 1, -1, -1)
    return user[first], vendor


def bench_keys(
    results: Results, name: str, log: dict[str, Any], make: Callable[[Any], Any], rounds: int
) -> None:
    """One workload of keys; `make` gives the columns their form."""
    columns = {level: make(column) for level, column in log.items()}
    frame = pd.DataFrame(
        {k: c.to_pandas() if isinstance(c, pa.Array) else c for k, c in columns.items()}
    )
    for one, two in zip(keys.group_keys(columns).parents, pandas_maps(frame), strict=True):
        np.testing.assert_array_equal(one, two)
    timings = interleaved(
        {
            "ikbo-mapping": partial(keys.group_keys, columns),
            "pandas": partial(pandas_maps, frame),
            "pandas-ngroup-3": lambda: frame.groupby([*columns], sort=False).ngroup(),
        },
        rounds,
    )
    notes = {
        "pandas": "the same maps: ngroup of user, of (user, vendor), and first rows",
        "pandas-ngroup-3": "one ngroup of (user, vendor, item): fewer maps",
    }
    report(results, name, timings, "ikbo-mapping", notes)


FIRST_TREE = """
import torch
import ikbo_tree
ikbo_tree.BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
"""
FIRST_LOOPS = """
import torch
import ikbo_tree
ikbo_tree.BroadcastTree.from_parents({"item": [1, 0, 1]}, root="user", root_rows=2)
"""


def bench_first_tree(results: Results, rounds: int) -> None:
    """Whole processes, from start to end."""

    def process(code: str, cache: str | None = None) -> None:
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, "NUMBA_CACHE_DIR": cache or empty}
            subprocess.run([sys.executable, "-c", code], check=True, cwd=empty, env=environment)

    with tempfile.TemporaryDirectory() as cache:
        timings = interleaved(
            {
                "import-torch": partial(process, "import torch", cache),
                "first-tree": partial(process, FIRST_TREE, cache),
                "first-loops": partial(process, FIRST_LOOPS, cache),
                "first-loops-compile": partial(process, FIRST_LOOPS),
            },
            rounds,
        )
    notes = {
        "first-tree": "import torch, import ikbo_tree, one small tree",
        "first-loops": "likewise a tree that needs the compiled loops; compiled before",
        "first-loops-compile": "the same with nothing compiled yet",
    }
    report(results, "first-tree", timings, "import-torch", notes)


def report(
    results: Results,
    name: str,
    timings: dict[str, Timing],
    ours: str,
    notes: dict[str, str] | None = None,
) -> None:
    """Adds the records, each with the ratio that the targets speak of."""
    notes = dict(notes or {})
    for who, timing in timings.items():
        if who != ours:
            ratio = f"{timings[ours].times_faster_than(timing):.2f}x the time of {ours}"
            notes[who] = f"{ratio}; {notes[who]}" if who in notes else ratio
    results.add(name, timings, notes=notes)


def main(
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 30,
    write: Annotated[bool, typer.Option(help="Write the results file.")] = True,
) -> None:
    """Times everything, prints a table and writes benchmarks/results/mapping_<device>.json."""
    torch.set_num_threads(1)
    results = Results("mapping", cpu_name(), ("pandas", "pyarrow", "numba"))
    results.ceilings = cpu_ceilings()
    million = counts_of(14_648, 8, 1_000_000)
    bench_counts(results, "map-1k", counts_of(15, 8, 1024), rounds)
    bench_counts(results, "map-1m", million, rounds)
    bench_counts(results, "map-1m-long", counts_of(125, 8, 1_000_000), rounds)
    bench_counts(results, "map-1m-single", counts_of(83_333, 8, 1_000_000), rounds)
    bench_parents(results, "map-1m-unsorted", million, max(rounds // 3, 1))
    log = log_of(15_000, 2_000, 1_000_000)
    few = max(rounds // 3, 1)
    bench_keys(results, "keys-1m", log, np.asarray, few)
    bench_keys(results, "keys-1m-many", log_of(200_000, 20_000, 1_000_000), np.asarray, few)
    bench_keys(results, "keys-1m-arrow-strings", log, lambda c: pa.array(c.astype("U")), few)
    bench_keys(results, "keys-1m-categorical", log, pd.Categorical, few)
    bench_first_tree(results, few)
    results.show()
    if write:
        typer.echo(f"wrote {results.write()}")


if __name__ == "__main__":
    typer.run(main)
