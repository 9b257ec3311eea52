"""Ops on a CPU beside what flat models do: `python benchmarks/bench_ops_cpu.py`.

One module an op family has its workloads and contenders; this command runs them in one process and
writes one results file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import cpu_attention
import cpu_linear
import torch
import typer
from harness import Results, cpu_ceilings, cpu_name

FAMILIES: dict[str, Callable[[Results, int], None]] = {
    "linear": lambda results, rounds: cpu_linear.bench(results, "linear", rounds),
    "linear_compression": lambda results, rounds: cpu_linear.bench(
        results, "linear_compression", rounds
    ),
    "target_attention": cpu_attention.bench,
}
"""For each op, what adds its records to the results; the second argument is rounds a workload."""


def main(
    op: Annotated[
        list[str] | None, typer.Option(help="Only these ops; then nothing is written.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 30,
    threads: Annotated[int, typer.Option(help="Threads torch may use.")] = 1,
) -> None:
    """Times every op, shows a table and writes benchmarks/results/ops-cpu_<device>.json."""
    torch.set_num_threads(threads)
    results = Results("ops-cpu", f"{cpu_name()}, {threads} threads")
    results.ceilings = cpu_ceilings()
    for name in op or FAMILIES:
        FAMILIES[name](results, rounds)
    results.show()
    if not op:
        print(f"written to {results.write()}")


if __name__ == "__main__":
    typer.run(main)
