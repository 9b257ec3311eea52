"""`TreeBatcher`: callers hand in requests, one worker merges what waits and scores it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Protocol

from ikbo_tree.serving.callers import Caller, Part
from ikbo_tree.serving.errors import (
    LateError,
    OverloadedError,
    ScoringError,
    ServingError,
    StoppedError,
    TooLargeError,
)
from ikbo_tree.serving.merge import Merged, cut, merge
from ikbo_tree.serving.metrics import BatchFacts, Metrics
from ikbo_tree.serving.request import MAX_ROWS, Request, Scores, check
from ikbo_tree.serving.runner import Run
from ikbo_tree.serving.signature import Signature
from ikbo_tree.serving.tracing import Spans


class Runner(Protocol):
    """What a batcher needs of a `GraphRunner`."""

    @property
    def signature(self) -> Signature:
        """Of the model."""

    @property
    def capacity(self) -> Mapping[str, int]:
        """Most rows of a batch."""

    def run(self, merged: Merged, /) -> Run:
        """Scores a batch."""

    def check(self) -> None:
        """Raises if it can't score any more."""


class TreeBatcher:
    """Merges waiting requests into one tree, scores it, and gives each caller its scores.

    A batch starts when its oldest request has waited `max_delay_s`, or earlier when no more would
    fit. Requests are taken in the order in which they came. Any thread may submit.

    Args:
        runner: scores batches, up to its capacity.
        max_delay_s: how long a request may wait for others.
        max_requests: most requests of one batch.
        max_queued_requests: more are refused.
        max_queued_bytes: requests beyond so many bytes of inputs are refused.
        max_rows: most rows that a request may have at any level.
        timeout_s: requests that waited longer are given up; None: none are.
        metrics: told of everything.
        spans: told of every request's way, for traces.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_delay_s: float = 0.002,
        max_requests: int = 64,
        max_queued_requests: int = 1024,
        max_queued_bytes: int = 256 << 20,
        max_rows: int = MAX_ROWS,
        timeout_s: float | None = None,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.runner, self.signature = runner, runner.signature
        self.metrics, self.spans = metrics or Metrics(), spans or Spans()
        self._capacity = dict(runner.capacity)
        self._max_delay_s, self._max_requests = max_delay_s, max_requests
        self._max_queued_requests, self._max_queued_bytes = max_queued_requests, max_queued_bytes
        self._max_rows, self._timeout_s = max_rows, timeout_s
        self._queue: deque[Part] = deque()
        self._waiting = self._queued_bytes = 0
        self._running: list[Part] = []
        self._rate = 0.0  # bytes of requests that are scored in a second, smoothed
        self._stopped = False
        self._changed = threading.Condition()
        self._worker = threading.Thread(target=self._work, name="ikbo-tree-batcher", daemon=True)
        self._worker.start()

    @property
    def healthy(self) -> bool:
        """The worker lives and takes requests."""
        return self._worker.is_alive() and not self._stopped

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting

    def submit(self, request: Request) -> Future[Scores]:
        """Queues a request.

        Returns:
            Its scores, or the ServingError that it gets instead. Cancelling it before its batch
            starts takes it out of the queue.

        Raises:
            BadRequestError: the request can't be scored.
            TooLargeError: it is larger than the queue, or can't be cut to the runner's capacity.
            OverloadedError: the queue is full.
            StoppedError: the batcher drains or has ended.
        """
        span = self.spans.arrived()
        try:
            return self._submitted(request, span)
        except ServingError as error:
            self.metrics.answered(error.status)
            self.spans.answered(span, error)
            raise

    def submit_all(self, requests: Sequence[Request]) -> list[Future[Scores]]:
        """Queues requests at once, so that as many as fit are one batch.

        Returns:
            For each its scores or its ServingError, which refused ones have already.
        """
        futures = []
        with self._changed:  # the worker waits, too
            for request in requests:
                try:
                    future = self.submit(request)
                except ServingError as error:
                    future = Future()
                    future.set_exception(error)
                futures.append(future)
        return futures

    def score(self, request: Request, timeout_s: float | None = None) -> Scores:
        """Waits for a request's scores.

        Args:
            request: to be scored.
            timeout_s: seconds to wait.

        Raises:
            ServingError: as `submit`, or the answer.
            TimeoutError: no answer in time; the request is taken back.
        """
        future = self.submit(request)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def score_async(self, request: Request) -> Scores:
        """As `score`, for asyncio; a cancelled task takes its request back.

        Raises:
            ServingError: as `score`.
        """
        return await asyncio.wrap_future(self.submit(request))

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Refuses new requests and ends the worker.

        Args:
            drain: score what waits first; else callers get a StoppedError.
            timeout_s: seconds to wait for the worker.
        """
        with self._changed:
            self._stopped = True
            left = [] if drain else self._emptied()
            self._changed.notify_all()
        for part in left:
            self._fail(part.caller, StoppedError("the server stopped before this request's turn"))
        self._worker.join(timeout_s)

    def __enter__(self) -> TreeBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submitted(self, request: Request, span: object) -> Future[Scores]:
        checked = check(request, self.signature, max_rows=self._max_rows)
        nbytes = checked.nbytes
        if nbytes > self._max_queued_bytes:
            rule = f"must have at most {self._max_queued_bytes} bytes"
            raise TooLargeError("inputs", rule, f"{nbytes}")
        self._refuse_if_full(nbytes)  # before the work of cutting, and again when it is done
        requests = cut(self.signature, checked, self._capacity)
        caller = Caller(time.perf_counter(), checked.order, len(requests), span)
        with self._changed:
            self._refuse_if_full(nbytes)
            self._queue += [Part(caller, part, part.nbytes) for part in requests]
            self._waiting += 1
            self._queued_bytes += sum(part.nbytes for part in requests)
            self.metrics.waiting(self._waiting, self._queued_bytes)
            self._changed.notify_all()
        if span is not None:
            caller.future.add_done_callback(lambda done: self.spans.answered(span, _error(done)))
        return caller.future

    def _refuse_if_full(self, nbytes: int) -> None:
        if self._stopped or not self._worker.is_alive():
            raise StoppedError("the server takes no more requests", retry_after_s=1.0)
        if self._waiting >= self._max_queued_requests or (
            self._queued_bytes + nbytes > self._max_queued_bytes
        ):
            seconds = self._queued_bytes / self._rate if self._rate else 1.0
            raise OverloadedError(
                f"{self._waiting} requests with {self._queued_bytes} bytes wait already",
                retry_after_s=seconds,
            )

    def _emptied(self) -> list[Part]:
        parts = list(self._queue)
        self._queue.clear()
        self._waiting = self._queued_bytes = 0
        return parts

    def _work(self) -> None:
        """The worker: never ends without an answer to every caller."""
        error: BaseException = StoppedError("the server stopped")
        try:
            while True:
                self._running = self._next_batch()
                if not self._running:
                    return
                self._score(self._running)
                self._running = []
        except BaseException as reason:
            error = ScoringError(f"the server's worker ended: {reason!r}")
            raise
        finally:
            with self._changed:
                self._stopped = True
                left = [*self._running, *self._emptied()]
            for part in left:
                self._fail(part.caller, error)

    def _next_batch(self) -> list[Part]:
        """Waits for the next batch; empty when there is none to come."""
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if not self._queue:
                    return []
                due = self._queue[0].caller.arrived + self._max_delay_s
                while not self._stopped and not self._full():
                    left = due - time.perf_counter()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                    if not self._queue:
                        break
                batch = self._taken()
            now = time.perf_counter()
            batch = [part for part in batch if self._starts(part.caller, now)]
            if batch:
                return batch

    def _full(self) -> bool:
        """Whether more waits than one batch takes."""
        return self._prefix() < len(self._queue) or len(self._queue) >= self._max_requests

    def _prefix(self) -> int:
        """How many parts at the head of the queue fit one batch."""
        rows = dict.fromkeys(self.signature.levels, 0)
        for at, part in enumerate(self._queue):
            for level in rows:
                rows[level] += part.request.rows[level]
                if rows[level] > self._capacity[level]:
                    return at
            if at == self._max_requests:
                return at
        return len(self._queue)

    def _taken(self) -> list[Part]:
        batch = [self._queue.popleft() for _ in range(self._prefix())]
        # A caller counts as waiting until the last of its parts is taken.
        still = self._queue[0].caller if self._queue else None
        callers = {id(part.caller) for part in batch if part.caller is not still}
        self._waiting -= len(callers)
        self._queued_bytes -= sum(part.nbytes for part in batch)
        self.metrics.waiting(self._waiting, self._queued_bytes)
        return batch

    def _starts(self, caller: Caller, now: float) -> bool:
        waited = now - caller.arrived
        if self._timeout_s is not None and caller.started is None and waited > self._timeout_s:
            self._fail(caller, LateError(f"waited {waited:.3f} s, longer than {self._timeout_s} s"))
        return caller.start(now)

    def _score(self, batch: Sequence[Part]) -> None:
        """Scores a batch; if that fails each request alone, so that only the guilty one does."""
        begin = time.perf_counter()
        stages: dict[str, tuple[float, float]] = {}
        try:
            merged = merge(self.signature, [part.request for part in batch])
            stages["merge"] = begin, time.perf_counter()
            run = self.runner.run(merged)
            stages |= run.stages
            scores = merged.split(run.scores)
        except Exception as error:
            self._trace(batch, begin, stages)
            if len(batch) > 1:
                for part in batch:
                    self._score([part])
            else:
                told = error if isinstance(error, ServingError) else ScoringError(repr(error))
                told.__cause__ = error if told is not error else None
                self._fail(batch[0].caller, told)
            return
        split = time.perf_counter()
        waits = [part.caller.waited for part in batch]
        # Own memory: a view would keep every neighbour's scores alive.
        own = [values.clone() for values in scores] if len(batch) > 1 else scores
        stages["split"] = split, time.perf_counter()
        for part, values in zip(batch, own, strict=True):
            if part.caller.add(values, run, len(batch) - 1, self.signature.output):
                self.metrics.answered(200)
        done = time.perf_counter()
        rate = sum(part.nbytes for part in batch) / (done - begin)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        facts = BatchFacts(
            waits,
            stages["merge"][1] - begin + run.fill_s,
            run.run_s,
            done - split,
            run.copied,
            merged.rows,
            merged.bytes_not_moved,
            run.lookups,
        )
        self.metrics.batch(facts)
        self._trace(batch, begin, stages, facts)

    def _trace(
        self,
        batch: Sequence[Part],
        begin: float,
        stages: Mapping[str, tuple[float, float]],
        facts: BatchFacts | None = None,
    ) -> None:
        traced = {id(part.caller): part.caller.span for part in batch}
        spans = [span for span in traced.values() if span is not None]
        if spans:
            self.spans.batch(spans, begin, stages, facts)

    def _fail(self, caller: Caller, error: BaseException) -> None:
        if caller.fail(error):
            self.metrics.answered(getattr(error, "status", 500))


def _error(answer: Future[Scores]) -> BaseException | None:
    """What a request got instead of scores."""
    return CancelledError() if answer.cancelled() else answer.exception()
