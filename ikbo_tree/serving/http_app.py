"""One process behind uvicorn: the smallest server, and the one that tests start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ikbo_tree.extras import require
from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.endpoints import MAX_BODY, Endpoints
from ikbo_tree.serving.options import Options

if TYPE_CHECKING:
    from starlette.applications import Starlette


def build_app(batcher: TreeBatcher, *, max_body: int = MAX_BODY) -> Starlette:
    """An ASGI application; when it shuts down, it drains the batcher.

    Args:
        batcher: scores requests.
        max_body: most bytes of a body.
    """
    applications: Any = require("starlette.applications", "serve")
    routing: Any = require("starlette.routing", "serve")
    endpoints = Endpoints(batcher, max_body=max_body)

    @asynccontextmanager
    async def drained(_: object) -> AsyncIterator[None]:
        yield
        batcher.close()

    route = routing.Route("/{path:path}", endpoints.handle, methods=["GET", "POST"])
    app: Starlette = applications.Starlette(routes=[route], lifespan=drained)
    return app


def run(options: Options, *, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT; then answers what it has accepted, and ends.

    Args:
        options: of the server.
        host: address to listen at.
        port: port to listen at; 0 for any free one, which uvicorn prints.
    """
    uvicorn: Any = require("uvicorn", "serve")
    app = build_app(options.batcher(), max_body=options.max_body)
    uvicorn.run(app, host=host, port=port, access_log=False)
