"""The Hopper kernel's launch in plain torch: the same arguments, tile after tile, flags and all.

It proves what the host passes (descriptors, rows, bases, maps) and what a tile does with it, on any
machine. Order inside a tile, registers and barriers are the kernel's own.
"""

import torch

from ikbo_tree.kernels.linear_compression.gluon_config import BK
from ikbo_tree.kernels.linear_compression.gluon_kernel import stages_kernel
from ikbo_tree.kernels.linear_compression.gluon_schedule import LEVELS, place

NAMES = stages_kernel.arg_names


def box(descriptor, at):
    """What the copy engine loads: float32, zero outside of the descriptor's sizes."""
    base, strides = descriptor.base, descriptor.strides
    whole = torch.as_strided(base, descriptor.shape, strides, base.storage_offset())
    found = torch.zeros(descriptor.block_shape)
    inside = [
        slice(first, min(first + size, limit))
        for first, size, limit in zip(at, descriptor.block_shape, descriptor.shape, strict=True)
    ]
    part = whole[tuple(inside)]
    found[tuple(slice(0, n) for n in part.shape)] = part.float()
    return found


def put(descriptor, at, values):
    """What it stores: what lies outside is dropped."""
    whole = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
    inside = tuple(
        slice(first, min(first + size, limit))
        for first, size, limit in zip(at, values.shape, descriptor.shape, strict=True)
    )
    part = whole[inside]
    part.copy_(values[tuple(slice(0, n) for n in part.shape)])


class Launch:
    """One launch: `kernel[grid](*args, FORM=form)` runs it."""

    def __getitem__(self, grid):
        assert grid[0] >= 1
        return self.run

    def run(self, *args, FORM, num_warps):
        self.given = dict(zip(NAMES, args, strict=False))
        self.FORM = FORM
        rows = self.values("rows", LEVELS)
        counts = self.values("live", LEVELS)
        lives = [n if c is None else int(c) for n, c in zip(rows, counts, strict=True)]
        counter = self.given["counter_ptr"]
        while True:
            number = int(counter[0])
            counter[0] += 1
            tile = place.fn(
                number, *lives, self.given["late"], FORM.result, FORM.row_blocks, FORM.column_blocks
            )
            if tile[0] < 0:
                break
            self.tile(*tile)
        if FORM.result >= 0:
            out = self.given["out"]
            torch.as_strided(out.base, out.shape, out.strides)[lives[FORM.result] :] = 0

    def values(self, name, n):
        return [self.given[f"{name}_{i}"] for i in range(n)]

    def tile(self, level, row, column, block, pair):
        FORM, given = self.FORM, self.given
        w, e = given[f"w_{level}"], given[f"e_{level}"]
        steps = given[f"steps_{level}"]
        assert steps >= 2
        columns = slice(column * FORM.BN, (column + 1) * FORM.BN)
        for r in range(block, block + 1 + pair):
            acc = torch.zeros(64, FORM.BN)
            for k in range(steps):
                left, right = (
                    box(w, [r * 64, k * BK]),
                    box(e, [row, k * BK, columns.start])[0],
                )
                if k == steps - 1:
                    left, right = left[:, : FORM.k_tail], right[: FORM.k_tail]
                acc += left @ right
            for edge, (slot, turn) in enumerate(FORM.edges):
                assert turn < FORM.join <= 3
                if slot == level:
                    index = given[f"index_{edge}"]
                    parent = row if index is None else int(index[row])
                    acc += self.partial(given[f"base_{edge}"] + parent, column, r, written=True)
            if level == FORM.result:
                put(given["out"], [row, r * 64, columns.start], acc[None])
            else:
                self.partial(given[f"own_{level}"] + row, column, r, written=False).copy_(acc)

    def partial(self, row, column, r, *, written):
        """A row block of a partial result; here in row order."""
        FORM = self.FORM
        flags = self.given["flags_ptr"]
        flag = (row * FORM.column_blocks + column) * FORM.row_blocks + r
        assert int(flags[flag]) == (2 if written else 0)
        flags[flag] = 2
        M16 = -(-self.given["M"] // 16) * 16
        at = ((row * FORM.column_blocks + column) * M16 + r * 64) * FORM.BN
        height = min(64, M16 - r * 64)
        block = self.given["partial_ptr"].view(-1)[at : at + height * FORM.BN].view(height, FORM.BN)
        if not written:
            return Clipped(block)
        return torch.nn.functional.pad(block.float(), (0, 0, 0, 64 - height))


class Clipped:
    """The beginning of a row block in memory."""

    def __init__(self, block):
        self.block = block

    def copy_(self, acc):
        assert not acc[self.block.shape[0] :].any()
        self.block.copy_(acc[: self.block.shape[0]])
