"""What all benchmarks share: interleaved timing, ceilings, results files, a table.

A contender is a callable without arguments. Contenders of one workload are timed in turns within
one process, so that a machine that drifts drifts for all of them, and are compared by the median of
the ratios taken inside each round.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Contender: TypeAlias = Callable[[], object]

Clock: TypeAlias = Callable[[Contender, int], float]
"""Milliseconds of one call, as the mean over so many calls in a row. `wall_clock` is the CPU's; a
device's clock times with events and clears the caches between calls."""


def wall_clock(contender: Contender, calls: int) -> float:
    """The clock of what runs on the CPU, caches as the call before left them."""
    start = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - start) * 1e3 / calls


@dataclass(frozen=True)
class Timing:
    """One contender's samples.

    Attributes:
        samples_ms: milliseconds a call, one sample a round.
    """

    samples_ms: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """The q-quantile in ms, by linear interpolation."""
        ordered = sorted(self.samples_ms)
        at = q * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    @property
    def median_ms(self) -> float:
        """Median in ms."""
        return self.quantile(0.5)

    def times_faster_than(self, other: Timing) -> float:
        """Median over the rounds of the other's time divided by this one's."""
        pairs = zip(other.samples_ms, self.samples_ms, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def interleaved(
    contenders: Mapping[str, Contender],
    rounds: int = 30,
    *,
    clock: Clock = wall_clock,
    sample_ms: float = 2.0,
) -> dict[str, Timing]:
    """Times contenders in turns.

    Each is called once to warm up (compile, allocate), then once more to see how many calls a
    sample of `sample_ms` takes. Every round times all of them, each round starting with the next.

    Args:
        contenders: by name.
        rounds: samples of each.
        clock: how a sample is taken.
        sample_ms: least length of a sample; one call where that takes longer.
    """
    calls = {}
    for name, contender in contenders.items():
        contender()
        once = min(clock(contender, 1) for _ in range(2))
        calls[name] = max(1, math.ceil(sample_ms / max(once, 1e-4)))
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(clock(contenders[name], calls[name]))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


@dataclass(frozen=True)
class Record:
    """One contender on one workload; what does not apply is None."""

    workload: str
    who: str
    direction: str | None = None
    dtype: str | None = None
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    peak_mb: float | None = None
    note: str | None = None


@dataclass
class Results:
    """The records of one run on one device, as `benchmarks/results/<topic>_<device>.json` has them.

    Attributes:
        topic: what was measured, e.g. `"mapping"`.
        device: its name.
        peers: distributions whose versions are worth knowing, beside torch, triton and ours.
        ceilings: `copy_gbps` and `matmul_tflops` of the device in this run.
        records: in the order in which they were taken.
    """

    topic: str
    device: str
    peers: tuple[str, ...] = ()
    ceilings: dict[str, float | None] = field(
        default_factory=lambda: {"copy_gbps": None, "matmul_tflops": None}
    )
    records: list[Record] = field(default_factory=list)

    def add(
        self,
        workload: str,
        timings: Mapping[str, Timing],
        *,
        direction: str | None = None,
        dtype: str | None = None,
        flops: float | None = None,
        traffic: float | None = None,
        peak_mb: Mapping[str, float] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """A record for each contender of a workload.

        Args:
            workload: its name, e.g. `"map-1m"`.
            timings: from `interleaved`.
            direction: `"fwd"`, `"bwd"` or `"fwd_bwd"`.
            dtype: e.g. `"float32"`.
            flops: useful operations of one call.
            traffic: bytes that one call has to read and write.
            peak_mb: each contender's extra memory.
            notes: what to know of each.
        """
        for who, timing in timings.items():
            ms = timing.median_ms
            self.records.append(
                Record(
                    workload,
                    who,
                    direction,
                    dtype,
                    round(ms, 6),
                    round(timing.quantile(0.1), 6),
                    round(timing.quantile(0.9), 6),
                    None if flops is None else round(flops / ms / 1e9, 4),
                    None if traffic is None else round(traffic / ms / 1e6, 3),
                    (peak_mb or {}).get(who),
                    (notes or {}).get(who),
                )
            )

    def write(self, folder: Path = RESULTS) -> Path:
        """Writes the file and returns its path."""
        path = folder / f"{self.topic}_{slug(self.device)}.json"
        content = {
            "device": self.device,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command(),
            "versions": versions(self.peers),
            "ceilings": self.ceilings,
            "records": [asdict(record) for record in self.records],
        }
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    def show(self) -> None:
        """Prints the records as a table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.topic} on {self.device}")
        columns = [name for name in Record.__dataclass_fields__ if self._has(name)]
        for name in columns:
            numeric = name.endswith(("_ms", "_mb", "tflops", "gbps"))
            table.add_column(name, justify="right" if numeric else "left")
        for record in self.records:
            table.add_row(*(_cell(getattr(record, name)) for name in columns))
        Console().print(table)

    def _has(self, name: str) -> bool:
        return any(getattr(record, name) is not None for record in self.records)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def cpu_name() -> str:
    """The CPU's model and how many cores this process may use, e.g. `"AMD EPYC, 2 cores"`."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found.group(1).strip() if found else name
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count()
    return f"{name}, {cores} cores"


def slug(device: str) -> str:
    """A device's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def versions(peers: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of torch, triton, CUDA, this package and peers; None where one is missing."""
    found: dict[str, str | None] = {"torch": torch.__version__, "triton": _triton_version()}
    found["cuda"] = torch.version.cuda
    found["ikbo_tree"] = _version("ikbo-tree")
    for peer in ("numpy", *peers):
        found[peer] = _version(peer)
    return found


def _triton_version() -> str | None:
    """Of the Triton that is imported, whichever distribution it came with."""
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def command() -> str:
    """This process's command line, the script relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(ROOT)
    name = str(script.relative_to(ROOT)) if inside else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def cpu_ceilings(rounds: int = 5) -> dict[str, float | None]:
    """Copy bandwidth (bytes read + written) and float32 matmul rate with torch's threads now."""
    source = torch.zeros(32 * 2**20, dtype=torch.float32)
    target = torch.empty_like(source)
    a = torch.randn(1024, 1024)
    timings = interleaved(
        {"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}, rounds, sample_ms=1.0
    )
    return {
        "copy_gbps": round(2 * source.nbytes / timings["copy"].quantile(0) / 1e6, 2),
        "matmul_tflops": round(2 * 1024**3 / timings["matmul"].quantile(0) / 1e9, 4),
    }


def cpu_peak_mb(contender: Contender) -> float:
    """The most memory in MiB that torch's CPU allocator holds for one call beyond what it held."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = contender()
    del result
    events: list[Any] = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return round(peak / 2**20, 3)
