"""Requests on their way through a batcher."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.serving.request import Checked, Scores
from ikbo_tree.serving.runner import Run


@dataclass
class Caller:
    """One request on its way: its parts are scored in turn, in one batch or several.

    Attributes:
        arrived: when, by `time.perf_counter`.
        order: as in `Checked`.
        parts: into how many it was cut.
        span: what `Spans.arrived` gave.
    """

    arrived: float
    order: np.ndarray | None
    parts: int
    span: object = None
    future: Future[Scores] = field(default_factory=Future)
    scores: list[Tensor] = field(default_factory=list)
    run_s: float = 0.0
    started: float | None = None
    neighbours: int = 0

    @property
    def gone(self) -> bool:
        """It was cancelled or answered already."""
        return self.future.done()

    @property
    def waited(self) -> float:
        """Seconds from its arrival to the start of its first batch."""
        assert self.started is not None
        return self.started - self.arrived

    def start(self, now: float) -> bool:
        """Marks it as running; false if it was cancelled or has failed."""
        if self.started is None:
            if not self.future.set_running_or_notify_cancel():
                return False
            self.started = now
        return not self.gone

    def fail(self, error: BaseException) -> bool:
        """Answers with an error, once."""
        if self.gone or (self.started is None and not self.start(time.perf_counter())):
            return False
        self.future.set_exception(error)
        return True

    def add(self, scores: Tensor, run: Run, neighbours: int, level: str) -> bool:
        """Takes a part's scores; true if they were the last."""
        self.scores.append(scores)
        self.run_s += run.run_s
        self.neighbours = max(self.neighbours, neighbours)
        if self.gone or len(self.scores) < self.parts:
            return False
        values = self.scores[0] if self.parts == 1 else torch.cat(self.scores)
        if self.order is not None:
            back = torch.empty_like(values)
            back[torch.from_numpy(self.order)] = values
            values = back
        self.future.set_result(Scores(values, level, self.waited, self.run_s, self.neighbours))
        return True


@dataclass(frozen=True)
class Part:
    """What one batch scores of a request.

    Attributes:
        caller: whose it is.
        request: the rows.
        nbytes: of them.
    """

    caller: Caller
    request: Checked
    nbytes: int
