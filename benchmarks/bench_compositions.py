"""Compositions and modules on a CPU beside flat models: `python benchmarks/bench_compositions.py`.

Workloads are named `<op or module>-b<items>-r<items a user>-<widths>`; of two levels unless there
are vendors, `VENDORS` a user. Coarse and fine widths are equal.

Contenders:

- `ikbo-torch`: the public function or module, tree and all.
- `materialised+broadcast`: what an unmodified model runs: index_select of every coarse input to the
  items, then flat torch. Ranking ops have nothing to copy: theirs is torch on [users, items] of
  even lists, which a batch of uneven ones would have to be padded to.
- `materialised`: the same with its copies given.

`peak_mb` is what a call holds at most beyond its inputs, results among it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from cpu_compositions import Workload, make_tree, workloads
from harness import Results, Timing, cpu_ceilings, cpu_name, cpu_peak_mb, interleaved
from torch import Tensor

import ikbo_tree as ikbo


@dataclass(frozen=True)
class Data:
    """A workload's tensors; `x` at their own levels, weights among them."""

    workload: Workload
    tree: ikbo.BroadcastTree
    x: dict[str, Tensor]

    @staticmethod
    def of(workload: Workload) -> Data:
        """Normal values, weights of an inner width's scale."""
        w, tree = workload, make_tree("vendor" in workload.shapes)
        x = {}
        for name, shape in w.shapes.items():
            x[name] = torch.randn(tree.rows(w.levels.get(name, name)), *shape)
        for name, shape in w.weights.items():
            x[name] = torch.randn(shape) / shape[-1] ** 0.5
        for name, (level, shape, size) in w.ids.items():
            x[name] = torch.randint(size, (tree.rows(level), *shape))
        return Data(workload, tree, x)

    def ours(self) -> Tensor:
        """On the tree."""
        return self.workload.ours(self.x, self.tree)

    def copies(self) -> dict[str, Tensor]:
        """Every input at the items."""
        w, found = self.workload, dict(self.x)
        for name in (*w.shapes, *w.ids):
            level = w.ids[name][0] if name in w.ids else w.levels.get(name, name)
            if level != "item":
                found[name] = self.x[name].index_select(0, self.tree.ancestors("item", of=level))
        return found

    def flat(self) -> Tensor:
        """With the broadcast."""
        return self.workload.flat(self.copies())

    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        floats = [x for x in self.x.values() if x.is_floating_point()]
        return [*floats, *(self.workload.module.parameters() if self.workload.module else ())]


def bench(results: Results, workload: Workload, rounds: int) -> None:
    """One workload, forward, and forward with backward."""
    data = Data.of(workload)
    with torch.inference_mode():
        torch.testing.assert_close(data.ours(), data.flat(), rtol=1e-3, atol=1e-3)
        given = data.copies()
        contenders: dict[str, Callable[[], object]] = {
            "ikbo-torch": data.ours,
            "materialised+broadcast": data.flat,
            "materialised": lambda: workload.flat(given),
        }
        timings = interleaved(contenders, rounds)
        peak = {who: cpu_peak_mb(contender) for who, contender in contenders.items()}
    add(results, workload, timings, "fwd", peak)
    for leaf in data.leaves():
        leaf.requires_grad_()
    grad = torch.randn_like(data.ours())

    def training(forward: Callable[[], Tensor]) -> Callable[[], object]:
        # Some parameters have no part in the items' result.
        return lambda: torch.autograd.grad(forward(), data.leaves(), grad, allow_unused=True)

    contenders = {
        "ikbo-torch": training(data.ours),
        "materialised+broadcast": training(data.flat),
    }
    timings = interleaved(contenders, max(5, rounds // 3))
    peak = {who: cpu_peak_mb(contender) for who, contender in contenders.items()}
    add(results, workload, timings, "fwd_bwd", peak)


def add(
    results: Results,
    workload: Workload,
    timings: Mapping[str, Timing],
    direction: str,
    peak: Mapping[str, float],
) -> None:
    """Records; a contender's note is its time over ours, the median of the rounds' ratios."""
    ours = timings["ikbo-torch"]
    notes = {
        who: f"{ours.times_faster_than(timing):.2f}x ours"
        for who, timing in timings.items()
        if who != "ikbo-torch"
    }
    results.add(
        workload.title, timings, direction=direction, dtype="float32", peak_mb=peak, notes=notes
    )


def main(
    op: Annotated[
        list[str] | None, typer.Option(help="Only these ops; then nothing is written.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each contender.")] = 20,
    threads: Annotated[int, typer.Option(help="Threads torch may use.")] = 1,
) -> None:
    """Times them, shows a table, writes benchmarks/results/compositions-cpu_<device>.json."""
    torch.set_num_threads(threads)
    chosen = [w for w in workloads() if not op or w.family in op]
    if not chosen:
        raise typer.BadParameter("must name an op or module", param_hint="--op")
    results = Results("compositions-cpu", f"{cpu_name()}, {threads} threads")
    results.ceilings = cpu_ceilings()
    for workload in chosen:
        bench(results, workload, rounds)
    results.show()
    if not op:
        print(f"written to {results.write()}")


if __name__ == "__main__":
    typer.run(main)
