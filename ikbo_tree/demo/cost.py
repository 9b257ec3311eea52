"""What a call costs: times taken in turns, peak memory, and the ceilings of the device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Samples of one contender.

    Attributes:
        samples_ms: milliseconds, one a round.
        peak_mb: peak memory in MiB.
    """

    samples_ms: tuple[float, ...]
    peak_mb: float

    def quantile(self, q: float) -> float:
        """The q-quantile in ms."""
        return float(np.quantile(self.samples_ms, q))

    @property
    def median_ms(self) -> float:
        """Median in ms."""
        return self.quantile(0.5)

    def times_faster_than(self, other: Cost) -> float:
        """Median over the rounds of the other's time divided by this one's."""
        pairs = zip(other.samples_ms, self.samples_ms, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def measure(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device
) -> dict[str, Cost]:
    """Time and memory of each contender, in turns, so that all see the same machine.

    Args:
        contenders: by name. Each runs once for its memory (which also warms it up), then `rounds`
            times for its time.
        rounds: timed runs of each.
        device: where they run.
    """
    peaks = {name: peak_mb(call, device) for name, call in contenders.items()}
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(milliseconds(contenders[name], device))
    return {name: Cost(tuple(taken[name]), peaks[name]) for name in names}


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, up to its last kernel."""
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    return (time.perf_counter() - begin) * 1e3


def peak_mb(call: Callable[[], object], device: torch.device) -> float:
    """The most memory in MiB that tensors made by `call` occupied at one time.

    On the CPU this is what PyTorch's allocator handed out less what it took back, followed through
    every event that the profiler records, temporaries inside ops included: exact, and the same at
    every run. (What a library like MKL allocates by itself is not in it. The process's resident
    size would be no measure: freed pages stay.) On CUDA it is the caching allocator's own peak.
    What existed before the call does not count.
    """
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        _wait(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    # Kineto announces every recording on stderr, unless this is set before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    # The profiler's averages know net sums of an op only; single events come from Kineto's list.
    events = profile.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return float(np.cumsum([0, *(size for _, size in moves)]).max()) / MIB


def ceilings(device: torch.device) -> dict[str, float]:
    """GB/s of a large copy (bytes read and written) and TFLOP/s of a large float32 product."""
    elements, side = (1 << 28, 8192) if device.type == "cuda" else (1 << 25, 1024)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    square = torch.ones(side, side, device=device)
    copy_ms = min(milliseconds(lambda: target.copy_(source), device) for _ in range(5))
    product_ms = min(milliseconds(lambda: square @ square, device) for _ in range(5))
    return {
        "copy_gbps": round(2 * source.nbytes / copy_ms / 1e6, 2),
        "matmul_tflops": round(2 * side**3 / product_ms / 1e9, 4),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
