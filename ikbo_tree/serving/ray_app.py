"""A Ray Serve deployment, over HTTP and gRPC: replicas that merge their own requests, one a GPU.

Ray's proxy spreads requests over replicas, restarts those that die or whose health check fails,
and lets those it stops drain. A request whose replica dies gets an error from the proxy, not
silence.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ikbo_tree.extras import require
from ikbo_tree.serving import grpc_service
from ikbo_tree.serving.endpoints import Endpoints
from ikbo_tree.serving.metrics import PrometheusMetrics
from ikbo_tree.serving.options import Options

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

NAME = "ikbo_tree"
"""Of the application, as `serve.delete` takes it."""


class Scorer:
    """One replica.

    Args:
        options: of the server.
    """

    def __init__(self, options: Options) -> None:
        serve: Any = require("ray.serve", "serve")
        replica = serve.get_replica_context().replica_id.unique_id
        self._batcher = options.batcher(PrometheusMetrics({"replica": replica}))
        self._endpoints = Endpoints(self._batcher, max_body=options.max_body)

    async def __call__(self, request: Request) -> Response:
        """Answers one HTTP request."""
        return await self._endpoints.handle(request)

    async def Score(self, request: Any, grpc_context: Any) -> Any:  # noqa: N802
        """Answers one gRPC call; Ray finds it by the method's name."""
        return await grpc_service.answer(self._endpoints, request, grpc_context)

    def check_health(self) -> None:
        """Ray calls this; raises where the replica must be replaced."""
        if not self._batcher.healthy:
            raise RuntimeError("the batcher's worker has ended")
        self._batcher.runner.check()

    def __del__(self) -> None:
        """Ray calls this after the last request of a replica that it stops."""
        batcher = getattr(self, "_batcher", None)
        if batcher is not None:
            batcher.close()


def build_app(
    options: Options,
    *,
    replicas: int | Mapping[str, Any] = 1,
    gpus: float | None = None,
    cpus: float = 1,
) -> Any:
    """The application that `ray.serve.run` takes.

    Args:
        options: of every replica.
        replicas: how many, or Ray's autoscaling configuration, e.g. `{"min_replicas": 1,
            "max_replicas": 4, "target_ongoing_requests": 32}`.
        gpus: of a replica; default 1 where the device is a GPU.
        cpus: of a replica.
    """
    serve: Any = require("ray.serve", "serve")
    gpus = gpus if gpus is not None else float(options.device.startswith("cuda"))
    scale = (
        {"num_replicas": replicas}
        if isinstance(replicas, int)
        else {"autoscaling_config": dict(replicas)}
    )
    deployment = serve.deployment(
        Scorer,
        name="ikbo_tree_scorer",
        # A replica must see more requests than a batch has, or there is nothing to merge.
        max_ongoing_requests=options.max_queued_requests + options.max_requests,
        max_queued_requests=options.max_queued_requests,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=30,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **scale,
    )
    return deployment.bind(options)


def run(
    options: Options,
    *,
    host: str,
    port: int,
    grpc_port: int | None = None,
    replicas: int | Mapping[str, Any] = 1,
    blocking: bool = True,
) -> None:
    """Serves on this machine's Ray, or on the cluster that RAY_ADDRESS names.

    Args:
        options: of every replica.
        host: address to listen at.
        port: port to listen at.
        grpc_port: port to listen at for gRPC, on all addresses; None: no gRPC.
        replicas: as in `build_app`.
        blocking: until SIGINT or SIGTERM, and then until what was accepted is answered; else
            returns once replicas are ready.
    """
    serve: Any = require("ray.serve", "serve")
    grpc_options = None
    if grpc_port is not None:
        grpc_options = {
            "port": grpc_port,
            "grpc_servicer_functions": ["ikbo_tree.serving.grpc_service.add_to_server"],
        }
    serve.start(http_options={"host": host, "port": port}, grpc_options=grpc_options)
    stop = threading.Event()
    if blocking:  # from here on, since Ray has set handlers of its own by now
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    serve.run(build_app(options, replicas=replicas), name=NAME, blocking=False)
    if not blocking:
        return
    while not stop.wait(1.0):
        pass
    # Replicas end when they have answered; `serve.shutdown` would end the proxies before that, and
    # other applications of a cluster too.
    serve.delete(NAME)
