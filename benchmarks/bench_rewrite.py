"""Whole models before and after `ikbo_tree.rewrite`: `python benchmarks/bench_rewrite.py`.

Every model of tests/models at 1, 8 and 64 items a user (ads: four vendors a user where there are so
many items). Contenders take turns in one process:

    flat                 the model as it is, with its inputs as it takes them
    rewritten            what `rewrite` made of it for this tree, with compact inputs where it does
    rewritten-2-levels   ads only: vendors' rows broadcast to the items as the model does
    flat-compiled, ...   the same under torch.compile, with --compiled

Results are in benchmarks/results/rewrite_<device>.json, workloads named model-<name>-r<ratio>.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from harness import ROOT, Clock, Contender, Results, cpu_ceilings, cpu_name, interleaved, wall_clock
from torch import Tensor, nn

import ikbo_tree as ikbo

sys.path.append(str(ROOT / "tests"))

from models.sizes import SIZES
from models.zoo import ZOO, Entry

RATIOS = (1, 8, 64)
VENDORS = 4
ITEMS = {"cpu": 256, "cuda": 1024}
"""On a CPU fewer, so that a run takes minutes; `--items 1024` is what the GPU gets."""

TOLERANCE = 1e-3
"""Of float32 results, relative to the largest: sums of thousands of terms in another order."""


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


def contenders(
    entry: Entry, model: nn.Module, tree: ikbo.BroadcastTree, compiled: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """By name, and notes on some."""
    sizes = SIZES[entry.name]
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
        check_seconds=0,
    )
    seconds = time.perf_counter() - begin
    before, after = (
        [sum(cost[i] for cost in costs.values()) for i in range(2)]
        for costs in (report.before, report.after)
    )
    notes = {
        "rewritten": f"rewritten in {seconds:.1f} s; counted: {before[0] / 1e9:.1f} -> "
        f"{after[0] / 1e9:.1f} GFLOP, {before[1] / 1e6:.0f} -> {after[1] / 1e6:.0f} MB"
    }
    models: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "flat": (model, flat),
        "rewritten": (fast, own),
    }
    if entry.name == "ads":
        models["rewritten-2-levels"] = _two_levels(entry, model, flat)
    if compiled:
        for who, (run, given) in list(models.items()):
            models[f"{who}-compiled"] = (torch.compile(run, dynamic=False), given)
    calls = {who: functools.partial(run, **given) for who, (run, given) in models.items()}
    return calls, notes


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
    expected: Any = calls["flat"]()
    for who, call in calls.items():
        found: Any = call()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < TOLERANCE:
            raise AssertionError(f"{who} is off by {error:.1e}")


def bench(
    results: Results,
    name: str,
    ratio: int,
    *,
    items: int,
    rounds: int,
    device: str,
    compiled: bool,
    clock: Clock,
) -> dict[str, float]:
    """Adds the records of a workload; how much faster than flat each contender is."""
    entry = ZOO[name]
    model = entry.build(SIZES[name]).to(device)
    tree = tree_of(entry, items, ratio).to(device)
    calls, notes = contenders(entry, model, tree, compiled)
    with torch.inference_mode():
        agreeing(calls)
        if device == "cuda":
            calls = _graphed(calls, notes)
        timings = interleaved(calls, rounds, clock=clock, sample_ms=0.0)
    faster = {}
    for who, timing in timings.items():
        peer = "flat-compiled" if who.endswith("-compiled") else "flat"
        faster[who] = timing.times_faster_than(timings[peer])
        if who != peer:
            own = f"{faster[who]:.3f}x {peer}, {items} items"
            notes[who] = "; ".join(filter(None, [own, notes.get(who)]))
    dtype = str(SIZES[name].dtype).removeprefix("torch.")
    results.add(f"model-{name}-r{ratio}", timings, direction="fwd", dtype=dtype, notes=notes)
    line = "  ".join(f"{who} {ratio_:.3f}" for who, ratio_ in faster.items())
    print(f"model-{name}-r{ratio}: {timings['flat'].median_ms:.2f} ms; {line}", flush=True)
    return faster


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
            notes[who] = "; ".join(
                filter(None, [notes.get(who), f"no CUDA graph: {str(error).splitlines()[0]:.80}"])
            )
    return found


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Only these models; then nothing is written.")
    ] = None,
    ratio: Annotated[list[int] | None, typer.Option(help="Items a user; default 1, 8, 64.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    items: Annotated[int | None, typer.Option(help="Default 256 on a CPU, 1024 else.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads torch may use on a CPU.")] = 1,
    compiled: Annotated[bool, typer.Option(help="Also under torch.compile; takes long.")] = False,
) -> None:
    """Times the zoo, shows a table and writes benchmarks/results/rewrite_<device>.json."""
    torch.set_num_threads(threads)
    clock: Clock = wall_clock
    if device == "cuda":
        from cuda_timing import ColdClock, cuda_ceilings, device_name

        results = Results("rewrite", device_name())
        results.ceilings, clock = cuda_ceilings(), ColdClock()
    else:
        results = Results("rewrite", f"{cpu_name()}, {threads} threads")
        results.ceilings = cpu_ceilings()
    many = items or ITEMS[device]
    faster: dict[tuple[str, int], list[float]] = {}
    for name in model or ZOO:
        for per_user in ratio or RATIOS:
            torch.compiler.reset()
            found = bench(
                results, name, per_user, items=many, rounds=rounds, device=device,
                compiled=compiled, clock=clock,
            )  # fmt: skip
            for who, times in found.items():
                faster.setdefault((who, per_user), []).append(times)
    results.show()
    for (who, per_user), times in faster.items():
        mean = statistics.geometric_mean(times)
        print(f"r{per_user} {who}: {mean:.3f}x, least {min(times):.3f}x, of {len(times)} models")
    if not (model or ratio):
        print(f"written to {results.write()}")


if __name__ == "__main__":
    typer.run(main)
