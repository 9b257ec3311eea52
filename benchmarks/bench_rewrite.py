"""Whole models before and after `ikbo_tree.rewrite`: `python benchmarks/bench_rewrite.py`.

Every model of tests/models for 1,024 items, 64 and 1 of them a user (ads: four vendors a user where
there are so many items). Contenders, all under torch.compile, on a GPU as CUDA graphs, TF32 off:

    flat-compile                 the model as it is, with its inputs as it takes them
    rewritten-compile            what `rewrite` made of it for this tree; compact inputs compact
    rewritten-2-levels-compile   ads only: vendors' rows broadcast to the items as the model does
    flat, rewritten, ...         the same without torch.compile, with --eager

Compilation takes 10 to 60 s of one core for each contender. So with `--jobs` above 1 every model
and ratio has a process of its own; they get ready side by side, then measure in turn, each alone:

    python benchmarks/bench_rewrite.py --device cuda                   one run, on 16 cores
    python benchmarks/bench_rewrite.py --models din,ads --ratios 64    some; nothing is written

Results are in benchmarks/results/rewrite_<device>.json, workloads named model-<name>-r<ratio>.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import (
    RESULTS,
    ROOT,
    Clock,
    Contender,
    Results,
    Timing,
    cpu_ceilings,
    cpu_name,
    interleaved,
    wall_clock,
)
from torch import Tensor, nn

import ikbo_tree as ikbo

sys.path.append(str(ROOT / "tests"))

from models.sizes import SIZES, TINY
from models.zoo import ZOO, Entry

RATIOS = "64,1"
VENDORS = 4
JOBS = {"cpu": 1, "cuda": 18}
"""Every model and ratio of a run with a GPU at once; on a CPU one by one, or cores are shared."""

TOLERANCE = 1e-3
"""Of float32 results, relative to the largest: sums of thousands of terms in another order."""

TWO_LEVELS = "rewritten-2-levels"


@dataclass(frozen=True)
class Options:
    """What all workloads of a run have in common."""

    device: str
    items: int
    rounds: int
    threads: int
    eager: bool
    tiny: bool


@dataclass(frozen=True)
class Job:
    """A model at a ratio of items to users."""

    name: str
    ratio: int

    @property
    def workload(self) -> str:
        """Its name in results."""
        return f"model-{self.name}-r{self.ratio}"


@dataclass
class Measured:
    """What came of a job."""

    timings: dict[str, Timing]
    notes: dict[str, str] = field(default_factory=dict)


class TwoLevels(nn.Module):
    """The ads model to which vendors are no level: their rows reach the items by any index."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        user_x: Tensor,
        history_ids: Tensor,
        history_mask: Tensor,
        vendor_x: Tensor,
        catalogue_ids: Tensor,
        catalogue_mask: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
        item_to_user: Tensor,
        item_to_vendor: Tensor,
    ) -> Tensor:
        """Inputs as the model's own, but one map for users and an index for vendors."""
        scores: Tensor = self.model(
            user_x,
            history_ids,
            history_mask,
            vendor_x[item_to_vendor],
            catalogue_ids[item_to_vendor],
            catalogue_mask[item_to_vendor],
            item_x,
            item_ids,
            item_to_user,
            slice(None),
        )
        return scores


def tree_of(entry: Entry, items: int, ratio: int) -> ikbo.BroadcastTree:
    """Users with `ratio` items each, on the CPU."""
    users = max(1, items // ratio)
    if "vendor" not in {*entry.levels.values(), *entry.compact.values()}:
        return ikbo.BroadcastTree.from_counts({"item": [ratio] * users}, root="user")
    vendors = min(VENDORS, ratio)
    below = {"vendor": [vendors] * users, "item": [ratio // vendors] * (vendors * users)}
    return ikbo.BroadcastTree.from_counts(below, root="user")


def contenders(job: Job, options: Options) -> tuple[dict[str, Contender], dict[str, str]]:
    """By name, and notes on some."""
    entry = ZOO[job.name]
    sizes = (TINY if options.tiny else SIZES)[job.name]
    model = entry.build(sizes).to(options.device)
    tree = tree_of(entry, options.items, job.ratio).to(options.device)
    flat = entry.inputs(sizes, tree, 0, sizes.dtype)
    own: dict[str, Any] = flat
    if entry.compact:
        own = {**entry.compact_inputs(sizes, tree, 0, sizes.dtype), "tree": tree}
    begin = time.perf_counter()
    fast, report = ikbo.rewrite(
        model,
        flat,
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=tree if entry.compact else None,
    )
    seconds = time.perf_counter() - begin
    before, after = (
        [sum(cost[i] for cost in costs.values()) for i in range(2)]
        for costs in (report.before, report.after)
    )
    note = (
        f"rewritten and checked in {seconds:.1f} s; counted: {before[0] / 1e9:.1f} -> "
        f"{after[0] / 1e9:.1f} GFLOP, {before[1] / 1e6:.0f} -> {after[1] / 1e6:.0f} MB"
    )
    models: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "flat": (model, flat),
        "rewritten": (fast, own),
    }
    if job.name == "ads":
        models[TWO_LEVELS] = _two_levels(entry, model, flat)
    calls = {}
    for who, (run, given) in models.items():
        if options.eager:
            calls[who] = functools.partial(run, **given)
        compiled = torch.compile(run, dynamic=False)
        calls[f"{who}-compile"] = functools.partial(compiled, **given)
    return calls, {who: note for who in calls if who in ("rewritten", "rewritten-compile")}


def _two_levels(
    entry: Entry, model: nn.Module, flat: dict[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    given = dict(flat)
    given["item_to_user"] = given.pop("vendor_to_user")[flat["item_to_vendor"]]
    given["item_to_vendor"] = given.pop("item_to_vendor")
    levels = {**entry.levels, "item_to_vendor": "item"}
    fast, _ = ikbo.rewrite(
        TwoLevels(model).eval(),
        given,
        levels=levels,
        broadcasts={"item_to_user": ("item", "user")},
        check_seconds=0,
    )
    return fast, given


def agreeing(calls: dict[str, Contender]) -> None:
    """No speed without right results."""
    expected: Any = calls["flat-compile"]()
    for who, call in calls.items():
        found: Any = call()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < TOLERANCE:
            raise AssertionError(f"{who} is off by {error:.1e}")


def _graphed(calls: dict[str, Contender], notes: dict[str, str]) -> dict[str, Contender]:
    """As CUDA graphs; a model that asks the device for sizes stays as it is, and says so."""
    from cuda_timing import graphed

    found = {}
    for who, call in calls.items():
        try:
            found[who] = graphed(call)
        except RuntimeError as error:
            torch.cuda.synchronize()
            found[who] = call
            why = f"no CUDA graph: {str(error).splitlines()[0]:.80}"
            notes[who] = "; ".join(filter(None, [notes.get(who), why]))
    return found


def bench(job: Job, options: Options, turn: Callable[[], None]) -> Measured:
    """Gets ready, waits for its turn, measures."""
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    begin = time.perf_counter()
    with torch.inference_mode():
        calls, notes = contenders(job, options)
        agreeing(calls)
        clock: Clock = wall_clock
        if options.device == "cuda":
            from cuda_timing import ColdClock

            calls, clock = _graphed(calls, notes), ColdClock()
        print(f"{job.workload}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
        turn()
        timings = interleaved(calls, options.rounds, clock=clock, sample_ms=0.0)
    return Measured(timings, notes)


def _child(job: Job, options: Options, pipe: Connection) -> None:
    """Runs in a process of its own: says that it is ready, waits for a word, sends what it has."""

    def turn() -> None:
        pipe.send(None)
        pipe.recv()

    try:
        pipe.send(bench(job, options, turn))
    except Exception:
        pipe.send(traceback.format_exc())


def _apart(jobs: list[Job], options: Options) -> Iterator[tuple[Job, Measured]]:
    """All jobs at once, but for measuring."""
    # Each would start as many compilers as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    children = []
    for job in jobs:
        pipe, end = context.Pipe()
        process = context.Process(target=_child, args=(job, options, end), daemon=True)
        process.start()
        end.close()
        children.append((job, pipe, process))
    ready = {job: _received(pipe) for job, pipe, _ in children}
    for job, pipe, process in children:
        found = ready[job]
        if found is None:
            pipe.send(None)
            found = _received(pipe)
        process.join()
        if isinstance(found, str):
            print(f"{job.workload} failed:\n{found}", file=sys.stderr, flush=True)
        else:
            yield job, found


def _received(pipe: Connection) -> Measured | str | None:
    try:
        found: Measured | str | None = pipe.recv()
    except EOFError:
        return "its process ended"
    return found


def measured(jobs: list[Job], options: Options, at_once: int) -> Iterator[tuple[Job, Measured]]:
    """Results of all jobs, so many of which get ready side by side."""
    if at_once > 1:
        for start in range(0, len(jobs), at_once):
            yield from _apart(jobs[start : start + at_once], options)
        return
    for job in jobs:
        torch.compiler.reset()
        yield job, bench(job, options, lambda: None)


def compared(job: Job, found: Measured, items: int) -> dict[str, float]:
    """How much faster than flat each contender is, and than two levels; written into its notes."""
    faster = {}
    for who, timing in found.timings.items():
        peers = {"": "flat", f" over {TWO_LEVELS}": TWO_LEVELS}
        for what, peer in peers.items():
            peer += "-compile" if who.endswith("-compile") else ""
            if who == peer or peer not in found.timings or who.startswith("flat"):
                continue
            if what and who.startswith(TWO_LEVELS):
                continue
            faster[who + what] = timing.times_faster_than(found.timings[peer])
            own = f"{faster[who + what]:.3f}x {peer}, {items} items"
            found.notes[who] = "; ".join(filter(None, [own, found.notes.get(who)]))
    line = "  ".join(f"{who} {times:.3f}x" for who, times in faster.items())
    print(f"{job.workload}: {found.timings['flat-compile'].median_ms:.2f} ms; {line}", flush=True)
    return faster


def _results(options: Options) -> Results:
    if options.device == "cuda":
        from cuda_timing import cuda_ceilings, device_name

        results = Results("rewrite", device_name())
        results.ceilings = cuda_ceilings()
        torch.cuda.empty_cache()
    else:
        results = Results("rewrite", f"{cpu_name()}, {options.threads} threads")
        results.ceilings = cpu_ceilings()
    return results


def main(
    models: Annotated[
        str, typer.Option(help="Only these, separated by commas; then nothing is written.")
    ] = "",
    ratios: Annotated[str, typer.Option(help="Items a user, separated by commas.")] = RATIOS,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    items: Annotated[int, typer.Option(help="Of all users together.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 20,
    threads: Annotated[int, typer.Option(help="Threads torch may use on a CPU.")] = 1,
    jobs: Annotated[int | None, typer.Option(help="Processes; default 1, with cuda 18.")] = None,
    eager: Annotated[bool, typer.Option(help="Also without torch.compile.")] = False,
    tiny: Annotated[bool, typer.Option(help="The zoo's tiny sizes, to try this out.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results file.")] = RESULTS,
) -> None:
    """Times the zoo, shows a table and writes rewrite_<device>.json."""
    begin = time.perf_counter()
    options = Options(device, items, rounds, threads, eager, tiny)
    torch.set_num_threads(threads)
    results = _results(options)
    chosen = models.split(",") if models else list(ZOO)
    todo = [Job(name, int(ratio)) for ratio in ratios.split(",") for name in chosen]
    faster: dict[tuple[int, str], list[float]] = {}
    for job, found in measured(todo, options, jobs or JOBS[device]):
        for who, times in compared(job, found, items).items():
            faster.setdefault((job.ratio, who), []).append(times)
        dtype = str(SIZES[job.name].dtype).removeprefix("torch.")
        results.add(job.workload, found.timings, direction="fwd", dtype=dtype, notes=found.notes)
    results.show()
    for (ratio, who), times in faster.items():
        mean = statistics.geometric_mean(times)
        print(f"r{ratio} {who}: {mean:.3f}x, least {min(times):.3f}x, of {len(times)} models")
    done = len({record.workload for record in results.records})
    print(f"{done} of {len(todo)} workloads in {time.perf_counter() - begin:.0f} s")
    if done < len(todo):
        raise typer.Exit(1)
    if not models and not tiny:
        print(f"written to {results.write(out)}")


if __name__ == "__main__":
    typer.run(main)
