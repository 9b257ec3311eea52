"""`GraphRunner`: a model that scores merged batches, captured once for each capacity on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.errors import TreeError
from ikbo_tree.serving.buffers import TreeBuffers, full_batch, whole_capacity
from ikbo_tree.serving.cache import CoarseCache, Lookups
from ikbo_tree.serving.coarse import CoarseStage, Staged
from ikbo_tree.serving.errors import ScoringError
from ikbo_tree.serving.graphs import captured
from ikbo_tree.serving.merge import Merged, fits
from ikbo_tree.serving.signature import Signature

CHUNK_ROWS = {"cuda": 8, "cpu": 2}
"""Rows that a coarse part is run on at a time: what a GPU does at once, a CPU does in turn."""


@dataclass(frozen=True)
class Run:
    """One batch's scores and where its time went.

    Attributes:
        scores: [rows of the output level, ...] on the CPU, no view of anything that is reused.
        stages: by name the beginning and end of what was done, by `time.perf_counter`: "coarse",
            where the model has such parts (on a GPU: until they are launched); "copy" into the
            buffers and, on a GPU, the start of the copy to it; "launch", until scores are there.
        copied: bytes copied to the device.
        lookups: what caches of coarse results did, by table.
    """

    scores: Tensor
    stages: Mapping[str, tuple[float, float]]
    copied: int
    lookups: Mapping[str, Lookups] = field(default_factory=dict)

    @property
    def fill_s(self) -> float:
        """Seconds of writing the batch into the buffers."""
        begin, end = self.stages["copy"]
        return end - begin

    @property
    def run_s(self) -> float:
        """Seconds of coarse parts, launch and wait."""
        return sum(end - begin for name, (begin, end) in self.stages.items() if name != "copy")


class GraphRunner:
    """Scores batches with a model, `model(tree=tree, **inputs)`.

    On a GPU the model is captured once for each capacity and replayed for every batch that fits:
    live counts are on the device. On a CPU it runs as it is. Calls take turns.

    Args:
        model: a module in evaluation mode, or what `load` gives; a `Staged` one if the signature
            has coarse parts.
        signature: what it takes.
        capacities: rows of every level, one or several such; a batch takes the first that it fits
            after ordering by rows of the output level.
        device: where the model's parameters are.
        impl: implementation of the tree's ops.
        fixed: see `TreeBuffers`.
        cache_bytes: of coarse results kept on the device for each table with a coarse part; it is
            allocated at once. Room for the results of one batch comes on top.
        chunk_rows: rows that a coarse part is run on at a time, by default as `CHUNK_ROWS`.

    Attributes:
        caches: by table what is kept of coarse results.
        scores: dtype, and shape of one row of the scores.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        signature: Signature,
        capacities: Mapping[str, int] | Sequence[Mapping[str, int]],
        *,
        device: torch.device | str = "cpu",
        impl: str = "auto",
        fixed: bool | None = None,
        cache_bytes: int = 0,
        chunk_rows: int | None = None,
    ) -> None:
        given = [capacities] if isinstance(capacities, Mapping) else list(capacities)
        if not given:
            raise TreeError("capacities", "must hold at least one", "none")
        self.signature = signature
        self.device = torch.device(device)
        self._model, self._impl = model, impl
        self._turn = threading.Lock()
        given.sort(key=lambda capacity: capacity.get(signature.output, 0))
        largest = whole_capacity(signature, given[-1])
        if not all(fits(whole_capacity(signature, c), largest) for c in given):
            raise TreeError("capacities", "must grow at every level together", str(given))
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = []
        with torch.no_grad(), ikbo.implementation(impl), self._on_device():
            self._coarse = self._stage(model, largest, cache_bytes, chunk_rows)
            if self._coarse is not None:
                self._model, signature = self._coarse.score, self._coarse.signature
            self._buffers = [TreeBuffers(signature, c, device=device, fixed=fixed) for c in given]
            for buffers in self._buffers:
                if self.device.type == "cuda":
                    self._graphs.append(self._captured(buffers))
                    result = self._graphs[-1][1]
                else:  # whatever is loaded or compiled at a first call
                    # Few rows, and other numbers of them at each level.
                    few = {n: min(c, 2 + i) for i, (n, c) in enumerate(buffers.capacity.items())}
                    tree, inputs = buffers.fill(full_batch(signature, few))
                    result = self._checked(self._model(tree=tree, **inputs), tree)
                self.scores = result.dtype, tuple(result.shape[1:])
        self.caches: dict[str, CoarseCache] = (
            {} if self._coarse is None else {t: x.cache for t, x in self._coarse.tables.items()}
        )

    def _stage(
        self,
        model: Callable[..., Tensor],
        capacity: Mapping[str, int],
        cache_bytes: int,
        chunk_rows: int | None,
    ) -> CoarseStage | None:
        if not self.signature.coarse:
            if cache_bytes:
                raise TreeError(
                    "cache_bytes", "must be 0: the model has no coarse parts", str(cache_bytes)
                )
            return None
        if not isinstance(model, Staged) or model.signature != self.signature:
            raise TreeError("model", "must be Staged with the same signature", type(model).__name__)
        return CoarseStage(
            model,
            capacity,
            device=self.device,
            cache_bytes=cache_bytes,
            chunk_rows=chunk_rows or CHUNK_ROWS.get(self.device.type, 2),
        )

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def capacity(self) -> dict[str, int]:
        """The most rows a batch may have."""
        return self._buffers[-1].capacity

    def run(self, merged: Merged) -> Run:
        """Scores one batch.

        Args:
            merged: of at most `capacity` rows.

        Raises:
            ScoringError: the result has other rows than the output level.
            Exception: whatever the model raises.
        """
        with self._turn, torch.no_grad(), ikbo.implementation(self._impl), self._on_device():
            try:
                return self._run(merged)
            except BaseException:
                if self._graphs:  # what is launched may still read memory that the next batch fills
                    torch.cuda.current_stream().synchronize()
                raise

    def _run(self, merged: Merged) -> Run:
        at = next(i for i, b in enumerate(self._buffers) if fits(merged.rows, b.capacity))
        buffers = self._buffers[at]
        stages: dict[str, tuple[float, float]] = {}
        lookups: dict[str, Lookups] = {}
        copied = 0
        begin = time.perf_counter()
        if self._coarse is not None:
            merged, lookups, copied = self._coarse.prepared(merged)
            stages["coarse"] = begin, time.perf_counter()
            begin = stages["coarse"][1]
        tree, inputs = buffers.fill(merged)
        copied += buffers.copy()
        filled = time.perf_counter()
        live = merged.rows[self.signature.output]
        if self._graphs:
            graph, result, host = self._graphs[at]
            graph.replay()
            host[:live].copy_(result[:live], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            scores = host[:live].clone()
        else:
            scores = self._checked(self._model(tree=tree, **inputs), tree)[:live].clone()
        stages |= {"copy": (begin, filled), "launch": (filled, time.perf_counter())}
        return Run(scores, stages, copied, lookups)

    def check(self) -> None:
        """Raises if the device can't be used any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _captured(self, buffers: TreeBuffers) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """The graph, the tensor that it writes, and pinned memory for that."""
        tree, inputs = buffers.fill(full_batch(buffers.signature, buffers.capacity))
        buffers.copy()
        graph, result = captured(lambda: self._checked(self._model(tree=tree, **inputs), tree))
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        return graph, result, host

    def _checked(self, result: Tensor, tree: ikbo.BroadcastTree) -> Tensor:
        rows = tree.capacity(self.signature.output)
        if not isinstance(result, Tensor) or not result.dim() or len(result) != rows:
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ScoringError(
                f"the model must give {rows} rows, level {self.signature.output!r}; got {got}"
            )
        return result
