"""`ikbo-tree bench-serve`: latency and throughput of a served model under open-loop load."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from ikbo_tree.demo.options import Device, Impl, Json, Out, Seed, Threads
from ikbo_tree.demo.pictures import COLOURS, STYLE
from ikbo_tree.demo.report import Printer, Results
from ikbo_tree.demo.traffic import Traffic
from ikbo_tree.demo.training import FLAT, TREE
from ikbo_tree.extras import require
from ikbo_tree.serving import Request, example
from ikbo_tree.serving.export import save
from ikbo_tree.serving.metrics import BatchFacts, Metrics
from ikbo_tree.serving.open_loop import HttpTarget, Load, Target, open_loop
from ikbo_tree.serving.options import Options

SINGLE, CACHED = "one a call", "users cached"
CONTENDERS = (TREE, FLAT, SINGLE)
ENGINES = ("in-process", "ray")
Curves = dict[str, list[Load]]


class HostTimes(Metrics):
    """Keeps what each batch took beside its run: merging, filling the buffers, splitting."""

    def __init__(self) -> None:
        self.us: list[float] = []

    def batch(self, facts: BatchFacts) -> None:
        """See `Metrics`."""
        self.us.append((facts.merge_s + facts.split_s) * 1e6)

    @property
    def median_us(self) -> float | None:
        """The median; None where no batch ran in this process."""
        return round(float(np.median(self.us)), 1) if self.us else None


def bench_serve(
    out: Out = Path("bench-serve-output"),
    rates: Annotated[
        str, typer.Option(help="Requests a second, rising; comma-separated.")
    ] = "25,50,100,150,200,300,400,600,800",
    ratio: Annotated[float, typer.Option(min=1, help="Mean candidates of a request.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of load at each rate.")] = 5.0,
    requests: Annotated[int, typer.Option(min=1, help="Different requests.")] = 128,
    limit_ms: Annotated[
        float, typer.Option(min=0, help="Throughput is the highest rate with p99 below this.")
    ] = 50.0,
    delay_ms: Annotated[float, typer.Option(min=0, help="How long a request waits.")] = 2.0,
    items: Annotated[int, typer.Option(min=1, help="Most items of a batch.")] = 4096,
    size: Annotated[
        str, typer.Option(help=f"Ranker, one of {', '.join(example.SCALES)}.")
    ] = "small",
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "in-process",
    cache_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="One contender more: the tree model with so many MiB of users' results kept.",
        ),
    ] = 0,
    seed: Seed = 0,
    device: Device = "cpu",
    impl: Impl = "auto",
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """Serves the demo's ranker to Poisson arrivals and takes latencies.

    Contenders: the tree model on merged requests; the flat model, with the same parameters, in the
    same engine; the tree model with one request a call. Each meets rising rates until it is
    saturated. All scores of all contenders are compared first.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"must be one of {', '.join(ENGINES)}", param_hint="--engine")
    if size not in example.SCALES:
        raise typer.BadParameter(f"must be one of {', '.join(example.SCALES)}", param_hint="--size")
    require("prometheus_client", "serve")
    try:
        points = [float(text) for text in rates.split(",")]
    except ValueError:
        rule = f"must be numbers with commas between; got {rates!r}"
        raise typer.BadParameter(rule, param_hint="--rates") from None
    if sorted(points) != points or points[0] <= 0:
        raise typer.BadParameter("must be positive and rise", param_hint="--rates")
    torch.set_num_threads(threads)
    printer, results = Printer(), Results(torch.device(device), impl)
    load = example.requests(Traffic(seed), requests, ratio)
    largest = example.largest(load)
    capacity = {"user": 64, "vendor": max(items, largest), "item": max(items, largest)}
    contenders = (*CONTENDERS, CACHED) if cache_mb else CONTENDERS
    curves: Curves = {}
    scores, host_us = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        files = _export(Path(folder), contenders, seed, size, load, device)
        for name in contenders:
            options = Options(
                files.get(name, files[TREE]),
                (capacity,),
                device,
                impl,
                threads,
                max_delay_s=0.0 if name == SINGLE else delay_ms / 1e3,
                max_requests=1 if name == SINGLE else 64,
                cache_bytes=cache_mb << 20 if name == CACHED else 0,
            )
            times = HostTimes()
            with _serving(options, engine, times) as target:
                scores[name] = [_scores(target.submit(x).result(60)) for x in load]
                curves[name] = _curve(target, load, points, seconds, limit_ms, seed)
            host_us[name] = times.median_us
    differences = {
        name: max(float(abs(a - b).max()) for a, b in zip(scores[TREE], other, strict=True))
        for name, other in scores.items()
    }
    _tell(printer, curves, differences, host_us, limit_ms)
    _record(results, curves, ratio, f"{engine}, {size}", limit_ms)
    results.checks["largest_difference"] = differences
    results.checks["host_us_a_batch"] = host_us
    picture = out / "latency.png"
    _picture(
        picture,
        curves,
        f"Serving, {ratio:g} candidates a request, {results.where}, {engine}, {size}",
    )
    printer.written([picture, *results.write(json)])


def _export(
    folder: Path,
    contenders: tuple[str, ...],
    seed: int,
    size: str,
    load: list[Request],
    device: str,
) -> dict[str, Path]:
    """The contenders' models as files; who has none is served the tree model's."""
    two = sorted(load, key=lambda x: len(x.inputs["item_features"]))[-2:]
    together = Request(
        {level: np.concatenate([x.counts[level] for x in two]) for level in ("vendor", "item")},
        {name: torch.cat([torch.as_tensor(x.inputs[name]) for x in two]) for name in two[0].inputs},
    )
    sizes = example.SCALES[size]
    models: dict[str, nn.Module] = {**example.scorers(seed, sizes)}
    signatures = dict.fromkeys(models, example.signature())
    if CACHED in contenders:
        models[CACHED] = staged = example.staged(seed, sizes)
        signatures[CACHED] = staged.signature
    files = {}
    for name, model in models.items():
        files[name] = folder / f"{name.replace(' ', '_')}.pt2"
        save(model.to(device), signatures[name], together, files[name])
    return files


@contextlib.contextmanager
def _serving(options: Options, engine: str, metrics: Metrics) -> Iterator[Target]:
    if engine == "in-process":
        with options.batcher(metrics) as batcher:
            yield batcher
        return
    serve: Any = require("ray.serve", "serve")
    from ikbo_tree.serving import ray_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray_app.run(options, host="127.0.0.1", port=port, blocking=False)
    target = HttpTarget("127.0.0.1", port)
    try:
        yield target
    finally:
        target.close()
        serve.shutdown()


def _scores(answer: Any) -> np.ndarray:
    if isinstance(answer, bytes):
        import io

        loaded: np.ndarray = np.load(io.BytesIO(answer), allow_pickle=False)
        return loaded
    values: np.ndarray = answer.values.numpy()
    return values


def _curve(
    target: Target,
    load: list[Request],
    points: list[float],
    seconds: float,
    limit_ms: float,
    seed: int,
) -> list[Load]:
    """Load at rising rates, up to the first at which the target is saturated."""
    found = []
    for rate in points:
        found.append(open_loop(target, load, rate=rate, seconds=seconds, seed=seed))
        if found[-1].quantile(0.99) > 4 * limit_ms or found[-1].statuses.keys() != {200}:
            break
    return found


def _throughput(curve: list[Load], limit_ms: float) -> float:
    """The highest rate that was served whole with p99 within the limit."""
    good = [x.offered for x in curve if x.quantile(0.99) <= limit_ms and set(x.statuses) == {200}]
    return max(good, default=0.0)


def _tell(
    printer: Printer,
    curves: Curves,
    differences: dict[str, float],
    host_us: dict[str, float | None],
    limit_ms: float,
) -> None:
    rows = [
        [
            name,
            f"{x.offered:,.0f}",
            f"{x.served:,.0f}",
            *(f"{x.quantile(q):,.1f}" for q in (0.5, 0.9, 0.99)),
            f"{sum(n for status, n in x.statuses.items() if status != 200)}",
        ]
        for name, curve in curves.items()
        for x in curve
    ]
    printer.heading("Latencies from the moment a request was due")
    printer.table(["", "due /s", "served /s", "p50 ms", "p90 ms", "p99 ms", "refused"], rows)
    for name, curve in curves.items():
        printer.say(f"{name}: {_throughput(curve, limit_ms):,.0f} a second at p99 <= {limit_ms} ms")
        if host_us[name] is not None:
            printer.say(f"    {host_us[name]:,.0f} us a batch for merging, buffers and splitting")
    printer.say(
        f"largest difference of scores from the tree model's: {max(differences.values()):.1e}"
    )


def _record(results: Results, curves: Curves, ratio: float, note: str, limit_ms: float) -> None:
    automatic = results.impl == "auto" and results.device.type == "cpu"
    ours = "ikbo-torch" if automatic else f"ikbo-{results.impl}"
    who = {
        TREE: ours,
        FLAT: "materialised+broadcast",
        SINGLE: f"{ours}, one request a call",
        CACHED: f"{ours}, users cached",
    }
    for name, curve in curves.items():
        for x in curve:
            refused = sum(n for status, n in x.statuses.items() if status != 200)
            results.records.append(
                {
                    "workload": f"serve-r{ratio:g}-q{x.offered:g}",
                    "who": who[name],
                    "direction": "fwd",
                    "dtype": "float32",
                    "median_ms": _rounded(x.quantile(0.5)),
                    "p10_ms": _rounded(x.quantile(0.1)),
                    "p90_ms": _rounded(x.quantile(0.9)),
                    "p99_ms": _rounded(x.quantile(0.99)),
                    "offered_rps": x.offered,
                    "served_rps": round(x.served, 2),
                    "refused": refused,
                    "tflops": None,
                    "gbps": None,
                    "peak_mb": None,
                    "note": note,
                }
            )
    results.checks["throughput"] = {
        "limit_ms": limit_ms,
        **{who[name]: _throughput(curve, limit_ms) for name, curve in curves.items()},
    }


def _rounded(ms: float) -> float | None:
    return round(ms, 4) if ms != float("inf") else None


def _picture(path: Path, curves: Curves, title: str) -> None:
    matplotlib = require("matplotlib", "cli")
    matplotlib.use("agg")
    plots = require("matplotlib.pyplot", "cli")
    path.parent.mkdir(parents=True, exist_ok=True)
    with plots.rc_context(STYLE):
        figure, axes = plots.subplots(figsize=(7, 4.2))
        for name, curve in curves.items():
            rate = [x.served for x in curve]
            colour = {**COLOURS, SINGLE: "#5b5ea6", CACHED: "#c98b1b"}[name]
            for q, style in ((0.99, "-"), (0.5, ":")):
                axes.plot(
                    rate,
                    [x.quantile(q) for x in curve],
                    style,
                    marker="o",
                    markersize=3,
                    color=colour,
                    label=f"{name}, p{100 * q:.0f}",
                )
        axes.set(yscale="log", xlabel="requests served a second", ylabel="latency, ms", title=title)
        axes.legend(frameon=False)
        figure.savefig(path, bbox_inches="tight")
        plots.close(figure)
