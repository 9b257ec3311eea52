"""What is wrong with a request is found before it meets others, and said in the caller's words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import SIGNATURE, oracle, request, runner

from ikbo_tree import TreeError
from ikbo_tree.serving import BadRequestError, Input, Request, Signature, TooLargeError, check
from ikbo_tree.serving.logs import from_log
from ikbo_tree.serving.merge import merge

GOOD = request(1, key=5)


def with_inputs(**changes):
    inputs = {**GOOD.inputs, **changes}
    return replace(GOOD, inputs={k: v for k, v in inputs.items() if v is not None})


def poisoned(name, value):
    x = GOOD.inputs[name].clone()
    x.view(-1)[-1] = value
    return with_inputs(**{name: x})


WRONG = {
    "no counts": (replace(GOOD, counts={}), "counts"),
    "counts of nothing": (replace(GOOD, counts=None), "counts"),
    "a level too many": (replace(GOOD, counts={**GOOD.counts, "shop": [1]}), "counts"),
    "float counts": (replace(GOOD, counts={"vendor": [1.0], "item": [1]}), 'counts["vendor"]'),
    "bool counts": (replace(GOOD, counts={"vendor": [True], "item": [1]}), 'counts["vendor"]'),
    "negative": (replace(GOOD, counts={"vendor": [2], "item": [-1, 2]}), 'counts["item"]'),
    "too few": (replace(GOOD, counts={"vendor": [2], "item": [1]}), 'counts["item"]'),
    "a number": (replace(GOOD, counts={"vendor": 2, "item": [1]}), 'counts["vendor"]'),
    "root rows": (replace(GOOD, root_rows=2), 'counts["vendor"]'),
    "bool root": (replace(GOOD, root_rows=True), "root_rows"),
    "negative root": (replace(GOOD, root_rows=-1), "root_rows"),
    "an input missing": (with_inputs(word=None), "inputs"),
    "an input too many": (with_inputs(extra=torch.ones(1)), "inputs"),
    "nan": (poisoned("item_x", float("nan")), 'inputs["item_x"]'),
    "inf": (poisoned("user_x", float("inf")), 'inputs["user_x"]'),
    "both infinities": (
        with_inputs(user_x=torch.tensor([[float("inf"), -float("inf"), 0.0]])),
        'inputs["user_x"]',
    ),
    "an id past the end": (poisoned("word", 10), 'inputs["word"]'),
    "a negative id": (poisoned("word", -1), 'inputs["word"]'),
    "dtype": (with_inputs(item_x=GOOD.inputs["item_x"].double()), 'inputs["item_x"]'),
    "objects": (with_inputs(item_x=np.array([None, {}])), 'inputs["item_x"]'),
    "a list": (with_inputs(item_x=[[1.0, 2.0]]), 'inputs["item_x"]'),
    "width": (with_inputs(user_x=torch.ones(1, 4)), 'inputs["user_x"]'),
    "rank": (with_inputs(user_x=torch.ones(3)), 'inputs["user_x"]'),
    "rows": (with_inputs(user_x=torch.ones(2, 3)), 'inputs["user_x"]'),
    "sparse": (with_inputs(user_x=torch.ones(1, 3).to_sparse()), 'inputs["user_x"]'),
    "float keys": (replace(GOOD, keys={"user": [1.5]}), 'keys["user"]'),
    "mixed keys": (replace(GOOD, keys={"user": [1, "a"]}), 'keys["user"]'),
    "too many keys": (replace(GOOD, keys={"user": [1, 2]}), 'keys["user"]'),
    "a text": (replace(GOOD, keys={"user": "a"}), 'keys["user"]'),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    asked, argument = WRONG[name]
    with pytest.raises(BadRequestError) as error:
        check(asked, SIGNATURE)
    assert error.value.argument == argument
    assert error.value.status == 400
    assert "got" in str(error.value)


@pytest.mark.parametrize(
    "counts",
    [
        {"vendor": [2**62, 2**62], "item": []},  # a sum in int64 would be negative
        {"vendor": [1 << 40], "item": []},
        {"vendor": [600, 600], "item": []},
    ],
    ids=str,
)
def test_absurd_counts_are_too_large_before_any_memory_is_taken(counts):
    with pytest.raises(TooLargeError) as error:
        check(replace(GOOD, counts=counts), SIGNATURE, max_rows=1000)
    assert error.value.status == 413


def test_too_many_root_rows():
    with pytest.raises(TooLargeError):
        check(replace(GOOD, root_rows=1001), SIGNATURE, max_rows=1000)


def test_a_finite_sum_that_overflows_is_no_mistake():
    big = torch.full_like(GOOD.inputs["item_x"], 3e38)
    assert check(with_inputs(item_x=big), SIGNATURE).inputs["item_x"] is not None


def test_any_strides_and_numpy_do():
    x = GOOD.inputs["item_x"]
    wide = torch.zeros(len(x), 7)
    wide[:, 2:4] = x
    backwards = np.ascontiguousarray(x.numpy()[::-1])[::-1]
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    for given in (wide[:, 2:4], backwards, frozen):
        assert torch.equal(check(with_inputs(item_x=given), SIGNATURE).inputs["item_x"], x)


@pytest.mark.parametrize("bad", ["level", "bounds", "dtype", "output", "tables", "name"])
def test_signatures_are_checked(bad):
    inputs = {"x": Input("item", shape=(2,))}
    options = {"inputs": inputs, "output": "item"}
    if bad == "level":
        inputs["y"] = Input("shop")
    elif bad == "bounds":
        inputs["y"] = Input("item", torch.int64)
    elif bad == "dtype":
        inputs["y"] = Input("item", torch.complex64)
    elif bad == "output":
        options["output"] = "shop"
    elif bad == "tables":
        options["tables"] = {"item": "user"}
    else:
        inputs["tree"] = Input("item")
    with pytest.raises(TreeError):
        Signature("user", {"item": "user"}, **options)


def test_a_signature_survives_json():
    assert Signature.from_json(SIGNATURE.to_json()) == SIGNATURE


def log(seed):
    """A request as a flat log in random order, and its scores in that order."""
    asked = request(seed, users=3)
    rng = np.random.default_rng(seed)
    vendors = np.repeat(np.arange(3), asked.counts["vendor"])
    item_vendor = np.repeat(np.arange(len(vendors)), asked.counts["item"])
    order = rng.permutation(len(item_vendor))
    keys = {
        "user": vendors[item_vendor][order] + 40,
        "vendor": np.array([f"v{v}" for v in item_vendor[order]]),
        "item": order,
    }
    shuffled = rng.permutation(len(vendors))
    inputs = {
        "user_x": asked.inputs["user_x"].flip(0),
        "vendor_x": asked.inputs["vendor_x"][shuffled],
        "item_x": asked.inputs["item_x"][order],
        "word": asked.inputs["word"].numpy()[order],
    }
    rows = {"user": [42, 41, 40], "vendor": [f"v{v}" for v in shuffled]}
    return keys, inputs, rows, oracle(asked)[order]


@pytest.mark.parametrize("seed", range(8))
def test_a_log_in_any_order(seed):
    keys, inputs, rows, expected = log(seed)
    checked = check(from_log(SIGNATURE, keys, inputs, rows), SIGNATURE)
    with_room = runner(capacity={"user": 8, "vendor": 32, "item": 64})
    scores = with_room.run(merge(SIGNATURE, [checked])).scores
    back = np.empty(len(expected))
    back[checked.order] = scores.numpy()
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("kind", [list, np.array])
def test_versions_of_a_log_follow_their_keys(kind):
    keys, inputs, rows, _ = log(0)
    asked = from_log(SIGNATURE, keys, inputs, rows, {"user": kind([2, 1, 0])})
    checked = check(asked, SIGNATURE)
    assert (checked.versions["user"] + 40).tolist() == checked.keys["user"].tolist()


@pytest.mark.parametrize(
    "versions", [{"user": [1, 2]}, {"user": 3}, {"user": "abc"}, {"shop": [1]}, {"item": [1]}]
)
def test_bad_versions_of_logs(versions):
    keys, inputs, rows, _ = log(0)
    rows["shop"] = [1]
    with pytest.raises(BadRequestError):
        check(from_log(SIGNATURE, keys, inputs, rows, versions), SIGNATURE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda keys, inputs, rows: keys.pop("vendor"),
        lambda keys, inputs, rows: keys.update(user=keys["user"][:-1]),
        lambda keys, inputs, rows: keys.update(user=keys["user"] + 0.5),
        lambda keys, inputs, rows: rows.pop("vendor"),
        lambda keys, inputs, rows: rows.update(user=[42, 41, 39]),
        lambda keys, inputs, rows: rows.update(user=[42, 41, 41]),
        lambda keys, inputs, rows: rows.update(user=[42, 41, 40, 39]),
        lambda keys, inputs, rows: rows.update(user=[[42], [41], [40]]),
        lambda keys, inputs, rows: inputs.update(item_x=inputs["item_x"][:-1]),
        lambda keys, inputs, rows: inputs.update(user_x=[1, 2, 3]),
    ],
)
def test_bad_logs(spoil):
    keys, inputs, rows, _ = log(0)
    spoil(keys, inputs, rows)
    with pytest.raises(BadRequestError):
        check(from_log(SIGNATURE, keys, inputs, rows), SIGNATURE)


def test_a_request_without_candidates():
    empty = Request({"vendor": [0], "item": []}, {})
    inputs = {
        name: torch.zeros((1 if name == "user_x" else 0, *given.shape), dtype=given.dtype)
        for name, given in SIGNATURE.inputs.items()
    }
    checked = check(replace(empty, inputs=inputs), SIGNATURE)
    assert runner().run(merge(SIGNATURE, [checked])).scores.shape == (0,)
