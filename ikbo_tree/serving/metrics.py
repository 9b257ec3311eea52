"""What a server tells about itself: nothing, or Prometheus metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikbo_tree.extras import require
from ikbo_tree.serving.cache import Lookups

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
ROWS = tuple(4.0**i for i in range(10))


@dataclass(frozen=True)
class BatchFacts:
    """One batch that was scored.

    Attributes:
        queue_s: seconds that each of its requests waited.
        merge_s: seconds of merging, of writing into the buffers, and of starting the copy.
        run_s: seconds of coarse parts, launch and wait.
        split_s: seconds of handing scores back.
        copied: bytes copied to the device.
        rows: live rows of every level and table.
        bytes_not_moved: see `Merged`.
        lookups: what caches of coarse results did, by table.
    """

    queue_s: Sequence[float]
    merge_s: float
    run_s: float
    split_s: float
    copied: int
    rows: Mapping[str, int]
    bytes_not_moved: int
    lookups: Mapping[str, Lookups] = field(default_factory=dict)


class Metrics:
    """Told of everything that happens in a batcher; this one forgets it."""

    def waiting(self, requests: int, nbytes: int) -> None:
        """The queue's length changed."""

    def batch(self, facts: BatchFacts) -> None:
        """A batch was scored."""

    def answered(self, status: int) -> None:
        """A request got its scores (200), or an error with this status."""

    def text(self) -> tuple[bytes, str]:
        """All values as a scraper reads them, and their content type."""
        return b"", "text/plain; charset=utf-8"


class PrometheusMetrics(Metrics):
    """Counters and histograms in a registry of their own, one for each batcher.

    Args:
        labels: constant labels of all metrics, e.g. `{"replica": "3"}`.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        prometheus: Any = require("prometheus_client", "serve")
        self._prometheus = prometheus
        self._registry = prometheus.CollectorRegistry()
        self._values = tuple((labels or {}).values())
        names = tuple(labels or {})

        def made(kind: Any, name: str, about: str, more: tuple[str, ...] = (), **how: Any) -> Any:
            metric = kind(
                f"ikbo_tree_{name}", about, (*names, *more), registry=self._registry, **how
            )
            return metric if more or not names else metric.labels(*self._values)

        histogram, counter, gauge = (
            prometheus.Histogram,
            prometheus.Counter,
            prometheus.Gauge,
        )
        timed = {
            "queue": "Seconds from a request's arrival to the start of its batch",
            "merge": "Seconds of merging a batch and writing it into the buffers",
            "run": "Seconds of a batch's coarse parts, launch and wait",
            "split": "Seconds of handing a batch's scores back",
        }
        self._seconds = {
            part: made(histogram, f"{part}_seconds", about, buckets=SECONDS)
            for part, about in timed.items()
        }
        self._size = made(
            histogram,
            "batch_requests",
            "Requests of a batch",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )
        self._rows = made(histogram, "batch_rows", "Live rows of a batch", ("level",), buckets=ROWS)
        self._copied = made(counter, "copied_bytes", "Bytes copied to the device")
        self._saved = made(
            counter, "bytes_not_moved", "Bytes that copies to the output level would have written"
        )
        self._coarse = made(
            counter,
            "coarse_rows",
            "Table rows by what the cache of coarse results had: hit, miss or unversioned",
            ("table", "outcome"),
        )
        self._evicted = made(
            counter, "coarse_evictions", "Coarse results that went to make room", ("table",)
        )
        self._answers = made(counter, "answers", "Requests by HTTP status", ("status",))
        self._waiting = made(gauge, "waiting_requests", "Requests in the queue")
        made(gauge, "process_id", "The server's process").set(os.getpid())
        self._waiting_bytes = made(gauge, "waiting_bytes", "Bytes of the requests in the queue")

    def waiting(self, requests: int, nbytes: int) -> None:
        """See `Metrics`."""
        self._waiting.set(requests)
        self._waiting_bytes.set(nbytes)

    def batch(self, facts: BatchFacts) -> None:
        """See `Metrics`."""
        for seconds in facts.queue_s:
            self._seconds["queue"].observe(seconds)
        self._seconds["merge"].observe(facts.merge_s)
        self._seconds["run"].observe(facts.run_s)
        self._seconds["split"].observe(facts.split_s)
        self._size.observe(len(facts.queue_s))
        for level, rows in facts.rows.items():
            self._rows.labels(*self._values, level).observe(rows)
        self._copied.inc(facts.copied)
        self._saved.inc(facts.bytes_not_moved)
        for table, lookups in facts.lookups.items():
            outcomes = {
                "hit": lookups.hits,
                "miss": lookups.misses,
                "unversioned": lookups.unversioned,
            }
            for outcome, rows in outcomes.items():
                self._coarse.labels(*self._values, table, outcome).inc(rows)
            self._evicted.labels(*self._values, table).inc(lookups.evicted)

    def answered(self, status: int) -> None:
        """See `Metrics`."""
        self._answers.labels(*self._values, str(status)).inc()

    def text(self) -> tuple[bytes, str]:
        """See `Metrics`."""
        prometheus = self._prometheus
        return prometheus.generate_latest(self._registry), prometheus.CONTENT_TYPE_LATEST
