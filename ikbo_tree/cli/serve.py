"""`ikbo-tree serve`: an exported model behind HTTP and gRPC, or as a model directory for Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ikbo_tree.demo.options import Device, Impl, Threads
from ikbo_tree.errors import TreeError
from ikbo_tree.extras import require
from ikbo_tree.serving import triton_server
from ikbo_tree.serving.buffers import whole_capacity
from ikbo_tree.serving.export import load
from ikbo_tree.serving.options import Options
from ikbo_tree.serving.tracing import hook
from ikbo_tree.serving.triton_server import KEYS

ENGINES = ("ray", "uvicorn")


def serve(
    model: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="File of ikbo_tree.serving.save.")
    ],
    capacity: Annotated[
        list[str],
        typer.Option(
            help="Most rows of a batch by level: user=64,vendor=1024,item=4096. Several times: a"
            " captured graph for each."
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="ray: replicas and autoscaling; uvicorn: one process.")
    ] = "ray",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="With ray: port to listen at for gRPC; 0: none.")
    ] = 0,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas, with ray.")] = 1,
    max_replicas: Annotated[
        int, typer.Option(min=0, help="With ray: scale up to so many by load; 0: do not.")
    ] = 0,
    delay_ms: Annotated[
        float, typer.Option(min=0, help="How long a request waits for others.")
    ] = 2.0,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests of a batch.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Most waiting requests; more get 503.")] = 256,
    queue_mb: Annotated[int, typer.Option(min=1, help="Most MiB of waiting requests.")] = 256,
    timeout_s: Annotated[
        float, typer.Option(min=0, help="Requests that waited longer get 504.")
    ] = 10.0,
    cache_mb: Annotated[
        int,
        typer.Option(min=0, help="MiB of kept results for each coarse part of the model."),
    ] = 0,
    tracing: Annotated[
        str | None,
        typer.Option(help="module:function that sets up OpenTelemetry in a process that serves."),
    ] = None,
    triton_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Serve nothing: write this model directory for Triton Inference Server.",
        ),
    ] = None,
    triton_keys: Annotated[
        str, typer.Option(help=f"Type of keys with Triton, one of {', '.join(KEYS)}.")
    ] = "int64",
    device: Device = "cpu",
    impl: Impl = "auto",
    threads: Threads = 1,
) -> None:
    """Serves a model: POST /score, GET /healthz, /metrics and /model.

    Requests that arrive together are merged into one tree. SIGINT stops the server when what it
    has accepted is answered.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"must be one of {', '.join(ENGINES)}", param_hint="--engine")
    if triton_keys not in KEYS:
        raise typer.BadParameter(f"must be one of {', '.join(KEYS)}", param_hint="--triton-keys")
    if grpc_port and engine != "ray":
        raise typer.BadParameter("needs --engine ray", param_hint="--grpc-port")
    if triton_dir is None:
        require("ray.serve" if engine == "ray" else "uvicorn", "serve")
        require("prometheus_client", "serve")
    if tracing is not None:
        require("opentelemetry.trace", "tracing")
        try:
            hook(tracing)
        except (ImportError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--tracing") from None
    capacities = tuple(_capacity(text) for text in capacity)
    try:
        _, signature = load(model)
        for given in capacities:
            whole_capacity(signature, given)
        if cache_mb and not signature.coarse:
            raise TreeError("cache_mb", "must be 0: the model has no coarse parts", str(cache_mb))
    except TreeError as error:
        raise typer.BadParameter(str(error)) from None
    options = Options(
        model=model.resolve(),
        capacities=capacities,
        device=device,
        impl=impl,
        threads=threads,
        max_delay_s=delay_ms / 1e3,
        max_requests=max_requests,
        max_queued_requests=queue,
        max_queued_bytes=queue_mb << 20,
        timeout_s=timeout_s,
        cache_bytes=cache_mb << 20,
        tracing=tracing,
    )
    if triton_dir is not None:
        triton_server.write(triton_dir.resolve(), options, keys=triton_keys)
        return
    if engine == "uvicorn":
        from ikbo_tree.serving import http_app

        http_app.run(options, host=host, port=port)
        return
    from ikbo_tree.serving import ray_app

    scale = {
        "min_replicas": replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": max_requests,
    }
    if max_replicas and max_replicas < replicas:
        raise typer.BadParameter("must be at least --replicas", param_hint="--max-replicas")
    ray_app.run(
        options,
        host=host,
        port=port,
        grpc_port=grpc_port or None,
        replicas=scale if max_replicas else replicas,
    )


def _capacity(text: str) -> dict[str, int]:
    try:
        pairs = dict(part.split("=") for part in text.split(","))
        return {level: int(rows) for level, rows in pairs.items()}
    except ValueError:
        raise typer.BadParameter(
            f"must be level=rows, with commas between; got {text!r}", param_hint="--capacity"
        ) from None
