"""A model directory for Triton Inference Server, of its Python backend.

    repository/ranker/config.pbtxt
    repository/ranker/1/model.pt2     the file that `save` wrote
    repository/ranker/1/model.py      imports `triton_backend`: ikbo_tree must be installed there

Triton collects requests its own way: up to `max_batch_size` of them, waiting `max_delay_s`. Each
is one request of ours, with a first dimension of 1; tensors are named as in an `.npz` body. All are
ragged, so Triton hands them over side by side, and `TreeBatcher` merges them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ikbo_tree.serving.export import load
from ikbo_tree.serving.options import Options
from ikbo_tree.serving.runner import GraphRunner
from ikbo_tree.serving.signature import Signature

OPTIONS = "ikbo_tree_options"
"""The parameter of the configuration that has `Options` as JSON."""
OUTPUT = "scores"
TYPES = {
    torch.float64: "TYPE_FP64",
    torch.float32: "TYPE_FP32",
    torch.float16: "TYPE_FP16",
    torch.bfloat16: "TYPE_BF16",
    torch.int64: "TYPE_INT64",
    torch.int32: "TYPE_INT32",
    torch.bool: "TYPE_BOOL",
}
KEYS = {"int64": "TYPE_INT64", "string": "TYPE_STRING"}
"""Types of keys and versions, which one model has alike for all requests."""
MODEL = '''"""The entry point that Triton's Python backend looks for."""

from ikbo_tree.serving.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write(directory: Path, options: Options, *, keys: str = "int64") -> None:
    """Writes a model directory, over one that is there.

    Args:
        directory: in the model repository; its name is the model's.
        options: as for other servers; the model's file is copied.
        keys: type of keys and versions, "int64" or "string".

    Raises:
        ValueError: another type of keys.
        TreeError: the file has no signature, or capacities do not fit it.
    """
    if keys not in KEYS:
        raise ValueError(f"keys must be one of {', '.join(KEYS)}; got {keys!r}")
    model, signature = load(options.model, device=options.device)
    runner = GraphRunner(
        model, signature, options.capacities[:1], device=options.device, impl=options.impl
    )
    version = directory / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.model, version / "model.pt2")
    (version / "model.py").write_text(MODEL)
    text = config(directory.name, options, signature, runner.scores, KEYS[keys])
    (directory / "config.pbtxt").write_text(text)


def config(
    name: str,
    options: Options,
    signature: Signature,
    scores: tuple[torch.dtype, tuple[int, ...]],
    key_type: str,
) -> str:
    """The text of `config.pbtxt`.

    Args:
        name: of the model.
        options: of the server.
        signature: of the model.
        scores: dtype and shape of one row of its scores.
        key_type: Triton's type of keys and versions.
    """
    inputs = [_input(f"counts/{level}", "TYPE_INT64", ()) for level in signature.parents]
    for argument, given in signature.inputs.items():
        inputs.append(_input(f"inputs/{argument}", TYPES[given.dtype], given.shape))
    if signature.root not in signature.parents.values():
        inputs.append(_input("root_rows", "TYPE_INT64", ()))
    for level in dict.fromkeys(signature.tables.values()):
        inputs.append(_input(f"keys/{level}", key_type, (), optional=True))
        if signature.coarse:
            inputs.append(_input(f"versions/{level}", key_type, (), optional=True))
    dtype, shape = scores
    output = f"{{ name: {_quoted(OUTPUT)} data_type: {TYPES[dtype]} dims: {_dims(shape)} }}"
    kind = "KIND_GPU" if options.device.startswith("cuda") else "KIND_CPU"
    delay, plain = round(options.max_delay_s * 1e6), _quoted(_plain(options))
    lines = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {options.max_requests}",
        "input [",
        ",\n".join(inputs),
        "]",
        f"output [ {output} ]",
        f"instance_group [ {{ kind: {kind} count: 1 }} ]",
        "dynamic_batching {",
        f"  max_queue_delay_microseconds: {delay}",
        "  default_queue_policy {",
        f"    max_queue_size: {options.max_queued_requests}",
        *(
            []
            if options.timeout_s is None
            else [f"    default_timeout_microseconds: {round(options.timeout_s * 1e6)}"]
        ),
        "  }",
        "}",
        f"parameters {{ key: {_quoted(OPTIONS)} value {{ string_value: {plain} }} }}",
        "",
    ]
    return "\n".join(lines)


def options_of(parameters: Mapping[str, Mapping[str, str]], model: Path, device: str) -> Options:
    """The options that `config` wrote, for a model's file and device.

    Args:
        parameters: of the configuration, as Triton gives it to a model.
        model: the file.
        device: cpu, cuda:0, ...
    """
    plain = json.loads(parameters[OPTIONS]["string_value"])
    plain["capacities"] = tuple(plain["capacities"])
    return Options(model=model, device=device, **plain)


def _plain(options: Options) -> str:
    """Everything but what is known in place."""
    plain = dataclasses.asdict(options)
    del plain["model"], plain["device"]
    return json.dumps(plain)


def _input(name: str, kind: str, shape: Sequence[int], *, optional: bool = False) -> str:
    more = " optional: true" if optional else ""
    what = f"name: {_quoted(name)} data_type: {kind} dims: {_dims(shape)}"
    return f"  {{ {what} allow_ragged_batch: true{more} }}"


def _dims(shape: Sequence[int]) -> str:
    return str([-1, *shape])


def _quoted(text: str) -> str:
    """A string of Protobuf's text format, which knows JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)
