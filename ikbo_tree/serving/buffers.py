"""Memory that every batch is written into: inputs and maps at fixed places, one copy to a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.serving.merge import Merged, merge
from ikbo_tree.serving.request import Request, check
from ikbo_tree.serving.signature import Input, Signature
from ikbo_tree.tree import BroadcastTree
from ikbo_tree.tree.host import split

ALIGNMENT = 256
"""Bytes; what CUDA's own allocations have, so that kernels choose the same loads."""


def whole_capacity(signature: Signature, capacity: Mapping[str, int]) -> dict[str, int]:
    """Capacity of every level and table; a table's is its level's unless it is given.

    Raises:
        TreeError: a level is missing, a name unknown, or no row allowed.
    """
    places = (*signature.levels, *signature.tables)
    for name in capacity:
        if name not in places:
            raise TreeError("capacity", f"must name {list(places)}", repr(name))
    for level in signature.levels:
        if capacity.get(level, 0) < 1:
            rule = f"must give at least 1 row to each of {list(signature.levels)}"
            raise TreeError("capacity", rule, f"{level!r}: {capacity.get(level)}")
    return {level: capacity[level] for level in signature.levels} | {
        table: max(capacity.get(table, 0), capacity[level])
        for table, level in signature.tables.items()
    }


def full_batch(signature: Signature, capacity: Mapping[str, int]) -> Merged:
    """A batch that fills `capacity`, children dealt out evenly, every value a filling."""
    counts = {}
    for level, above in signature.parents.items():
        share = torch.full((capacity[above],), capacity[level] // capacity[above])
        share[: capacity[level] % capacity[above]] += 1
        counts[level] = share
    inputs = {
        name: torch.full(
            (capacity[signature.level_of(given.at)], *given.shape), given.filling, dtype=given.dtype
        )
        for name, given in signature.inputs.items()
    }
    request = Request(counts, inputs, root_rows=capacity[signature.root])
    return merge(signature, [check(request, signature, max_rows=max(capacity.values()))])


class Layout:
    """Where tensors lie in one buffer of bytes.

    Args:
        tensors: for each name its rows and what one of them is.
        start: bytes before the first.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, Input]], *, start: int = 0) -> None:
        self._tensors = dict(tensors)
        self._places, at = {}, _aligned(start)
        for name, (rows, given) in tensors.items():
            self._places[name] = (at, rows * given.row_bytes)
            at += _aligned(rows * given.row_bytes)
        self.nbytes = at

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer [nbytes] of uint8."""
        views = {}
        for name, (rows, given) in self._tensors.items():
            at, size = self._places[name]
            views[name] = buffer[at : at + size].view(given.dtype).view(rows, *given.shape)
        return views


class TreeBuffers:
    """Room for one batch of at most `capacity` rows a level.

    On a GPU inputs and maps lie in one pinned buffer and, at the same places, in one of the
    device's; `fill` and one asynchronous copy bring a batch over, and what was captured on the
    device's tensors sees it. On a CPU there is one buffer, and `fill` gives views of its live part.

    Args:
        signature: of the model.
        capacity: rows of every level, for tables too if they shall have more than their level.
        device: where the model runs.
        fixed: give tensors and maps of the whole capacity at every call; default on a GPU.
    """

    def __init__(
        self,
        signature: Signature,
        capacity: Mapping[str, int],
        *,
        device: torch.device | str = "cpu",
        fixed: bool | None = None,
    ) -> None:
        self.signature = signature
        self.capacity = whole_capacity(signature, capacity)
        self.device = torch.device(device)
        self.fixed = self.device.type == "cuda" if fixed is None else fixed
        # Exported programs may have been specialised against sizes of 0 and 1.
        allocated = {name: max(n, 2) for name, n in self.capacity.items()}
        tree = full_batch(signature, self.capacity).tree(allocated)
        host = tree._host_maps()
        self._allocated, self._schema, self._sizes = allocated, tree._schema, host.sizes
        layout = Layout(
            {name: (allocated[given.at], given) for name, given in signature.inputs.items()},
            start=host.buffer.nbytes,
        )
        pinned = self.device.type == "cuda"
        self._host = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._there = self._host if self.device.type == "cpu" else self._host.to(self.device)
        maps = slice(0, host.buffer.nbytes)
        self._maps = self._host[maps].view(torch.int32)
        self._inputs = layout.views(self._host)
        self._written = {name: allocated[x.at] for name, x in signature.inputs.items()}
        self.inputs = layout.views(self._there)
        self.tree = BroadcastTree._from_fields(
            self._schema, split(self._there[maps].view(torch.int32), self._sizes)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, which on a GPU there is twice."""
        return self._host.nbytes

    def fill(self, merged: Merged) -> tuple[BroadcastTree, dict[str, Tensor]]:
        """Writes a batch, and clears what an earlier, larger one left behind it.

        Args:
            merged: of at most `capacity` rows.

        Returns:
            The tree and the inputs that the model takes: on a GPU always the same tensors, on
            the device, which have the batch after `copy`.
        """
        rows = merged.rows
        for name, given in self.signature.inputs.items():
            live, whole = rows[given.at], self._inputs[name]
            merged.write(name, whole[:live])
            if self._written[name] > live:
                whole[live : self._written[name]] = given.filling
            self._written[name] = live
        if not self.fixed:
            sizes = {name: max(rows[name], 2) for name in self._allocated}
            views = {
                name: self._inputs[name][: sizes[given.at]]
                for name, given in self.signature.inputs.items()
            }
            return merged.tree(sizes), views
        tree = merged.tree(self._allocated)
        self._maps.copy_(torch.from_numpy(tree._host_maps().buffer))
        return self.tree, self.inputs

    def copy(self) -> int:
        """Starts the copy to the device, if it has memory of its own; bytes that it moves."""
        if self._there is self._host:
            return 0
        self._there.copy_(self._host, non_blocking=True)
        return self._host.nbytes


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
