"""One gRPC method whose bytes are the bodies of HTTP: a request's `.npz` or JSON, scores likewise.

In the words of a `.proto` file, for clients in any language:

    syntax = "proto3";
    package ikbo_tree;
    import "google/protobuf/wrappers.proto";
    service Scorer {
      rpc Score(google.protobuf.BytesValue) returns (google.protobuf.BytesValue);
    }

The messages are Protobuf's own, so nothing is generated. A body that begins with `{` is JSON and is
answered by JSON, any other is an `.npz` archive and answered by `.npy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ikbo_tree.extras import require
from ikbo_tree.serving import codec
from ikbo_tree.serving.endpoints import Endpoints, retry_after
from ikbo_tree.serving.errors import ServingError

SERVICE, METHOD = "ikbo_tree.Scorer", "Score"
CODES = {
    400: "INVALID_ARGUMENT",
    413: "INVALID_ARGUMENT",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Names of gRPC's status codes by HTTP status; INTERNAL for all others."""


def add_to_server(servicer: Any, server: Any) -> None:
    """Registers the method, as functions do that are generated from a `.proto` file.

    Args:
        servicer: has a method `Score`.
        server: a `grpc.Server`.
    """
    grpc, message = _grpc(), _message()
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.Score,
        request_deserializer=message.FromString,
        response_serializer=message.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((handlers,))


def client(channel: Any) -> Callable[..., bytes]:
    """`call(body, timeout=..., metadata=...)` gives the answer's body.

    Args:
        channel: a `grpc.Channel`.
    """
    message = _message()
    call = channel.unary_unary(
        f"/{SERVICE}/{METHOD}",
        request_serializer=message.SerializeToString,
        response_deserializer=message.FromString,
    )

    def score(body: bytes, **options: Any) -> bytes:
        answer: bytes = call(message(value=body), **options).value
        return answer

    return score


async def answer(endpoints: Endpoints, request: Any, context: Any) -> Any:
    """Answers one call.

    Args:
        endpoints: score it.
        request: the message.
        context: of the call: takes code, details and trailing metadata.

    Returns:
        The message; an empty one with an error's code.
    """
    body: bytes = request.value
    kinds = (codec.JSON, codec.JSON) if body[:1] == b"{" else (codec.NPZ, codec.NPY)
    headers = {name: value for name, value in context.invocation_metadata() if name[-4:] != "-bin"}
    message = _message()
    try:
        return message(value=await endpoints.score(body, *kinds, headers))
    except ServingError as error:
        context.set_code(getattr(_grpc().StatusCode, CODES.get(error.status, "INTERNAL")))
        context.set_details(str(error))
        if error.status == 503:
            context.set_trailing_metadata([("retry-after", retry_after(error))])
        return message()


def _grpc() -> Any:
    return require("grpc", "serve")


def _message() -> Any:
    return require("google.protobuf.wrappers_pb2", "serve").BytesValue
