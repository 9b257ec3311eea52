"""What Triton's Python backend calls: requests from there, scores from a `TreeBatcher`.

Triton itself queues requests, and counts and traces them; here they are merged, scored and split.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ikbo_tree.serving.batcher import TreeBatcher
from ikbo_tree.serving.codec import MAPPINGS
from ikbo_tree.serving.errors import BadRequestError, ServingError
from ikbo_tree.serving.metrics import Metrics
from ikbo_tree.serving.request import Request, Scores
from ikbo_tree.serving.triton_server import OUTPUT, options_of

CODES = {400: "INVALID_ARG", 413: "INVALID_ARG", 503: "UNAVAILABLE", 504: "UNAVAILABLE"}
"""Names of Triton's error codes by HTTP status; INTERNAL for all others."""


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the model.

        Args:
            args: Triton's: the configuration as JSON, where the model lies, its device.
        """
        # The module exists only inside Triton's own process.
        self._triton: Any = importlib.import_module("triton_python_backend_utils")
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if gpu else "cpu"
        options = options_of(config["parameters"], folder / "model.pt2", device)
        # Triton has waited already, and bounds its queue.
        options = replace(options, max_delay_s=0.0, timeout_s=None)
        self._batcher: TreeBatcher = options.batcher(Metrics())
        self._types = {given["name"]: given["data_type"] for given in config["input"]}

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, scores or an error."""
        asked: list[Request | BadRequestError] = []
        for request in requests:
            try:
                asked.append(self._request(request))
            except BadRequestError as error:
                asked.append(error)
        futures = iter(self._batcher.submit_all([x for x in asked if isinstance(x, Request)]))
        return [
            self._response(next(futures)) if isinstance(x, Request) else self._error(x)
            for x in asked
        ]

    def finalize(self) -> None:
        """Answers what is left, and ends."""
        self._batcher.close()

    def _response(self, future: Future[Scores]) -> Any:
        try:
            values = future.result().values[None]
        except ServingError as error:
            return self._error(error)
        tensor = self._triton.Tensor
        # NumPy has no bfloat16.
        output = (
            tensor.from_dlpack(OUTPUT, values)
            if values.dtype == torch.bfloat16
            else tensor(OUTPUT, values.numpy())
        )
        return self._triton.InferenceResponse(output_tensors=[output])

    def _error(self, error: ServingError) -> Any:
        code = getattr(self._triton.TritonError, CODES.get(error.status, "INTERNAL"))
        told = self._triton.TritonError(str(error), code)
        return self._triton.InferenceResponse(output_tensors=[], error=told)

    def _request(self, request: Any) -> Request:
        """A request of Triton as ours.

        Raises:
            BadRequestError: not one request, by the first dimension.
        """
        content: dict[str, dict[str, Any]] = {name: {} for name in MAPPINGS}
        root_rows = None
        for tensor in request.inputs():
            path = tensor.name()
            value = _value(tensor, self._types[path])
            if len(value) != 1:
                rule = "must have a first dimension of 1: one request"
                raise BadRequestError(path, rule, str(list(value.shape)))
            field, _, name = path.partition("/")
            if name:
                content[field][name] = value[0]
            else:
                root_rows = int(value[0].item())
        counts, keys, versions = content["counts"], content["keys"], content["versions"]
        return Request(counts, content["inputs"], root_rows, keys, versions=versions)


def _value(tensor: Any, kind: str) -> np.ndarray | Tensor:
    """A tensor's values, strings as NumPy has them."""
    if kind == "TYPE_BF16":
        values: Tensor = from_dlpack(tensor)
        return values
    array: np.ndarray = tensor.as_numpy()
    if kind == "TYPE_STRING":
        texts = [x.decode() if isinstance(x, bytes) else x for x in array.ravel().tolist()]
        return np.array(texts, dtype=np.str_).reshape(array.shape)
    return array
