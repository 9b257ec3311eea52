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
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ikbo_tree.extras import require
from ikbo_tree.serving import codec
from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.errors import BadRequestError, ServingError, TooLargeError
from ikbo_tree.serving.request import Scores

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

    async def score(
        self, body: bytes, kind: str, answer_kind: str, headers: Mapping[str, str]
    ) -> bytes:
        """The scores of the request in a body.

        Args:
            body: a request, as `codec` has it.
            kind: its content type.
            answer_kind: `codec.NPY`, or anything else for JSON.
            headers: of the request, in lower case.

        Raises:
            ServingError: it gets none.
        """
        if len(body) > self.max_body:
            raise _too_long(self.max_body)
        batcher = self.batcher

        def submit() -> Future[Scores]:
            asked = codec.decode(body, kind, batcher.signature, max_bytes=self.max_body)
            return batcher.submit(asked)

        with batcher.spans.within(headers):
            future = submit() if len(body) <= INLINE else await asyncio.to_thread(submit)
        scores = await asyncio.wrap_future(future)
        if answer_kind == codec.NPY:
            return codec.encode_npy(scores)
        return codec.encode_json(scores)

    async def _score(self, request: Request) -> Response:
        body = await self._body(request)
        headers = request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        answer_kind = codec.NPY if codec.NPY in headers.get("accept", "") else codec.JSON
        answer = await self.score(body, kind, answer_kind, headers)
        response: Response = self._responses.Response(answer, media_type=answer_kind)
        return response

    async def _body(self, request: Request) -> bytes:
        """The body, of which never more than `max_body` bytes are kept."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body:
                raise _too_long(self.max_body)
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
            response.headers["Retry-After"] = retry_after(error)
        return response


def retry_after(error: ServingError) -> str:
    """Whole seconds after which to try again."""
    seconds = 1.0 if error.retry_after_s is None else error.retry_after_s
    return str(max(1, math.ceil(seconds)))


def _too_long(max_body: int) -> TooLargeError:
    return TooLargeError("body", f"must have at most {max_body} bytes", "more")
