"""`GraphRunner`: a model that scores merged batches, captured once for each capacity on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.errors import TreeError
from ikbo_tree.serving.buffers import TreeBuffers, full_batch
from ikbo_tree.serving.errors import ScoringError
from ikbo_tree.serving.merge import Merged, fits
from ikbo_tree.serving.signature import Signature


@dataclass(frozen=True)
class Run:
    """One batch's scores and where its time went.

    Attributes:
        scores: [rows of the output level, ...] on the CPU, no view of anything that is reused.
        fill_s: seconds of writing the batch into the buffers.
        run_s: seconds of copies, launch and wait.
        copied: bytes copied to the device.
    """

    scores: Tensor
    fill_s: float
    run_s: float
    copied: int


class GraphRunner:
    """Scores batches with a model, `model(tree=tree, **inputs)`.

    On a GPU the model is captured once for each capacity and replayed for every batch that fits:
    live counts are on the device. On a CPU it runs as it is. Calls take turns.

    Args:
        model: a module in evaluation mode, or what `load` gives.
        signature: what it takes.
        capacities: rows of every level, one or several such; a batch takes the first that it fits
            after ordering by rows of the output level.
        device: where the model's parameters are.
        impl: implementation of the tree's ops.
        fixed: see `TreeBuffers`.
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
    ) -> None:
        given = [capacities] if isinstance(capacities, Mapping) else list(capacities)
        if not given:
            raise TreeError("capacities", "must hold at least one", "none")
        self.signature = signature
        self.device = torch.device(device)
        self._model, self._impl = model, impl
        self._turn = threading.Lock()
        given.sort(key=lambda capacity: capacity.get(signature.output, 0))
        self._buffers = [TreeBuffers(signature, c, device=device, fixed=fixed) for c in given]
        largest = self._buffers[-1].capacity
        if not all(fits(b.capacity, largest) for b in self._buffers):
            raise TreeError("capacities", "must grow at every level together", str(given))
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = []
        with torch.no_grad(), ikbo.implementation(impl):
            for buffers in self._buffers:
                if self.device.type == "cuda":
                    self._graphs.append(self._captured(buffers))
                else:  # whatever is loaded or compiled at a first call
                    # Few rows, and other numbers of them at each level.
                    few = {n: min(c, 2 + i) for i, (n, c) in enumerate(buffers.capacity.items())}
                    tree, inputs = buffers.fill(full_batch(signature, few))
                    self._checked(self._model(tree=tree, **inputs), tree)

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
        with self._turn, torch.no_grad(), ikbo.implementation(self._impl):
            at = next(i for i, b in enumerate(self._buffers) if fits(merged.rows, b.capacity))
            buffers = self._buffers[at]
            begin = time.perf_counter()
            tree, inputs = buffers.fill(merged)
            filled = time.perf_counter()
            live = merged.rows[self.signature.output]
            copied = 0
            if self._graphs:
                graph, result, host = self._graphs[at]
                with torch.cuda.device(self.device):
                    copied = buffers.copy()
                    graph.replay()
                    host[:live].copy_(result[:live], non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                scores = host[:live].clone()
            else:
                scores = self._checked(self._model(tree=tree, **inputs), tree)[:live].clone()
            done = time.perf_counter()
        return Run(scores, filled - begin, done - filled, copied)

    def check(self) -> None:
        """Raises if the device can't be used any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _captured(self, buffers: TreeBuffers) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """The graph, the tensor that it writes, and pinned memory for that."""
        with torch.cuda.device(self.device):
            tree, inputs = buffers.fill(full_batch(self.signature, buffers.capacity))
            buffers.copy()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # kernels compile, libraries choose, before anything is captured
                    self._checked(self._model(tree=tree, **inputs), tree)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self._checked(self._model(tree=tree, **inputs), tree)
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
