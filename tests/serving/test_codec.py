"""HTTP bodies: what is sent arrives, and nothing that is sent does harm."""

import contextlib
import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.cases import SIGNATURE, request

from ikbo_tree.serving import BadRequestError, Scores, ScoringError, TooLargeError, check
from ikbo_tree.serving.codec import (
    JSON,
    NPZ,
    decode,
    encode_json,
    encode_npy,
    to_json,
    to_npz,
)

LIMIT = 1 << 20


def decoded(body, kind):
    return check(decode(body, kind, SIGNATURE, max_bytes=LIMIT), SIGNATURE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "encode"), [(JSON, to_json), (NPZ, to_npz)])
def test_what_is_sent_arrives(kind, encode, seed):
    asked = request(seed, users=1 + seed, items=seed, key="ü" if seed % 2 else 2**62)
    asked = replace(asked, versions={"user": [7, "v2"][seed % 2 : seed % 2 + 1] * (1 + seed)})
    got, sent = decoded(encode(asked), kind), check(asked, SIGNATURE)
    assert got.rows == sent.rows
    for name, x in sent.inputs.items():
        assert torch.equal(got.inputs[name], x)
        assert got.inputs[name].dtype == x.dtype
    assert got.keys["user"].tolist() == sent.keys["user"].tolist()
    assert got.versions["user"].tolist() == asked.versions["user"]


def edited(**changes):
    content = json.loads(to_json(request(1)))
    for path, value in changes.items():
        field, _, name = path.partition("__")
        if name:
            content[field][name] = value
        else:
            content[field] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        edited(extra=1),
        edited(inputs=3),
        edited(counts=[1]),
        edited(keys=7),
        edited(versions=7),
        edited(root_rows="1"),
        edited(counts__vendor="abc"),
        edited(counts__vendor=None),
        edited(counts__vendor={"a": 1}),
        edited(inputs__user_x=[["a", "b", "c"]]),
        edited(inputs__user_x=[[1, 2], [3]]),
        edited(inputs__user_x=[[None, 1, 2]]),
        edited(inputs__user_x=[[float("nan"), 1, 2]]),
        edited(inputs__user_x=[[1e39, 1, 2]]),  # infinite in float32
        edited(inputs__user_x=[[10**400, 1, 2]]),
        edited(inputs__user_x=[]),
        edited(inputs__user_x=True),
        edited(inputs__word=[1.5]),
        edited(inputs__word=[2**63]),
        edited(inputs__word=[2**64]),
        edited(inputs__other=[1]),
    ],
)
def test_bad_json(body):
    with pytest.raises(BadRequestError):
        decoded(body, JSON)


def test_integers_may_stand_for_floats():
    got = decoded(edited(inputs__user_x=[[1, 2, 3]]), JSON)
    assert got.inputs["user_x"].tolist() == [[1.0, 2.0, 3.0]]


def pickled():
    buffer = io.BytesIO()
    np.savez(buffer, **{"inputs/user_x": np.array([{}], dtype=object)})
    return buffer.getvalue()


def bomb():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs/user_x.npy", bytes(4 * LIMIT))
    return buffer.getvalue()


@pytest.mark.parametrize("body", [b"", b"PK", to_npz(request(1))[:-40], pickled()])
def test_bad_archives(body):
    with pytest.raises(BadRequestError):
        decoded(body, NPZ)


def test_an_archive_is_not_unpacked_if_it_is_too_large():
    assert len(bomb()) < LIMIT / 50
    with pytest.raises(TooLargeError):
        decoded(bomb(), NPZ)


@pytest.mark.parametrize("rows", [1 << 40, 1, 0])
def test_a_header_that_promises_what_there_is_not(rows):
    """NumPy allocates what a header says before it reads."""
    buffer = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (rows, 3)}
    )
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inputs/user_x.npy", header.getvalue() + bytes(24))
    with pytest.raises(BadRequestError, match="in 24 bytes"):
        decoded(buffer.getvalue(), NPZ)


def test_another_content_type():
    with pytest.raises(BadRequestError, match="content-type"):
        decoded(b"<xml/>", "text/xml")


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANY = st.recursive(
    LEAF,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["counts", "inputs", "keys", "versions", "root_rows", "log", "rows"]),
    st.sampled_from(["", "vendor", "item", "user", "user_x", "word", "item_x"]),
    ANY,
)
def test_any_json_is_a_request_or_a_bad_one(field, name, value):
    content = json.loads(to_json(request(1)))
    if name and isinstance(content.get(field), dict):
        content[field][name] = value
    else:
        content[field] = value
    with contextlib.suppress(BadRequestError):
        decoded(json.dumps(content).encode(), JSON)


def test_scores():
    scores = Scores(torch.tensor([0.1, -2.0]), "item")
    assert json.loads(encode_json(scores)) == {
        "scores": [0.10000000149011612, -2.0],
        "level": "item",
    }
    assert np.load(io.BytesIO(encode_npy(scores))).tolist() == scores.values.tolist()
    half = Scores(torch.tensor([0.5], dtype=torch.bfloat16), "item")
    assert np.load(io.BytesIO(encode_npy(half))).tolist() == [0.5]
    with pytest.raises(ScoringError):
        encode_json(Scores(torch.tensor([float("nan")]), "item"))
