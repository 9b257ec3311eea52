"""Model directories for Triton: its text format, and its Python backend by a stub of what it gives.

The stub has what NVIDIA documents of `triton_python_backend_utils`; Triton itself is not run here.
"""

import importlib.util
import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import CAPACITY, SIGNATURE, STAGED, Toy, known, oracle, request, staged

from ikbo_tree.cli import main
from ikbo_tree.serving import Input, Signature, codec, save
from ikbo_tree.serving.options import Options
from ikbo_tree.serving.triton_server import write

protobuf = pytest.importorskip("google.protobuf")


class Tensor:
    """A tensor as requests have it; values are NumPy's, or torch's where NumPy has no dtype."""

    def __init__(self, name, values):
        self._name, self._values = name, values

    def name(self):
        return self._name

    def as_numpy(self):
        assert isinstance(self._values, np.ndarray), "NumPy has no such dtype"
        return self._values

    def __dlpack__(self, stream=None):
        return self._values.__dlpack__()

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()

    @staticmethod
    def from_dlpack(name, values):
        assert values.is_contiguous()
        return Tensor(name, values)


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE = range(3)

    def __init__(self, message, code=INTERNAL):
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.tensors, self.error = output_tensors, error


class InferenceRequest:
    def __init__(self, tensors):
        self._tensors = [Tensor(name, values) for name, values in tensors.items()]

    def inputs(self):
        return self._tensors


@pytest.fixture
def backend(monkeypatch):
    stub = types.ModuleType("triton_python_backend_utils")
    stub.Tensor, stub.TritonError, stub.InferenceResponse = Tensor, TritonError, InferenceResponse
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)


SCHEMA = {
    "ModelConfig": {
        "name": "string",
        "backend": "string",
        "max_batch_size": "int32",
        "input": ["ModelInput"],
        "output": ["ModelOutput"],
        "instance_group": ["ModelInstanceGroup"],
        "dynamic_batching": "ModelDynamicBatching",
        "parameters": ["ParametersEntry"],
    },
    "ModelInput": {
        "name": "string",
        "data_type": "DataType",
        "dims": ["int64"],
        "allow_ragged_batch": "bool",
        "optional": "bool",
    },
    "ModelOutput": {"name": "string", "data_type": "DataType", "dims": ["int64"]},
    "ModelInstanceGroup": {"kind": "Kind", "count": "int32"},
    "ModelDynamicBatching": {
        "max_queue_delay_microseconds": "uint64",
        "default_queue_policy": "ModelQueuePolicy",
    },
    "ModelQueuePolicy": {"default_timeout_microseconds": "uint64", "max_queue_size": "uint32"},
    "ParametersEntry": {"key": "string", "value": "ModelParameter"},
    "ModelParameter": {"string_value": "string"},
}
"""The part of Triton's `model_config.proto` that is used; a list is a repeated field."""
ENUMS = {
    "DataType": [
        *("TYPE_INVALID", "TYPE_BOOL", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16"),
        *("TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16"),
    ],
    "Kind": ["KIND_AUTO", "KIND_GPU", "KIND_CPU"],
}


def schema():
    """The message class of a configuration."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="config.proto", syntax="proto3", package="t")
    for name, values in ENUMS.items():
        made = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            made.value.add(name=value, number=number)
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            (base,) = kind if isinstance(kind, list) else (kind,)
            made = message.field.add(name=field, number=number)
            made.label = made.LABEL_REPEATED if isinstance(kind, list) else made.LABEL_OPTIONAL
            if base in SCHEMA or base in ENUMS:
                made.type = made.TYPE_MESSAGE if base in SCHEMA else made.TYPE_ENUM
                made.type_name = f".t.{base}"
            else:
                made.type = getattr(made, f"TYPE_{base.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.ModelConfig"))


def parsed(directory):
    """The configuration, as Protobuf reads it, in the form in which Triton gives it to models."""
    from google.protobuf import json_format, text_format

    message = text_format.Parse((directory / "config.pbtxt").read_text(), schema()())
    plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
    plain["parameters"] = {x["key"]: x["value"] for x in plain["parameters"]}
    return plain


def made(folder, *, model=None, signature=SIGNATURE, example=None, **options):
    """A model directory in a repository."""
    file = folder / "toy.pt2"
    save(model or Toy().eval(), signature, example or request(3, users=3), file)
    keys = options.pop("keys", "int64")
    directory = folder / "repository" / "ranker"
    write(directory, Options(file, (CAPACITY,), **options), keys=keys)
    return directory


def started(directory):
    """What Triton makes of the directory: an instance of the class in `model.py`."""
    spec = importlib.util.spec_from_file_location("model", directory / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    instance = module.TritonPythonModel()
    instance.initialize(
        {
            "model_config": json.dumps(parsed(directory)),
            "model_repository": str(directory),
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    return instance


def sent(asked, directory):
    """A request as a client sends it: arrays of an `.npz` body below a dimension of 1."""
    known_types = {x["name"]: x["data_type"] for x in parsed(directory)["input"]}
    arrays = {
        f"{field}/{name}": np.asarray(x)[None] if not isinstance(x, torch.Tensor) else x[None]
        for field in codec.MAPPINGS
        for name, x in getattr(asked, field).items()
    }
    for name, x in arrays.items():
        if known_types[name] == "TYPE_STRING":
            arrays[name] = np.array([[str(y).encode() for y in x[0]]], dtype=np.object_)
        elif known_types[name] != "TYPE_BF16" and isinstance(x, torch.Tensor):
            arrays[name] = x.numpy()
    return InferenceRequest(arrays)


def test_the_configuration(tmp_path):
    directory = made(tmp_path, max_requests=16, max_delay_s=0.003, timeout_s=2.0)
    found = parsed(directory)
    assert (found["name"], found["backend"], found["max_batch_size"]) == ("ranker", "python", 16)
    inputs = {x["name"]: x for x in found["input"]}
    assert list(inputs) == [
        *("counts/vendor", "counts/item"),
        *("inputs/user_x", "inputs/vendor_x", "inputs/item_x", "inputs/word"),
        "keys/user",
    ]
    assert all(x["allow_ragged_batch"] for x in inputs.values())
    assert [name for name, x in inputs.items() if x.get("optional")] == ["keys/user"]
    assert inputs["inputs/user_x"]["dims"] == ["-1", "3"]
    assert inputs["inputs/word"]["dims"] == ["-1"]
    assert inputs["inputs/word"]["data_type"] == "TYPE_INT64"
    assert found["output"] == [{"name": "scores", "data_type": "TYPE_FP32", "dims": ["-1"]}]
    assert found["instance_group"] == [{"kind": "KIND_CPU", "count": 1}]
    assert found["dynamic_batching"] == {
        "max_queue_delay_microseconds": "3000",
        "default_queue_policy": {
            "default_timeout_microseconds": "2000000",
            "max_queue_size": 256,
        },
    }
    assert (directory / "1" / "model.pt2").read_bytes() == (tmp_path / "toy.pt2").read_bytes()


@pytest.mark.usefixtures("backend")
def test_requests_of_different_sizes(tmp_path):
    directory = made(tmp_path)
    instance = started(directory)
    asked = [request(seed, users=1 + seed % 3, key=seed % 2 or None) for seed in range(9)]
    asked.append(request(3, items=0))
    for batch in (asked, asked[:1], asked[::-1]):
        responses = instance.execute([sent(x, directory) for x in batch])
        for x, response in zip(batch, responses, strict=True):
            assert response.error is None
            (tensor,) = response.tensors
            assert tensor.name() == "scores"
            np.testing.assert_array_equal(tensor.as_numpy(), oracle(x)[None])
    instance.finalize()
    assert not instance._batcher.healthy


@pytest.mark.usefixtures("backend")
def test_what_triton_hands_over_is_one_batch(tmp_path):
    directory = made(tmp_path)
    instance = started(directory)
    sizes, run = [], instance._batcher.runner.run
    instance._batcher.runner.run = lambda merged: (sizes.append(len(merged.parts)), run(merged))[1]
    asked = [request(seed, vendors=1, items=1) for seed in range(4)]
    for _ in range(5):
        instance.execute([sent(x, directory) for x in asked])
    assert sizes == [4] * 5
    instance.finalize()


@pytest.mark.usefixtures("backend")
def test_bad_requests_fail_alone(tmp_path):
    directory = made(tmp_path)
    instance = started(directory)
    good, bad = request(1), request(2)
    bad.inputs["item_x"][0] = float("nan")
    two = sent(request(3), directory)
    two.inputs()[2]._values = np.concatenate([two.inputs()[2]._values] * 2)
    missing = InferenceRequest({"counts/vendor": np.array([[1]])})
    batch = [sent(good, directory), sent(bad, directory), two, missing, sent(good, directory)]
    responses = instance.execute(batch)
    for at in (0, 4):
        np.testing.assert_array_equal(responses[at].tensors[0].as_numpy(), oracle(good)[None])
    for response, told in zip(responses[1:4], ("finite", "dimension of 1", "counts"), strict=True):
        assert response.error.code == TritonError.INVALID_ARG
        assert told in response.error.message
    instance._batcher.runner.run = None  # a fault of ours
    (response,) = instance.execute([sent(good, directory)])
    assert response.error.code == TritonError.INTERNAL
    instance.finalize()
    (response,) = instance.execute([sent(good, directory)])
    assert response.error.code == TritonError.UNAVAILABLE


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("keys", ["int64", "string"])
def test_keys_and_versions(tmp_path, keys):
    options = {"model": staged(), "signature": STAGED, "cache_bytes": 1200, "keys": keys}
    directory = made(tmp_path, **options)
    types_of = {x["name"]: x["data_type"] for x in parsed(directory)["input"]}
    expected = "TYPE_STRING" if keys == "string" else "TYPE_INT64"
    assert types_of["keys/user"] == types_of["versions/user"] == expected
    instance = started(directory)
    for number in range(12):
        asked = known(number, number % 3, number // 6)
        (response,) = instance.execute([sent(asked, directory)])
        np.testing.assert_array_equal(response.tensors[0].as_numpy(), oracle(asked)[None])
    cache = instance._batcher.runner.caches["person"]
    assert len(cache) == 3
    assert ("2" if keys == "string" else 2) in cache
    instance.finalize()


@pytest.mark.usefixtures("backend")
def test_bfloat16_and_wide_scores(tmp_path):
    class Wide(torch.nn.Module):
        def forward(self, tree, x, y):
            return torch.stack([x, x * 2], 1) + y[:1].sum() * 0

    inputs = {"x": Input("item", torch.bfloat16), "y": Input("user", shape=(2,))}
    signature = Signature("user", {"item": "user"}, inputs, "item", independent=True)

    def asked(*counts):
        x = torch.arange(float(sum(counts))).bfloat16()
        return replace(
            request(0), counts={"item": counts}, inputs={"x": x, "y": torch.ones(len(counts), 2)}
        )

    file = tmp_path / "wide.pt2"
    save(Wide().eval(), signature, asked(2, 3), file)
    write(tmp_path / "wide", Options(file, ({"user": 4, "item": 16},)))
    found = parsed(tmp_path / "wide")
    assert found["output"][0] == {"name": "scores", "data_type": "TYPE_BF16", "dims": ["-1", "2"]}
    instance = started(tmp_path / "wide")
    (response,) = instance.execute([sent(asked(3), tmp_path / "wide")])
    assert torch.from_dlpack(response.tensors[0]).tolist() == [[[0, 0], [1, 2], [2, 4]]]
    instance.finalize()


def test_a_root_without_children_needs_its_rows(tmp_path):
    class Alone(torch.nn.Module):
        def forward(self, tree, x):
            return x * 2

    signature = Signature("item", {}, {"x": Input("item")}, "item", independent=True)
    example = replace(request(0), counts={}, inputs={"x": torch.ones(3)}, root_rows=3)
    save(Alone().eval(), signature, example, tmp_path / "alone.pt2")
    write(tmp_path / "alone", Options(tmp_path / "alone.pt2", ({"item": 8},)))
    inputs = [x["name"] for x in parsed(tmp_path / "alone")["input"]]
    assert inputs == ["inputs/x", "root_rows"]


def test_names_are_quoted(tmp_path):
    file = tmp_path / "toy.pt2"
    save(Toy().eval(), SIGNATURE, request(3, users=3), file)
    directory = tmp_path / 'a "quoted" \\ näme'
    write(directory, Options(file, (CAPACITY,)))
    assert parsed(directory)["name"] == directory.name


def test_the_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "toy.pt2"
    save(Toy().eval(), SIGNATURE, request(3, users=3), file)
    base = ["ikbo-tree", "serve", "--model", str(file), "--capacity", "user=4,vendor=12,item=24"]
    arguments = ["--triton-dir", str(tmp_path / "ranker"), "--triton-keys", "string"]
    monkeypatch.setattr(sys, "argv", [*base, *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    assert {x["name"]: x for x in parsed(tmp_path / "ranker")["input"]}["keys/user"][
        "data_type"
    ] == "TYPE_STRING"
    for wrong in (["--triton-keys", "float"], ["--cache-mb", "3"]):
        monkeypatch.setattr(sys, "argv", [*base, *arguments, *wrong])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        assert "must be" in capsys.readouterr().err
    with pytest.raises(ValueError, match="int64, string"):
        write(tmp_path / "x", Options(file, (CAPACITY,)), keys="float")
