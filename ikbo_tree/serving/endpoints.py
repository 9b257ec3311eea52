"""What the server does for each path; Ray Serve and uvicorn call the same function.

POST /score    scores of a request (see `codec`)
GET /healthz   200 while requests are taken, else 503
GET /metrics   for Prometheus
GET /model     the signature, as JSON
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

from ikbo_tree.extras import require
from ikbo_tree.serving import codec
from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.errors import BadRequestError, ServingError, TooLargeError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY = 64 << 20
INLINE = 32 << 10
"""Bodies up to so many bytes are decoded at once: handing them to a thread takes longer."""


class Endpoints:
    """Answers HTTP requests by a batcher.

    Args:
        batcher: scores them.
        max_body: most bytes of a body.
    """

    def __init__(self, batcher: TreeBatcher, *, max_body: int = MAX_BODY) -> None:
        self.batcher, self.max_body = batcher, max_body
        self._responses = require("starlette.responses", "serve")

    async def handle(self, request: Request) -> Response:
        """Answers one request, whatever it is."""
        wanted = (request.method, request.url.path.rstrip("/").rpartition("/")[2])
        try:
            if wanted == ("POST", "score"):
                return await self._score(request)
            if wanted == ("GET", "healthz"):
                healthy = self.batcher.healthy
                return self._json({"healthy": healthy}, 200 if healthy else 503)
            if wanted == ("GET", "metrics"):
                text, kind = self.batcher.metrics.text()
                response: Response = self._responses.Response(text, media_type=kind)
                return response
            if wanted == ("GET", "model"):
                return self._json(self.batcher.signature.to_json(), 200)
        except ServingError as error:
            return self._error(error)
        return self._json({"error": "no such path; there is POST /score"}, 404)

    async def _score(self, request: Request) -> Response:
        body = await self._body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        signature = self.batcher.signature

        def submit() -> object:
            asked = codec.decode(body, kind, signature, max_bytes=self.max_body)
            return self.batcher.submit(asked)

        future = submit() if len(body) <= INLINE else await asyncio.to_thread(submit)
        scores = await asyncio.wrap_future(future)  # type: ignore[arg-type,var-annotated]
        if codec.NPY in request.headers.get("accept", ""):
            answer, kind = codec.encode_npy(scores), codec.NPY
        else:
            answer, kind = codec.encode_json(scores), codec.JSON
        response: Response = self._responses.Response(answer, media_type=kind)
        return response

    async def _body(self, request: Request) -> bytes:
        """The body, of which never more than `max_body` bytes are kept."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body:
                rule = f"must have at most {self.max_body} bytes"
                raise TooLargeError("body", rule, "more")
        return bytes(body)

    def _json(self, content: object, status: int) -> Response:
        text = json.dumps(content)
        response: Response = self._responses.Response(text, status, media_type=codec.JSON)
        return response

    def _error(self, error: ServingError) -> Response:
        content = {"error": str(error), "type": type(error).__name__}
        if isinstance(error, BadRequestError):
            content["argument"] = error.argument
        response = self._json(content, error.status)
        if error.status == 503:
            seconds = 1.0 if error.retry_after_s is None else error.retry_after_s
            response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
        return response
