"""Open-loop load: requests come when they come, however slow the server is, and wait if it is.

Arrivals are a Poisson process. A latency counts from the moment at which its request was due, so
a server (or this generator) that falls behind cannot hide it by asking later.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ikbo_tree.serving import codec
from ikbo_tree.serving.errors import ServingError
from ikbo_tree.serving.request import Request

GIVEN_UP = 599
"""In `Load.statuses`: no answer at all."""


class Target(Protocol):
    """What load is put on."""

    def submit(self, request: Request, /) -> Future[Any]:
        """Starts one request; its result, or the exception that it gets."""


@dataclass(frozen=True)
class Load:
    """What came of a stretch of load.

    Attributes:
        offered: requests a second that were due.
        seconds: from the first that was due to the last answer.
        latencies_ms: of those that were answered with scores, sorted.
        statuses: answers by HTTP status.
    """

    offered: float
    seconds: float
    latencies_ms: np.ndarray
    statuses: dict[int, int]

    @property
    def served(self) -> float:
        """Requests a second that got scores."""
        return len(self.latencies_ms) / self.seconds

    def quantile(self, q: float) -> float:
        """The q-quantile of the latencies in ms; infinite where nothing was answered."""
        if not len(self.latencies_ms):
            return float("inf")
        return float(np.quantile(self.latencies_ms, q))


def open_loop(
    target: Target,
    requests: Sequence[Request],
    *,
    rate: float,
    seconds: float,
    seed: int = 0,
    patience_s: float = 60.0,
) -> Load:
    """Puts load on a target.

    Args:
        target: takes requests.
        requests: sent in turn, over and over.
        rate: mean requests a second.
        seconds: how long requests are due.
        seed: of the arrivals.
        patience_s: how long to wait for answers after that.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, size=max(1, int(rate * seconds * 2) + 64))
    due = np.cumsum(gaps)
    due = due[due < seconds]
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    lock, left = threading.Condition(), len(due)

    def answered(status: int, latency: float) -> None:
        nonlocal left
        with lock:
            statuses[status] += 1
            if status == 200:
                latencies.append(latency)
            left -= 1
            lock.notify_all()

    begin = time.perf_counter()
    for number, at in enumerate(due.tolist()):
        wait = begin + at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)

        def done(future: Future[Any], at: float = at) -> None:
            latency = time.perf_counter() - begin - at
            answered(_status(future.exception()), latency)

        try:
            target.submit(requests[number % len(requests)]).add_done_callback(done)
        except ServingError as error:
            answered(error.status, 0.0)
    with lock:
        lock.wait_for(lambda: left == 0, patience_s)
        if left:
            statuses[GIVEN_UP] += left
    took = time.perf_counter() - begin
    return Load(rate, took, np.sort(np.array(latencies)) * 1e3, dict(statuses))


def _status(error: BaseException | None) -> int:
    if error is None:
        return 200
    return error.status if isinstance(error, ServingError) else GIVEN_UP


class HttpError(ServingError):
    """An answer other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body[:200].decode(errors="replace"))
        self.status = status


class HttpTarget:
    """A server, asked over kept-alive connections.

    Args:
        host: its address.
        port: its port.
        connections: most requests at a time; more wait here, which latencies include.
        timeout_s: of one request.
    """

    def __init__(
        self, host: str, port: int, *, connections: int = 64, timeout_s: float = 30.0
    ) -> None:
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(connections)
        self._bodies: dict[int, bytes] = {}

    def submit(self, request: Request) -> Future[Any]:
        """See `Target`."""
        body = self._bodies.get(id(request))
        if body is None:
            body = self._bodies[id(request)] = codec.to_npz(request)
        return self._pool.submit(self._ask, body)

    def _ask(self, body: bytes) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            self._local.connection = connection
        headers = {"Content-Type": codec.NPZ, "Accept": codec.NPY}
        try:
            connection.request("POST", "/score", body, headers)
            answer = connection.getresponse()
            text: bytes = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            self._local.connection = None
            raise
        if answer.status != 200:
            raise HttpError(answer.status, text)
        return text

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown(cancel_futures=True)
