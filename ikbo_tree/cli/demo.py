"""`ikbo-tree demo`: generated requests over three levels, flat and tree model side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree.demo import pictures, training
from ikbo_tree.demo.cost import Cost, measure
from ikbo_tree.demo.options import Device, Impl, Json, Out, Rounds, Seed, Threads
from ikbo_tree.demo.ranker import FlatRanker, TreeRanker
from ikbo_tree.demo.report import Printer, Results
from ikbo_tree.demo.traffic import SIZES, Requests, Traffic
from ikbo_tree.demo.training import EXACT, FLAT, TREE, Agreement

Sweep = dict[float, dict[str, dict[str, Cost]]]
"""By ratio, then kind of call, then contender."""
FORWARD, STEP = "forward", "training step"


def demo(
    out: Out = Path("demo-output"),
    ratios: Annotated[
        str, typer.Option(help="Candidates a user, for the costs; comma-separated.")
    ] = "10,100,1000,10000",
    candidates: Annotated[
        int, typer.Option(min=1, help="Candidates of a batch whose cost is taken.")
    ] = 10_000,
    users: Annotated[int, typer.Option(min=1, help="Users of a training batch.")] = 32,
    ratio: Annotated[float, typer.Option(min=1, help="Mean candidates a user in training.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    rounds: Rounds = 5,
    seed: Seed = 0,
    device: Device = "cpu",
    impl: Impl = "auto",
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """Scores and trains one model on generated requests, flat and on the tree, and compares.

    Users have log-normally many candidates, grouped below Zipf-distributed vendors. The flat model
    is plain PyTorch on broadcast inputs, the tree model has the same parameters and never copies.
    Their scores and losses must agree within what float32 rounding explains. Then both are timed,
    in turns, with fewer and fewer users above the same number of candidates.
    """
    points = _numbers(ratios)
    torch.set_num_threads(threads)
    printer, results = Printer(), Results(torch.device(device), impl)
    traffic = Traffic(seed, device=results.device)
    torch.manual_seed(seed)
    flat, tree = FlatRanker(SIZES).to(device), TreeRanker(SIZES).to(device)
    tree.load_state_dict(flat.state_dict())
    batches = [traffic.requests(users, ratio, number) for number in range(steps)]
    printer.heading("One batch of requests: user -> vendor -> item")
    printer.fan_outs(batches[0].tree)
    with ikbo.implementation(impl):
        losses, found = _train(flat, tree, batches)
        printer.heading(f"The same scores, and the same {steps} steps of training")
        printer.agreements(found)
        printer.losses(losses[TREE])
        sweep, worst = _sweep(flat, tree, traffic, points, candidates, rounds, results)
    results.checks |= {name: asdict(agreement) for name, agreement in found.items()}
    results.checks["sweep_difference"] = worst
    printer.heading(f"Costs of {candidates:,} candidates, float32, {results.where}")
    for kind in (FORWARD, STEP):
        rows = {f"{point:,.0f}": costs[kind] for point, costs in sweep.items()}
        printer.costs(kind.capitalize(), "a user", rows)
    printer.memory_measure()
    printer.say(f"largest difference between flat and tree scores of these: {worst:.1e}")

    written = [out / name for name in ("fan_out.png", "losses.png", "costs.png")]
    pictures.fan_out(written[0], batches[0].tree, "Fan-out of one batch of requests")
    pictures.losses(written[1], losses, found["losses"])
    by_kind = {kind: [costs[kind] for costs in sweep.values()] for kind in (FORWARD, STEP)}
    pictures.costs_over_ratios(written[2], points, by_kind)
    printer.written([*written, *results.write(json)])


def _numbers(ratios: str) -> list[float]:
    try:
        points = [float(text) for text in ratios.split(",")]
    except ValueError:
        points = []
    if not points or min(points) < 1:
        raise typer.BadParameter(
            f"must be numbers from 1 on, with commas between; got {ratios!r}",
            param_hint="--ratios",
        )
    return points


def _train(
    flat: nn.Module, tree: nn.Module, batches: list[Requests]
) -> tuple[dict[str, list[float]], dict[str, Agreement]]:
    """Losses of all contenders, and how close scores (before training) and losses are."""
    scores = training.scores_agree(flat, tree, batches[:1])
    curves, losses = training.train(flat, tree, batches, learning_rate=0.01)
    by_name = {name: curves[name].losses for name in (FLAT, TREE, EXACT)}
    return by_name, {"scores": scores, "losses": losses}


def _sweep(
    flat: nn.Module,
    tree: nn.Module,
    traffic: Traffic,
    ratios: list[float],
    candidates: int,
    rounds: int,
    results: Results,
) -> tuple[Sweep, float]:
    """Costs at every ratio, and the largest difference between the scores of both models."""
    models = {FLAT: flat, TREE: tree}
    sweep: Sweep = {}
    worst = 0.0
    for ratio in ratios:
        requests = traffic.requests(max(1, round(candidates / ratio)), ratio)
        worst = max(worst, training.scores_agree(flat, tree, [requests]).difference)
        sweep[ratio] = {
            kind: measure(
                {name: call(model, requests) for name, model in models.items()},
                rounds=rounds,
                device=traffic.device,
            )
            for kind, call in ((FORWARD, training.forward_call), (STEP, training.step_call))
        }
        workload = f"model-demo-r{ratio:g}"
        note = repr(requests.tree)
        results.add(workload, "fwd", sweep[ratio][FORWARD], note)
        results.add(workload, "fwd_bwd", sweep[ratio][STEP], note)
    return sweep, worst
