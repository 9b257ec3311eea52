"""`ikbo-tree movielens`: real histories, user -> genre shelf -> movie, flat and tree model."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.demo import pictures, training
from ikbo_tree.demo.auc import auc, may_differ
from ikbo_tree.demo.cost import Cost, measure, peak_mb
from ikbo_tree.demo.movielens import MovieLog, MovieRequests
from ikbo_tree.demo.movies import MovieRanker
from ikbo_tree.demo.options import Device, Impl, Json, Out, Rounds, Seed, Threads
from ikbo_tree.demo.ranker import FlatRanker, TreeRanker
from ikbo_tree.demo.ratings import DataError, Ratings, load
from ikbo_tree.demo.report import Printer, Results
from ikbo_tree.demo.training import EXACT, FLAT, TREE, Curve


def movielens(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with one .inter, .item and .user file, such an .inter file, or the wheel"
            " recbole 1.2.1; without it pip downloads that wheel (2 MB) into a cache."
        ),
    ] = None,
    out: Out = Path("movielens-output"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training requests.")] = 6,
    users: Annotated[int, typer.Option(min=1, help="Requests of a training batch.")] = 256,
    serve: Annotated[int, typer.Option(min=1, help="Users for whom every movie is scored.")] = 8,
    test_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the ratings after the split.")
    ] = 0.2,
    rounds: Rounds = 5,
    seed: Seed = 0,
    device: Device = "cpu",
    impl: Impl = "auto",
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """Trains one model on MovieLens-100K, flat and on the tree, and compares.

    A request is a user at a point in time: history is what they rated before, candidates are the
    movies that they rate next, grouped by genre shelf; a rating of 4 or 5 is label 1. Both models,
    the tree's made of modules of ikbo_tree.nn, start from the same weights and see the same
    batches; their losses must agree within what float32 rounding explains, and so must their AUC on
    the ratings after the split. Then their costs: a training step, and scoring every movie for some
    users.
    """
    torch.set_num_threads(threads)
    printer, results = Printer(), Results(torch.device(device), impl)
    log, split, requests, is_test = _read(data, test_share)
    _describe(printer, log.ratings, requests, is_test)
    torch.manual_seed(seed)
    flat, tree = (MovieRanker(kind, log.ratings).to(device) for kind in (FlatRanker, TreeRanker))
    tree.load_state_dict(flat.state_dict())
    models = {FLAT: flat, TREE: tree}
    training_rows, test_rows = (torch.nonzero(which).squeeze(1) for which in (~is_test, is_test))
    batches = _batches(requests, training_rows, epochs, users, seed, results.device)
    tests = [requests.select(rows).to(results.device) for rows in test_rows.split(users)]
    everything = log.catalogue(log.last_seen(split, serve), split).to(results.device)

    with ikbo.implementation(impl):
        found = {"scores": training.scores_agree(flat, tree, tests)}
        curves, found["losses"] = training.train(flat, tree, batches, learning_rate=0.01)
        printer.heading(f"The same scores (untrained), and the same {len(batches)} training steps")
        printer.agreements(found)
        printer.losses(curves[TREE].losses)
        aucs = _compare_auc(printer, results, models, tests)
        costs = _costs(models, curves, batches[0], everything, rounds, results)
    results.checks |= {name: asdict(agreement) for name, agreement in found.items()}
    _metrics(printer, curves, aucs, next(iter(costs.values())))
    printer.costs(f"Median costs, float32, {results.where}", "", costs)
    printer.memory_measure()

    written = [out / name for name in ("fan_out.png", "losses.png", "costs.png")]
    pictures.fan_out(written[0], requests.tree, "MovieLens-100K as user -> shelf -> movie")
    losses = {name: curves[name].losses for name in (FLAT, TREE, EXACT)}
    pictures.losses(written[1], losses, found["losses"])
    pictures.costs_of_workloads(written[2], costs, "MovieLens-100K, flat and tree model")
    printer.written([*written, *results.write(json)])


def _read(data: Path | None, test_share: float) -> tuple[MovieLog, int, MovieRequests, Tensor]:
    """The log, the second that splits it, all requests, and which are the test's."""
    try:
        log = MovieLog(load(data))
        split = log.split_time(test_share)
        requests, is_test = log.rated_next(split)
        later = requests.labels[is_test[requests.tree.ancestors("movie", of="user").long()]]
        if is_test.all() or len(later.unique()) < 2:
            raise DataError(
                f"--test-share {test_share} leaves nothing to train on, or to the test no movie"
                " that was liked beside one that was not"
            )
    except DataError as error:
        print(f"ikbo-tree movielens: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    return log, split, requests, is_test


def _describe(printer: Printer, ratings: Ratings, requests: MovieRequests, test: Tensor) -> None:
    printer.heading("Requests: user (at a point in time) -> genre shelf -> movie")
    printer.fan_outs(requests.tree)
    printer.say(
        f"{len(ratings.user):,} ratings of {len(ratings.shelf):,} movies by {len(ratings.age):,}"
        f" users; {int(test.sum()):,} of {len(test):,} requests are the test's"
    )


def _batches(
    requests: MovieRequests, rows: Tensor, epochs: int, users: int, seed: int, device: torch.device
) -> list[MovieRequests]:
    """The training requests in random order, once an epoch, so many at a time."""
    generator = torch.Generator().manual_seed(seed)
    order = [rows[torch.randperm(len(rows), generator=generator)] for _ in range(epochs)]
    return [requests.select(some).to(device) for epoch in order for some in epoch.split(users)]


def _compare_auc(
    printer: Printer, results: Results, models: dict[str, MovieRanker], tests: list[MovieRequests]
) -> dict[str, float]:
    """Prints, checks and returns the AUC of both trained models on the test's requests."""
    labels = torch.cat([batch.labels for batch in tests])
    with torch.no_grad():
        scores = {
            name: torch.cat([model(batch.tree, batch.inputs) for batch in tests])
            for name, model in models.items()
        }
    found = {name: auc(score, labels) for name, score in scores.items()}
    allowed = may_differ(scores[FLAT], scores[TREE], labels)
    means = torch.cat([batch.inputs["movie"]["features"][:, 1] for batch in tests])
    found["mean rating of the movie"] = auc(means, labels)
    printer.say(
        f"AUC on {len(labels):,} later ratings: flat {found[FLAT]:.5f}, tree {found[TREE]:.5f}"
        f" (allowed difference {allowed:.1e}); by the movie's mean rating alone"
        f" {found['mean rating of the movie']:.5f}"
    )
    results.checks["auc"] = found | {"allowed_difference": allowed}
    if abs(found[FLAT] - found[TREE]) > allowed:
        raise AssertionError(f"AUC {found[FLAT]} and {found[TREE]} differ by more than {allowed}")
    return found


def _metrics(
    printer: Printer, curves: dict[str, Curve], aucs: dict[str, float], steps: dict[str, Cost]
) -> None:
    """What training came to and what it took, of both models."""
    rows = [
        ["loss, mean of the last ten steps", *(_late(curves[name]) for name in (FLAT, TREE))],
        ["AUC on later ratings", *(f"{aucs[name]:.5f}" for name in (FLAT, TREE))],
        ["ms a training step (median)", *(f"{steps[n].median_ms:,.1f}" for n in (FLAT, TREE))],
        ["peak MiB of a training step", *(f"{steps[n].peak_mb:,.1f}" for n in (FLAT, TREE))],
    ]
    printer.table(["training", "flat", "tree"], rows)


def _late(curve: Curve) -> str:
    last = curve.losses[-10:]
    return f"{sum(last) / len(last):.5f}"


def _costs(
    models: dict[str, MovieRanker],
    curves: dict[str, Curve],
    batch: MovieRequests,
    everything: MovieRequests,
    rounds: int,
    results: Results,
) -> dict[str, dict[str, Cost]]:
    """What the training steps that were made cost, and scoring every movie."""
    steps, calls = {}, {}
    for name, model in models.items():
        peak = peak_mb(training.step_call(model, batch), results.device)
        steps[name] = Cost(tuple(curves[name].step_ms), peak)
        calls[name] = training.forward_call(model, everything)
    scoring = measure(calls, rounds=rounds, device=results.device)
    users, all_for = (some.tree.rows("user") for some in (batch, everything))
    for some, direction, costs in ((batch, "fwd_bwd", steps), (everything, "fwd", scoring)):
        ratio = some.tree.rows("movie") / some.tree.rows("user")
        results.add(f"model-movielens-r{ratio:.0f}", direction, costs, repr(some.tree))
    return {f"train, {users} users": steps, f"all movies, {all_for} users": scoring}
