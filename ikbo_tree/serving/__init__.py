"""Serving: requests in, one merged tree, one run, scores back to their callers.

    TreeBatcher(GraphRunner(*load("model.pt2"), capacity)).score(request)

The servers, which need the extra `serve`, are in `ray_app` and `http_app`; `triton_server` writes a
model directory for Triton Inference Server.
"""

from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.buffers import TreeBuffers
from ikbo_tree.serving.cache import CoarseCache
from ikbo_tree.serving.coarse import Staged
from ikbo_tree.serving.errors import (
    BadRequestError,
    LateError,
    OverloadedError,
    ScoringError,
    ServingError,
    StoppedError,
    TooLargeError,
)
from ikbo_tree.serving.export import load, save
from ikbo_tree.serving.logs import from_log
from ikbo_tree.serving.metrics import Metrics, PrometheusMetrics
from ikbo_tree.serving.request import Request, Scores, check
from ikbo_tree.serving.runner import GraphRunner
from ikbo_tree.serving.signature import Coarse, Input, Signature
from ikbo_tree.serving.tracing import OpenTelemetrySpans, Spans

__all__ = [
    "BadRequestError",
    "Coarse",
    "CoarseCache",
    "GraphRunner",
    "Input",
    "LateError",
    "Metrics",
    "OpenTelemetrySpans",
    "OverloadedError",
    "PrometheusMetrics",
    "Request",
    "Scores",
    "ScoringError",
    "ServingError",
    "Signature",
    "Spans",
    "Staged",
    "StoppedError",
    "TooLargeError",
    "TreeBatcher",
    "TreeBuffers",
    "check",
    "from_log",
    "load",
    "save",
]
