import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree.kernels.common.triton_tiles import find_segment, find_tile, tile_count


@triton.jit
def _tiles(offsets_ptr, out_ptr, segments, rows, n_seed, T: tl.constexpr):
    tile = tl.program_id(0)
    segment, first, end = find_tile(offsets_ptr, segments, rows, tile, n_seed, T)
    tl.store(out_ptr + tile * 3, segment.to(tl.int64))
    tl.store(out_ptr + tile * 3 + 1, first)
    tl.store(out_ptr + tile * 3 + 2, end)


@triton.jit(do_not_specialize=["segments"])
def _segments(offsets_ptr, out_ptr, segments):
    row = tl.program_id(0) * 7
    tl.store(out_ptr + tl.program_id(0), find_segment(offsets_ptr, segments, row))


def tiles_of(counts, spare, n_seed, T, device):
    """[tiles, 3] segment, first, end as the device finds them."""
    offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    rows, segments = int(offsets[-1]) + spare, len(counts)
    out = torch.full((tile_count(rows, segments, n_seed, T), 3), -1, device=device)
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    _tiles[(len(out),)](offsets, out, segments, rows, n_seed, T=T)
    return out.tolist()


def naive(counts, spare, n_seed, T):
    """Every tile that has rows, in order."""
    found, begin = [], 0
    for segment, count in enumerate([*counts, spare]):
        end = begin + count * n_seed
        found += [[segment, first, end] for first in range(begin, end, T)]
        begin = end
    return found


def check(counts, spare, n_seed, T, device):
    tiles = tiles_of(counts, spare, n_seed, T, device)
    assert [tile for tile in tiles if tile[1] < tile[2]] == naive(counts, spare, n_seed, T)


@pytest.mark.parametrize(
    ("counts", "spare", "n_seed", "T"),
    [
        ([5, 0, 2], 1, 1, 4),
        ([], 0, 1, 16),
        ([], 3, 5, 4),
        ([0, 0, 0], 0, 1, 16),
        ([1, 0, 5, 4, 0], 7, 65, 64),
        ([16, 16, 32], 16, 1, 16),
        ([1] * 130, 0, 1, 16),
        ([0] * 70 + [9] + [0] * 70, 2, 3, 4),
        ([300, 1, 1], 5, 1, 16),
    ],
)
def test_every_row_is_in_one_tile(counts, spare, n_seed, T, device):
    check(counts, spare, n_seed, T, device)


@settings(max_examples=10, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), max_size=9),
    spare=st.integers(0, 9),
    n_seed=st.sampled_from([1, 2, 5, 64]),
    T=st.sampled_from([4, 16]),
)
def test_random_segments(counts, spare, n_seed, T):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(counts, spare, n_seed, T, device)


def test_folded_rows_pass_two_to_the_31(device):
    rows, n_seed, T = 2**30, 8, 2**28
    offsets = torch.tensor([0, 2**29, 2**30], dtype=torch.int32, device=device)
    out = torch.zeros((tile_count(rows, 2, n_seed, T), 3), dtype=torch.int64, device=device)
    _tiles[(len(out),)](offsets, out, 2, rows, n_seed, T=T)
    full = [tile for tile in out.tolist() if tile[1] < tile[2]]
    assert full == naive([2**29, 2**29], 0, n_seed, T)


@pytest.mark.parametrize("segments", [1, 2, 127, 128, 129, 400])
def test_a_row_finds_its_segment(segments, device):
    counts = np.random.default_rng(segments).integers(0, 3, segments)
    counts[segments // 2] += 1
    offsets = torch.tensor(np.concatenate(([0], counts.cumsum())), dtype=torch.int32)
    want = np.repeat(np.arange(segments), counts)[::7]
    out = torch.full(want.shape, -1, dtype=torch.int32, device=device)
    _segments[want.shape](offsets.to(device), out, segments)
    assert out.tolist() == want.tolist()
