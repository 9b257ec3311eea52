"""Workloads of `target_attention` on a GPU, and their tensors as ours and as peers want them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import ikbo_tree as ikbo


@dataclass(frozen=True)
class Workload:
    """One call of the op.

    Attributes:
        name: as results files have it.
        counts: rows of each level below each row of the one above it, by level.
        keys: S of every level that owns keys.
        vendor_keys: S of the vendors where it is another.
        n: query rows an item.
        heads: of queries and keys.
        dim: width of a head.
    """

    name: str
    counts: dict[str, np.ndarray]
    keys: int
    n: int = 64
    heads: int = 2
    dim: int = 128
    vendor_keys: int | None = None

    def keys_of(self, level: str) -> int:
        """S of a level."""
        return self.vendor_keys or self.keys if level == "vendor" else self.keys

    @property
    def uniform(self) -> bool:
        """Two levels and as many items for each user, so that one dense call does it."""
        items = self.counts["item"]
        return len(self.counts) == 1 and bool((items == items[0]).all())


def _even(users: int, ratio: int, keys: int, n: int = 64) -> Workload:
    return Workload(f"attn-s{keys}-r{ratio}-n{n}-h2-d128", {"item": np.full(users, ratio)}, keys, n)


def _uneven(keys: int) -> Workload:
    """1 to 130 items a user, 2048 in all."""
    counts = np.random.default_rng(7).integers(1, 131, 64)
    counts = counts[: int(np.searchsorted(counts.cumsum(), 2048)) + 1]
    counts[-1] -= counts.sum() - 2048
    return Workload(f"attn-s{keys}-r64-n64-h2-d128-uneven", {"item": counts}, keys)


def _three(keys: int, n: int) -> Workload:
    """16 users with 4 to 40 vendors of 1 to 30 items."""
    rng = np.random.default_rng(5)
    vendors = rng.integers(4, 41, 16)
    counts = {"vendor": vendors, "item": rng.integers(1, 31, vendors.sum())}
    return Workload(f"attn3-s{keys}-n{n}-h2-d128", counts, keys, n)


def _history_and_shop(items: int) -> Workload:
    """16 users with 1024 keys and 16 vendors each, which have 128 keys and so many items."""
    counts = {"vendor": np.full(16, 16), "item": np.full(256, items)}
    return Workload(f"attn3-u1024-v128-i{items}-n64-h2-d128", counts, 1024, vendor_keys=128)


def _mixed(keys: int) -> Workload:
    """32 users, 63 to 65 items each, every second number odd; 2048 in all."""
    return Workload(
        f"attn-s{keys}-r64-n64-h2-d128-odd-even",
        {"item": np.tile([63, 64, 65, 64], 8)},
        keys,
    )


def _four(keys: int) -> Workload:
    """16 users, 8 vendors each, 2 products each, 4 items each; all but items own keys."""
    counts = {"vendor": np.full(16, 8), "product": np.full(128, 2), "item": np.full(256, 4)}
    return Workload(f"attn4-s{keys}-n64-h2-d128", counts, keys)


def sweeps() -> dict[str, Workload]:
    """Numbers that vary one at a time, by name: query rows, items a user, keys, levels."""
    found = [_even(32, 64, 1024, n) for n in (1, 5, 16, 32, 64, 65)]
    found += [_even(32, 63, 1024), _even(32, 65, 1024), _even(2048, 1, 1024), _mixed(1024)]
    found += [_even(32, 64, 8192), _even(32, 64, 16384), _four(256)]
    return {workload.name: workload for workload in found}


def workloads() -> dict[str, Workload]:
    """What is measured by default, by name."""
    found = [_even(32, 64, keys) for keys in (512, 1024, 2048, 4096)]
    found += [_uneven(keys) for keys in (512, 1024, 2048, 4096)]
    found += [_even(2048, 64, 512, 1), _even(2048, 64, 2048, 1), _even(256, 512, 2048, 1)]
    found += [_even(1, 64, 4096, 1), _three(512, 64), _three(512, 1), _history_and_shop(8)]
    return {workload.name: workload for workload in found}


class Data:
    """Tensors of a workload, on the current device; queries, keys and values want gradients."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.tree = ikbo.BroadcastTree.from_counts(workload.counts, root="user").to("cuda")
        self.levels = self.tree.levels[:-1]
        n, heads, dim = workload.n, workload.heads, workload.dim

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()

        self.q = make(self.tree.rows("item"), n, heads, dim)
        self.memories = {
            level: (
                make(self.tree.rows(level), workload.keys_of(level), heads, dim),
                make(self.tree.rows(level), workload.keys_of(level), heads, dim),
            )
            for level in self.levels
        }
        self.grad = torch.randn_like(self.q)

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        return [self.q, *(x for pair in self.memories.values() for x in pair)]

    @property
    def flops(self) -> float:
        """Useful operations of a forward."""
        return 4.0 * self.q.numel() * sum(map(self.workload.keys_of, self.levels))

    @property
    def traffic(self) -> int:
        """Bytes of queries, keys, values and output, each once."""
        return self.q.nbytes + sum(x.nbytes for x in self.leaves)

    @property
    def folded(self) -> tuple[Tensor, Tensor, Tensor]:
        """[users, rows, heads, dim] queries of a uniform workload, and keys and values."""
        k, v = self.memories["user"]
        return self.q.view(k.shape[0], -1, *self.q.shape[2:]), k, v

    def packed(self, level: str) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, heads, dim] queries, keys and values of one level, one segment after another."""
        k, v = self.memories[level]
        return self.q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)

    @functools.cache  # noqa: B019  # a handful of them, as long as the process
    def borders(self, level: str) -> tuple[Tensor, Tensor, int]:
        """Where segments begin, int32: query rows, keys; and the most query rows of one."""
        rows = self.tree.offsets("item", of=level) * self.workload.n
        keys = torch.arange(len(rows), device="cuda", dtype=torch.int32) * self.workload.keys_of(
            level
        )
        return rows, keys, int(rows.diff().max())

    def ours(self, impl: str) -> Tensor:
        """The public function."""
        found = ikbo.target_attention(
            self.q, self.memories, tree=self.tree, level="item", impl=impl
        )
        assert isinstance(found, Tensor)
        return found
