"""Requests and scores as HTTP bodies: JSON, or NumPy's `.npz` and `.npy` for large ones.

JSON:   {"counts": {"vendor": [2], "item": [3, 1]}, "inputs": {"user_features": [[...]], ...},
         "keys": {"user": [17]}, "versions": {"user": [3]}, "root_rows": 1}
a log:  {"log": {"user": [17, 17], "vendor": [4, 2], "item": [8, 9]},
         "rows": {"user": [17], "vendor": [2, 4]}, "versions": {"user": [3]}, "inputs": {...}}
npz:    the same as arrays named "counts/vendor", "inputs/user_features", "keys/user", ...
answer: {"scores": [...], "level": "item"}, or the scores alone as `.npy`
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.serving.errors import BadRequestError, ScoringError, TooLargeError
from ikbo_tree.serving.logs import from_log
from ikbo_tree.serving.request import Request, Scores
from ikbo_tree.serving.signature import Input, Signature

JSON, NPZ, NPY = "application/json", "application/x-npz", "application/x-npy"
MAPPINGS = ("counts", "inputs", "keys", "versions")
FIELDS = (*MAPPINGS, "root_rows", "log", "rows")


def decode(body: bytes, kind: str, signature: Signature, *, max_bytes: int) -> Request:
    """The request in a body.

    Args:
        body: the bytes.
        kind: their content type, without parameters.
        signature: of the model.
        max_bytes: most bytes of the arrays of an `.npz`, unpacked.

    Raises:
        BadRequestError: anything else than such a body.
        TooLargeError: an archive that unpacks to more than `max_bytes`.
    """
    if kind in (NPZ, "application/octet-stream"):
        content = _from_npz(body, max_bytes)
    elif kind in (JSON, ""):
        content = _from_json(body, signature)
    else:
        raise BadRequestError("content-type", f"must be {JSON} or {NPZ}", kind)
    for name in content:
        if name not in FIELDS:
            raise BadRequestError("body", f"must have the fields {list(FIELDS)}", repr(name))
    given = {name: _mapping(content, name) for name in MAPPINGS}
    if "log" in content:
        log, rows = _mapping(content, "log"), _mapping(content, "rows")
        return from_log(signature, log, given["inputs"], rows, given["versions"])
    counts, keys, versions = given["counts"], given["keys"], given["versions"]
    return Request(counts, given["inputs"], content.get("root_rows"), keys, versions=versions)


def encode_json(scores: Scores) -> bytes:
    """Scores as JSON.

    Raises:
        ScoringError: JSON has no number for one of them.
    """
    values = scores.values.double() if scores.values.is_floating_point() else scores.values
    try:
        content = {"scores": values.tolist(), "level": scores.level}
        return json.dumps(content, allow_nan=False).encode()
    except ValueError:
        raise ScoringError("the model's scores are not finite") from None


def encode_npy(scores: Scores) -> bytes:
    """Scores as `.npy`; bfloat16, which NumPy lacks, as float32."""
    values = scores.values
    buffer = io.BytesIO()
    np.save(buffer, (values.float() if values.dtype == torch.bfloat16 else values).numpy())
    return buffer.getvalue()


def to_json(request: Request) -> bytes:
    """The body that a client sends for a request."""

    def listed(values: Any) -> Any:
        return values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values

    content: dict[str, Any] = {
        name: {key: listed(x) for key, x in getattr(request, name).items()} for name in MAPPINGS
    }
    if request.root_rows is not None:
        content["root_rows"] = request.root_rows
    return json.dumps(content).encode()


def to_npz(request: Request) -> bytes:
    """The `.npz` body that a client sends for a request."""
    arrays = {
        f"{name}/{key}": np.asarray(x)
        for name in MAPPINGS
        for key, x in getattr(request, name).items()
    }
    if request.root_rows is not None:
        arrays["root_rows"] = np.array(request.root_rows)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise BadRequestError(name, "must be an object with an entry a name", type(value).__name__)
    return value


def _from_json(body: bytes, signature: Signature) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError("body", "must be JSON", str(error)[:200]) from None
    if not isinstance(content, dict):
        raise BadRequestError("body", "must be an object", type(content).__name__)
    inputs = _mapping(content, "inputs")
    content["inputs"] = {
        name: _tensor(f'inputs["{name}"]', value, signature.inputs[name])
        if name in signature.inputs
        else value
        for name, value in inputs.items()
    }
    return content


def _tensor(argument: str, value: Any, given: Input) -> Tensor:
    """Nested lists as the input's dtype; integers may stand for floats, nothing else."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BadRequestError(argument, "must be a full array", str(error)[:200]) from None
    if not array.size:  # an empty list has no dtype, and no width below no rows
        empty = array.shape[0] == 0 if array.ndim else False
        shape = (0, *given.shape) if empty else array.shape
        return torch.empty(shape, dtype=given.dtype)
    kinds = "iuf" if given.dtype.is_floating_point else "iu" if given.integral else "b"
    if array.dtype.kind not in kinds:
        raise BadRequestError(argument, f"must hold {given.dtype}", f"{array.dtype} values")
    if given.bounds is not None:
        # Before the conversion, which would wrap around.
        for found in (array.min(), array.max()):
            if not given.bounds[0] <= found <= given.bounds[1]:
                rule = f"must be from {given.bounds[0]} to {given.bounds[1]}"
                raise BadRequestError(argument, rule, str(found))
    if array.dtype.kind == "u":
        array = array.astype(np.float64 if given.dtype.is_floating_point else np.int64)
    return torch.from_numpy(array).to(given.dtype)


def _from_npz(body: bytes, max_bytes: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
            if total > max_bytes:
                raise TooLargeError("body", f"must unpack to at most {max_bytes} bytes", str(total))
            for path in archive.namelist():
                array = _array(archive.read(path))
                field, _, name = path.removesuffix(".npy").partition("/")
                if name:
                    content.setdefault(field, {})[name] = array
                else:
                    content[field] = array.item()
    except TooLargeError:
        raise
    except Exception as error:  # a broken archive may raise almost anything
        raise BadRequestError("body", "must be an .npz archive", str(error)[:200]) from None
    return content


def _array(data: bytes) -> np.ndarray:
    """The array of an `.npy` file, a view; a header that promises more than there is fails."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, fortran, dtype = read(file)  # type: ignore[no-untyped-call]
    count, start = math.prod(shape), file.tell()
    if dtype.hasobject or count * dtype.itemsize != len(data) - start:
        raise ValueError(f"an array of {dtype}, shape {shape}, in {len(data) - start} bytes")
    array = np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype)
    return array.reshape(shape, order="F" if fortran else "C")
