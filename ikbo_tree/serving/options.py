"""How a server is set up: the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.endpoints import MAX_BODY
from ikbo_tree.serving.export import load
from ikbo_tree.serving.metrics import Metrics, PrometheusMetrics
from ikbo_tree.serving.runner import GraphRunner
from ikbo_tree.serving.tracing import OpenTelemetrySpans, hook


@dataclass(frozen=True)
class Options:
    """Of one server; every replica has the same.

    Attributes:
        model: the file that `save` wrote.
        capacities: rows of every level that a batch may have; on a GPU a graph for each.
        device: cpu, cuda, ...
        impl: implementation of the tree's ops.
        threads: torch's threads on a CPU.
        max_delay_s: how long a request waits for others.
        max_requests: most requests of one batch.
        max_queued_requests: more are refused with 503.
        max_queued_bytes: more are refused with 503.
        timeout_s: requests that waited longer get 504.
        max_body: most bytes of a request.
        cache_bytes: see `GraphRunner`.
        tracing: `module:function` that sets up OpenTelemetry in a process that serves (see
            `tracing.hook`); None: no spans.
    """

    model: Path
    capacities: tuple[Mapping[str, int], ...]
    device: str = "cpu"
    impl: str = "auto"
    threads: int = 1
    max_delay_s: float = 0.002
    max_requests: int = 64
    max_queued_requests: int = 256
    max_queued_bytes: int = 256 << 20
    timeout_s: float | None = 10.0
    max_body: int = MAX_BODY
    cache_bytes: int = 0
    tracing: str | None = None

    def batcher(self, metrics: Metrics | None = None) -> TreeBatcher:
        """Loads the model and starts a batcher.

        Args:
            metrics: told of everything; default: for Prometheus.
        """
        import torch

        if self.tracing is not None:
            hook(self.tracing)()
        torch.set_num_threads(self.threads)
        model, signature = load(self.model, device=self.device)
        runner = GraphRunner(
            model,
            signature,
            self.capacities,
            device=self.device,
            impl=self.impl,
            cache_bytes=self.cache_bytes,
        )
        return TreeBatcher(
            runner,
            max_delay_s=self.max_delay_s,
            max_requests=self.max_requests,
            max_queued_requests=self.max_queued_requests,
            max_queued_bytes=self.max_queued_bytes,
            timeout_s=self.timeout_s,
            metrics=metrics or PrometheusMetrics(),
            spans=None if self.tracing is None else OpenTelemetrySpans(),
        )
