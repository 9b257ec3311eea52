r"""What Hopper's kernels do with their time: hardware counters, and clock reads inside of them.

By itself it launches each kernel once at its default shape, for Nsight Compute to count:

    ncu --clock-control none --csv --page raw --print-units base --log-file counters.csv \
        --section SpeedOfLight --section LaunchStats --section Occupancy --metrics METRICS \
        --kernel-name "regex:KERNELS" python benchmarks/profile_kernels.py
    python benchmarks/profile_kernels.py --counters counters.csv

`--ncu counters.csv` does both with the METRICS and KERNELS below, and asks for the sections alone
where ncu does not know one of the metrics. It needs permission to read counters; clocks and power
stay as they are. So percentages count; a duration is one cold launch's under a profiler.

`--timeline` runs kernels that read the clock (trace_kernels.py), in a process that compiles them.

Files are benchmarks/results/counters_<device>.json and timeline_<device>.json.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attention_data
import bench_lce
import torch
from cuda_timing import ColdClock, device_name
from peers.lce import PEERS
from records import write
from timeline import picture, summary
from torch import Tensor

import ikbo_tree as ikbo

COMPRESSION = "lce-b1024-r70"
CUBLAS = r"nvjet|gemm|cutlass"
KERNELS = rf"stages_kernel|attention_forward|query_gradients|key_gradients|{CUBLAS}"
"""Names of the kernels that are counted."""

PERCENT = "avg.pct_of_peak_sustained_elapsed"
METRICS: dict[str, tuple[float, tuple[str, ...]]] = {
    "duration_us": (1e6, ("gpu__time_duration.sum",)),
    "sm_mcycles": (1e-6, ("sm__cycles_elapsed.max", "gpc__cycles_elapsed.max")),
    "sm_pct": (1, (f"sm__throughput.{PERCENT}",)),
    "tensor_pct": (1, (f"sm__pipe_tensor_cycles_active.{PERCENT}",)),
    "special_pct": (1, ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",)),
    "l2_pct": (1, (f"lts__throughput.{PERCENT}",)),
    "dram_pct": (1, (f"gpu__dram_throughput.{PERCENT}", f"dram__throughput.{PERCENT}")),
    "l2_read_mb": (32e-6, ("lts__t_sectors_op_read.sum",)),
    "dram_read_mb": (1e-6, ("dram__bytes_read.sum",)),
    "dram_write_mb": (1e-6, ("dram__bytes_write.sum",)),
    "instructions_m": (1e-6, ("sm__inst_executed.sum", "smsp__inst_executed.sum")),
    "registers": (1, ("launch__registers_per_thread",)),
    "shared_kib": (2**-10, ("launch__shared_mem_per_block",)),
    "warps_pct": (1, ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
    "blocks": (1, ("launch__grid_size",)),
}
"""Of each column of a record: its factor from seconds, bytes and counts, and metrics that have it,
the best one first. Sectors have 32 bytes; `warps_pct` is the occupancy reached."""

_UNITS = {
    "second": 1.0, "s": 1.0, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6,
    "nsecond": 1e-9, "ns": 1e-9, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


class Call(NamedTuple):
    """Attributes: workload: its name; kernels: who it launches; run: one call."""

    workload: str
    kernels: Mapping[str, str]
    run: Callable[[], object]


def compression(partial: torch.dtype, impl: str = "gluon") -> Callable[[], Tensor]:
    """The default shape of linear compression."""
    work = bench_lce.Work(COMPRESSION, torch.float16, gradients=False)
    return lambda: ikbo.linear_compression(
        work.e, work.w, tree=work.tree, impl=impl, partial_dtype=partial
    )


def attention(workload: str, impl: str = "gluon") -> Callable[[], Tensor]:
    """Attention, without gradients."""
    data = attention_data.Data(attention_data.workloads()[workload], torch.float16)

    def run() -> Tensor:
        with torch.no_grad():
            return data.ours(impl)

    return run


def _gradients(workload: str) -> Callable[[], object]:
    data = attention_data.Data(attention_data.workloads()[workload], torch.float16)
    return lambda: torch.autograd.grad(data.ours("gluon"), data.leaves, data.grad)


PARTIALS = {"p16": torch.float16, "p32": torch.float32}
FORWARDS = ("attn-s512-r64-n64-h2-d128", "attn-s4096-r64-n64-h2-d128")
BACKWARD = "attn-s1024-r64-n64-h2-d128"
EXPECTED: tuple[tuple[str, dict[str, str]], ...] = (
    *((f"{COMPRESSION}-{bits}", {"stages_kernel": "stages_kernel"}) for bits in PARTIALS),
    (COMPRESSION, {"cublas-candidate": CUBLAS}),
    *((name, {"attention_forward": "attention_forward"}) for name in FORWARDS),
    (
        BACKWARD,
        {
            "attention_forward": "attention_forward",
            "query_gradients": "query_gradients",
            "query_gradients, again": "query_gradients",
            "key_gradients": "key_gradients",
        },
    ),
)
"""For each call its workload and, by the name in results files, what its kernels are called."""


def calls() -> Iterator[Call]:
    """Each call whose kernels are counted, in order; the tensors of one at a time."""
    makers: list[Callable[[], Callable[[], object]]] = [
        *(lambda dtype=dtype: compression(dtype) for dtype in PARTIALS.values()),
        _candidate,
        *(lambda name=name: attention(name) for name in FORWARDS),
        lambda: _gradients(BACKWARD),
    ]
    for (workload, kernels), make in zip(EXPECTED, makers, strict=True):
        yield Call(workload, kernels, make())


def _candidate() -> Callable[[], object]:
    work = bench_lce.Work(COMPRESSION, torch.float16, gradients=False)
    return PEERS["cublas-candidate"](work.problem).call


def command(log: Path, metrics: bool = True) -> list[str]:
    """How ncu counts what this script launches."""
    wanted = ",".join(name for _, names in METRICS.values() for name in names[:1])
    sections = [f"--section={name}" for name in ("SpeedOfLight", "LaunchStats", "Occupancy")]
    return [
        "ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--force-overwrite", "--log-file", str(log), *sections,
        *(["--metrics", wanted] if metrics else []),
        "--kernel-name", f"regex:{KERNELS}", sys.executable, str(Path(__file__).resolve()),
    ]  # fmt: skip


def counted(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Records of a log of ncu: `--csv --page raw`, a kernel a line below a line of units."""
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    if not table:
        raise ValueError(f"the log has no table; its last lines are {list(lines[-3:])}")
    names, units, *rows = table
    rows.sort(key=lambda row: int(row[0]))
    expected = [(w, who, name) for w, kernels in EXPECTED for who, name in kernels.items()]
    ran = [row[names.index("Kernel Name")] for row in rows]
    if len(ran) != len(expected):
        raise ValueError(f"expected {len(expected)} kernels; the log has {ran}")
    records = []
    for (workload, who, name), row, kernel in zip(expected, rows, ran, strict=True):
        if not re.search(name, kernel):
            raise ValueError(f"expected {who} of {workload}; the log has {kernel}")
        values = {n: (v, u) for n, v, u in zip(names, row, units, strict=True)}
        columns = {column: _value(values, *how) for column, how in METRICS.items()}
        records.append({"workload": workload, "who": who, "kernel": kernel, **columns})
    return records


def _value(
    values: Mapping[str, tuple[str, str]], factor: float, names: Sequence[str]
) -> float | None:
    """The first of the metrics that was counted, in the record's unit."""
    for name in names:
        text, unit = values.get(name, ("", ""))
        text = text.replace(",", "")
        if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text):
            return float(f"{float(text) * _UNITS.get(unit.split('/')[0], 1.0) * factor:.4g}")
    return None


def count(log: Path) -> None:
    """Runs ncu, with all metrics or, where it refuses them, without."""
    for metrics in (True, False):
        done = subprocess.run(command(log, metrics), check=False)
        print(f"ncu ended with {done.returncode}", flush=True)
        if log.exists() and any(line.startswith('"ID"') for line in log.open()):
            return
        print("".join(log.open()) if log.exists() else "it wrote nothing")


def timeline() -> None:
    """Runs traced kernels and writes what their consumers did."""
    from trace_kernels import events, intervals, traced

    device = device_name()
    flush = ColdClock()
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    records: list[dict[str, Any]] = []
    pictures = {}
    makers: dict[str, Callable[[str], Callable[[], Tensor]]] = {
        f"{COMPRESSION}-{bits}": lambda impl, dtype=dtype: compression(dtype, impl)
        for bits, dtype in PARTIALS.items()
    }
    makers |= {name: lambda impl, name=name: attention(name, impl) for name in FORWARDS[:1]}
    with traced(programs, "cuda") as log:
        for workload, make in makers.items():
            run = make("gluon")
            _agree(workload, run(), make("triton")())
            flush(lambda: None, 1)
            log.zero_()
            run()
            torch.cuda.synchronize()
            found = intervals(events(log))
            records += [{"workload": workload, **line} for line in summary(found)]
            pictures[workload] = picture(found, 80_000 if workload.startswith("lce") else 40_000)
            for line in records:
                if line["workload"] == workload:
                    print(workload, line, flush=True)
    print(f"written to {write('timeline', device, records, pictures=pictures)}")


def _agree(workload: str, mine: Tensor, other: Tensor) -> None:
    error = float((mine.double() - other.double()).norm() / other.double().norm())
    if not error < 4 * torch.finfo(mine.dtype).eps:
        raise AssertionError(f"traced, {workload} is {error:.1e} away from the Triton kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ncu", type=Path, metavar="CSV", help="run ncu, then as --counters")
    parser.add_argument("--counters", type=Path, metavar="CSV", help="ncu's log becomes results")
    parser.add_argument("--device", help="name for --counters; default: this machine's")
    parser.add_argument("--timeline", action="store_true", help="read the clock inside kernels")
    options = parser.parse_args()
    if options.ncu:
        count(options.ncu)
    log = options.ncu or options.counters
    if log:
        lines = log.read_text().splitlines()
        path = write("counters", options.device or device_name(), counted(lines))
        print(f"written to {path}")
    elif options.timeline:
        timeline()
    else:
        for call in calls():
            call.run()
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
