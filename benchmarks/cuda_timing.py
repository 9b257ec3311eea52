"""Timing on a GPU: a clock with a cold L2 cache, captured graphs, ceilings of the same run.

`harness.interleaved(contenders, clock=ColdClock())` takes contenders in turns; this module says how
long one call takes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from harness import Contender, interleaved
from torch import Tensor


class ColdClock:
    """A `harness.Clock` of the device's time: the mean over calls, each with nothing of use in L2.

    Before each call a buffer larger than the cache is written; that also keeps the device busy
    while the host launches the call, so that launches count only where they are what takes longest.

    Args:
        device: a CUDA device; default the current one.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        properties = torch.cuda.get_device_properties(device)
        size = max(256 * 2**20, 4 * properties.L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, contender: Contender, calls: int) -> float:
        """Milliseconds of one call, the mean of so many."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            contender()
            end.record()
        torch.cuda.synchronize()
        return sum(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)) / calls


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """The one stream on which contenders run before and while they are captured.

    Leaves that contenders share remember the stream of the first gradient; a second stream would
    have to wait for it, which a capture may not.
    """
    return torch.cuda.Stream()


def graphed(contender: Contender, warm: int = 3) -> Contender:
    """The contender's launches captured in a CUDA graph: what serving replays, free of the host.

    Args:
        contender: allocates what it likes, waits for nothing.
        warm: calls before the capture, as torch asks for.
    """
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            contender()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = contender()
    return functools.partial(_replay, graph, contender, kept)


def _replay(graph: torch.cuda.CUDAGraph, _contender: Contender, kept: object) -> object:
    """Holds the contender, since its launches read what that holds, and returns what they wrote."""
    graph.replay()
    return kept


def graphed_backward(
    contender: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> Contender:
    """The backward alone, captured; what the forward saved is kept.

    Args:
        contender: the forward.
        inputs: what gradients are taken of.
        grad: of the forward's result.
    """
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = contender()
    torch.cuda.current_stream().wait_stream(stream)
    return graphed(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))


def host_us(contender: Contender, calls: int = 100) -> float:
    """Microseconds that a call keeps the host, the device's work left out; least of five."""
    contender()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            contender()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best * 1e6 / calls


def peak_mb(contender: Contender) -> float:
    """The most memory in MiB that a call holds beyond what was held before it."""
    contender()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = contender()
    torch.cuda.synchronize()
    del kept
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


def cuda_ceilings(rounds: int = 10) -> dict[str, float | None]:
    """Bandwidth of a 2 GiB copy (bytes read + written) and bf16 matmul rate, 4096 and 8192 cubed.

    Of the matmuls the faster counts.
    """
    source = torch.empty(2**31, dtype=torch.int8, device="cuda").zero_()
    target = torch.empty_like(source)
    sides = (4096, 8192)
    square = {n: torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for n in sides}
    contenders: dict[str, Contender] = {"copy": lambda: target.copy_(source)}
    for n in sides:
        contenders[str(n)] = lambda a=square[n]: a @ a
    timings = interleaved(contenders, rounds, clock=ColdClock())
    rates = [2 * n**3 / timings[str(n)].median_ms / 1e9 for n in sides]
    return {
        "copy_gbps": round(2 * source.nbytes / timings["copy"].median_ms / 1e6, 1),
        "matmul_tflops": round(max(rates), 1),
    }


def device_name() -> str:
    """The current device's name, e.g. `"NVIDIA H200"`."""
    return torch.cuda.get_device_name()
