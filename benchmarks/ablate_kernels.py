"""What each technique of Hopper's kernels buys: `python benchmarks/ablate_kernels.py`.

A variant is the shipped kernel with one thing switched off, by a field of its frozen tile or a
constant of its module, so that it computes the same. All variants of a workload are captured graphs
that take turns in one process, with a cold L2. A record's note is the median over the rounds of the
variant's time divided by the shipped kernel's in the same round, with its 10 % and 90 % quantiles.
Writes benchmarks/results/ablation_<device>.json.

Workloads are those of bench_lce.py, with `-p16` or `-p32` for the bits of partial results, and of
bench_attention.py; `bwd` is the backward alone. Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import attention_data
import bench_lce
import torch
from cuda_timing import ColdClock, cuda_ceilings, device_name, graphed, graphed_backward
from harness import Contender, Results, Timing, interleaved
from peers.lce import PEERS
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.kernels.linear_compression import gluon_sm90 as compression
from ikbo_tree.kernels.linear_compression.gluon_schedule import Edge, Launch
from ikbo_tree.kernels.target_attention import gluon_backward as gradients
from ikbo_tree.kernels.target_attention import gluon_sm90 as attention

SHIPPED = "shipped"
MODULES: dict[str, ModuleType] = {"lce": compression, "attn": attention, "attn-bwd": gradients}


@dataclass(frozen=True)
class Variant:
    """A kernel with one thing switched off.

    Attributes:
        who: as results files have it.
        tile: fields of the frozen tile that are other than shipped.
        form: of linear compression, fields of what its kernel is compiled for.
        constants: attributes of the kernel's module.
        persistent: programs take one tile after another; else there is one for each tile.
        together: levels of a tree are stages of one launch; else launches.
        exact: results have the shipped kernel's bits.
    """

    who: str
    tile: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    persistent: bool = True
    together: bool = True
    exact: bool = True


VARIANTS: dict[str, tuple[Variant, ...]] = {
    "lce": (
        Variant(SHIPPED),
        Variant("partials fetched after the product", tile={"prefetch": 0}),
        Variant("partials fetched before the first step", tile={"behind": False}),
        Variant("flags not looked at ahead", tile={"ahead": False}),
        Variant("each product awaited before the next", tile={"outstanding": 0}),
        Variant("no branch before the output's wait", tile={"branch": False}),
        Variant("output staged in two turns", tile={"keep": False}),
        Variant("singles in the order of rows", tile={"late": False}),
        Variant("padding of the last step multiplied", form={"k_tail": 64}),
        Variant("tiles of 128 columns", tile={"BN": 128, "stages": 6}, exact=False),
        Variant("a launch a level", together=False),
    ),
    "attn": (
        Variant(SHIPPED),
        Variant("a block a tile", persistent=False),
        Variant("tiles dealt out in advance", constants={"DYNAMIC": False}),
        Variant("row sums across threads in each block", constants={"LATE": False}, exact=False),
        Variant("four slots", tile={"slots": 4}),
        Variant("three slots", tile={"slots": 3}),
        Variant("blocks of 64 keys", tile={"keys": 64, "slots": 10}, exact=False),
    ),
    "attn-bwd": (
        Variant(SHIPPED),
        Variant("weights computed after dP", constants={"EARLY": False}),
        Variant("keys by Triton", constants={"KEYS_HERE": False}, exact=False),
        Variant("queries by Triton", constants={"QUERIES_HERE": False}, exact=False),
    ),
}
WORKLOADS = {
    "lce-b1024-r70-p16": "lce",
    "lce-b1024-r70-p32": "lce",
    "attn-s512-r64-n64-h2-d128": "attn",
    "attn-s4096-r64-n64-h2-d128": "attn",
    "attn-s1024-r64-n64-h2-d128-uneven": "attn",
    "attn-s1024-r64-n64-h2-d128": "attn-bwd",
}
"""What is measured, and which variants."""


@contextlib.contextmanager
def switched(variant: Variant, family: str) -> Iterator[None]:
    """Inside, the family's kernels are launched as the variant has it."""
    module = MODULES[family]
    new: dict[str, Any] = dict(variant.constants)
    if variant.tile and family == "lce":
        choose = module.choose
        new["choose"] = lambda *sizes: replace(choose(*sizes), **variant.tile)
    elif variant.tile:
        tiles = module.HOPPER
        new["HOPPER"] = {D: replace(tile, **variant.tile) for D, tile in tiles.items() if D == 128}
    if variant.form:
        form = module._form
        new["_form"] = lambda *facts: form(*facts)._replace(**variant.form)
    if not variant.persistent:
        new["launch"] = _block_a_tile(module.launch)
    if not variant.together:
        new["launches"] = _launch_a_level
    with contextlib.ExitStack() as stack:
        for name, value in new.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _block_a_tile(launch: Callable[..., None]) -> Callable[..., None]:
    def changed(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        items = args[kernel.arg_names.index("n_items")]
        launch(kernel, (items,), *args, **options)

    return changed


def _launch_a_level(producers: Sequence[Sequence[int]]) -> list[Launch]:
    return [
        Launch(level, 1, tuple(Edge(p, 0, turn) for turn, p in enumerate(above)))
        for level, above in enumerate(producers)
    ]


class Bench:
    """A workload's tensors and calls.

    Args:
        workload: one of `WORKLOADS`.
    """

    def __init__(self, workload: str) -> None:
        self.name, self.family = workload, WORKLOADS[workload]
        self.inputs: list[Tensor] = []
        if self.family == "lce":
            base, _, bits = workload.rpartition("-p")
            self.partial = {"16": torch.float16, "32": torch.float32}[bits]
            self.work = bench_lce.Work(base, torch.float16, gradients=False)
            self.flops = self.work.flops
        else:
            self.data = attention_data.Data(attention_data.workloads()[workload], torch.float16)
            self.flops = self.data.flops
            if self.family == "attn-bwd":
                self.inputs, self.flops = self.data.leaves, 2.5 * self.data.flops

    def call(self, impl: str = "gluon") -> Tensor:
        """The forward."""
        if self.family != "lce":
            return self.data.ours(impl)
        e, w, tree = self.work.e, self.work.w, self.work.tree
        return ikbo.linear_compression(e, w, tree=tree, impl=impl, partial_dtype=self.partial)

    def product(self) -> Tensor:
        """The last level's product by the same kernel, to which nothing is added."""
        work = self.work
        last = work.tree.levels[-1]
        only = {last: work.e[last]}, {last: work.w[last]}
        return ikbo.linear_compression(*only, tree=work.tree, impl="gluon")

    def references(self) -> dict[str, Contender]:
        """What variants are seen beside: all but the first do less."""
        if self.inputs:
            return {"ikbo-triton": graphed_backward(self._triton, self.inputs, self.data.grad)}
        found = {"ikbo-triton": self._triton}
        if self.family == "lce":
            found["nothing added"] = self.product
            found["cublas-candidate"] = PEERS["cublas-candidate"](self.work.problem).call
        return {who: graphed(call) for who, call in found.items()}

    def _triton(self) -> Tensor:
        return self.call("triton")

    def captured(self, variant: Variant) -> Contender:
        """The variant's launches as a graph, whose replay returns its results."""
        with switched(variant, self.family):
            if self.inputs:
                return graphed_backward(self.call, self.inputs, self.data.grad)
            return graphed(self.call)

    def contenders(self) -> dict[str, Contender]:
        """All variants whose results are right, and the references."""
        with contextlib.nullcontext() if self.inputs else torch.no_grad():
            shipped, *others = VARIANTS[self.family]
            found = {SHIPPED: self.captured(shipped)}
            expected = _tensors(found[SHIPPED]())
            for variant in others:
                try:
                    graph = self.captured(variant)
                    _compare(graph, variant, expected)
                except Exception as raised:  # a variant that does not work tells nothing
                    print(f"  {variant.who} left out: {raised!r:.160}", flush=True)
                else:
                    found[variant.who] = graph
            return found | self.references()


def _tensors(result: Any) -> list[Tensor]:
    return [x.clone() for x in ([result] if isinstance(result, Tensor) else result)]


def _compare(graph: Contender, variant: Variant, expected: Sequence[Tensor]) -> None:
    """Raises where a variant computes anything else than the shipped kernel."""
    for mine, shipped in zip(_tensors(graph()), expected, strict=True):
        error = float((mine.double() - shipped.double()).norm() / shipped.double().norm())
        if not error < 4 * torch.finfo(mine.dtype).eps:
            raise AssertionError(f"it is {error:.1e} away from the shipped kernel")
        if variant.exact and not torch.equal(mine, shipped):
            raise AssertionError(f"its bits are others, {error:.1e} away")


def ratios(timing: Timing, shipped: Timing) -> str:
    """How many times the shipped kernel's time, round by round."""
    pairs = zip(timing.samples_ms, shipped.samples_ms, strict=True)
    found = Timing(tuple(mine / theirs for mine, theirs in pairs))
    low, middle, high = (found.quantile(q) for q in (0.1, 0.5, 0.9))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def bench(results: Results, workload: str, rounds: int) -> None:
    """Adds the records of one workload, and prints them."""
    one = Bench(workload)
    timings = interleaved(one.contenders(), rounds, clock=ColdClock(), sample_ms=0.0)
    notes = {who: ratios(timing, timings[SHIPPED]) for who, timing in timings.items()}
    results.add(
        workload,
        timings,
        direction="bwd" if one.inputs else "fwd",
        dtype="float16",
        flops=one.flops,
        notes=notes,
    )
    for who, timing in timings.items():
        print(f"  {workload:36} {who:42} {timing.median_ms:8.4f} ms  {notes[who]}", flush=True)


@functools.cache
def _warm_bench(workload: str) -> Bench:
    return Bench(workload)


def warm(task: tuple[str, int]) -> None:
    """Compiles a variant, or the references, in a process that is there for that."""
    workload, number = task
    one, variants = _warm_bench(workload), VARIANTS[WORKLOADS[workload]]
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:  # `contenders` says why
        if not one.inputs:
            stack.enter_context(torch.no_grad())
        one.captured(variants[number]) if number < len(variants) else one.references()


def compile_all(workloads: Sequence[str], processes: int) -> None:
    """Leaves all kernels in Triton's cache on disk."""
    tasks = [(w, n) for w in workloads for n in range(len(VARIANTS[WORKLOADS[w]]) + 1)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=spawn) as pool:
        list(pool.map(warm, tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="*", help=f"default: all of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--topic", default="ablation", help="begins the name of the results file")
    options = parser.parse_args()
    workloads = options.workload or list(WORKLOADS)
    if options.processes > 1:
        compile_all(workloads, options.processes)
    results = Results(options.topic, device_name())
    results.ceilings = cuda_ceilings()
    print(results.device, results.ceilings, flush=True)
    for workload in workloads:
        bench(results, workload, options.rounds)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"written to {results.write()}")


if __name__ == "__main__":
    main()
