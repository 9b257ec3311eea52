"""Where a request's time went, as spans of OpenTelemetry.

    ikbo_tree.score            one a request, in the trace of its caller
      ikbo_tree.queue          from its arrival to its batch's turn
      ikbo_tree.merge          its batch: into one tree
      ikbo_tree.coarse         coarse parts of the model, where there are some
      ikbo_tree.copy           into the buffers; on a GPU, the start of the copy to it
      ikbo_tree.launch         the model, until scores are there
      ikbo_tree.split          cut to requests

All requests of a batch have spans of its stages, since each trace is sampled, kept and looked at
by itself. They are made afterwards from times that are taken anyway. A request that is not sampled
costs one call.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from ikbo_tree.extras import require
from ikbo_tree.serving.metrics import BatchFacts

PREFIX = "ikbo_tree."
"""Of the names of spans and attributes."""


class Spans:
    """Told of every request's way through a batcher; this one forgets it."""

    @contextmanager
    def within(self, headers: Mapping[str, str]) -> Iterator[None]:
        """While a request is submitted: in its caller's context, which its headers name."""
        yield

    def arrived(self) -> object:
        """A request came, in its caller's context; what stands for it below, None for nothing."""
        return None

    def batch(
        self,
        requests: Sequence[object],
        begin: float,
        stages: Mapping[str, tuple[float, float]],
        facts: BatchFacts | None,
    ) -> None:
        """A batch was scored, or failed.

        Args:
            requests: what `arrived` gave for them.
            begin: when it started, as all times by `time.perf_counter`.
            stages: beginning and end of each.
            facts: of a batch that was scored.
        """

    def answered(self, request: object, error: BaseException | None) -> None:
        """A request got its scores, or an error."""


@dataclass
class _Request:
    span: Any
    arrived: float
    waits: bool = True


class OpenTelemetrySpans(Spans):
    """Spans for the tracer provider that the process has, by `opentelemetry.trace`.

    Args:
        provider: another one.
    """

    def __init__(self, provider: Any = None) -> None:
        self._api: Any = require("opentelemetry.trace", "tracing")
        self._context: Any = require("opentelemetry.context", "tracing")
        self._propagate: Any = require("opentelemetry.propagate", "tracing")
        self._tracer = self._api.get_tracer("ikbo_tree.serving", tracer_provider=provider)

    @contextmanager
    def within(self, headers: Mapping[str, str]) -> Iterator[None]:
        """See `Spans`; a span that the server around this one has opened stays the parent."""
        if self._api.get_current_span().get_span_context().is_valid:
            yield
            return
        token = self._context.attach(self._propagate.extract(headers))
        try:
            yield
        finally:
            self._context.detach(token)

    def arrived(self) -> object:
        """See `Spans`."""
        remote = self._api.get_current_span().get_span_context().is_remote
        kind = self._api.SpanKind.SERVER if remote else self._api.SpanKind.INTERNAL
        span = self._tracer.start_span(PREFIX + "score", kind=kind)
        return _Request(span, time.perf_counter()) if span.is_recording() else None

    def batch(
        self,
        requests: Sequence[object],
        begin: float,
        stages: Mapping[str, tuple[float, float]],
        facts: BatchFacts | None,
    ) -> None:
        """See `Spans`."""
        since = time.time_ns() - time.perf_counter() * 1e9
        attributes = _attributes(facts)
        for request in requests:
            assert isinstance(request, _Request)
            parent = self._api.set_span_in_context(request.span)
            spans = dict(stages)
            if request.waits:  # one that was cut waits for the first of its batches
                spans = {"queue": (request.arrived, begin), **spans}
                request.waits = False
            for name, (start, end) in spans.items():
                span = self._tracer.start_span(
                    PREFIX + name,
                    parent,
                    start_time=int(since + start * 1e9),
                    attributes=attributes if name == "launch" else None,
                )
                span.end(int(since + end * 1e9))

    def answered(self, request: object, error: BaseException | None) -> None:
        """See `Spans`."""
        if not isinstance(request, _Request):
            return
        unknown = 499 if isinstance(error, CancelledError) else 500
        status = 200 if error is None else getattr(error, "status", unknown)
        request.span.set_attribute(PREFIX + "status", status)
        if error is not None:
            request.span.record_exception(error)
            request.span.set_status(self._api.StatusCode.ERROR, type(error).__name__)
        request.span.end()


def _attributes(facts: BatchFacts | None) -> dict[str, int]:
    if facts is None:
        return {}
    found = {"requests": len(facts.queue_s), "copied_bytes": facts.copied}
    found |= {f"rows.{name}": rows for name, rows in facts.rows.items()}
    found |= {f"coarse_hits.{table}": x.hits for table, x in facts.lookups.items()}
    return {PREFIX + name: value for name, value in found.items()}


def hook(name: str) -> Callable[[], object]:
    """The function that sets up OpenTelemetry in a process that serves.

    Args:
        name: `module:function`. It takes no arguments and calls
            `opentelemetry.trace.set_tracer_provider`.

    Raises:
        ValueError: it names no function.
        ImportError: there is no such module.
    """
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function, None) if function else None
    if not callable(found):
        raise ValueError(f"tracing must be module:function; got {name!r}")
    return cast(Callable[[], object], found)
