"""Coarse parts as signatures declare them, in files and in requests."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import (
    CAPACITY,
    SIGNATURE,
    STAGED,
    Rest,
    Toy,
    Weighed,
    known,
    oracle,
    request,
    runner,
    staged,
)

from ikbo_tree import TreeError
from ikbo_tree.serving import (
    BadRequestError,
    Coarse,
    GraphRunner,
    Input,
    Signature,
    Staged,
    TreeBatcher,
    check,
    load,
    save,
)

WIDE = {"user": 64, "vendor": 256, "item": 1024}
ROW = 3 * 4
"""Bytes of a kept row of the toy."""


def test_a_file_with_parts(tmp_path):
    save(staged(), STAGED, request(3, users=3), tmp_path / "toy.pt2")
    model, signature = load(tmp_path / "toy.pt2")
    assert signature == STAGED
    made = GraphRunner(model, signature, [CAPACITY, WIDE], cache_bytes=8 * ROW, chunk_rows=5)
    with TreeBatcher(made) as batcher:
        for number in range(30):
            asked = known(number, number % 5, number // 10)
            np.testing.assert_array_equal(batcher.score(asked, 10).values.numpy(), oracle(asked))
        asked = request(3, users=40)
        np.testing.assert_array_equal(batcher.score(asked, 10).values.numpy(), oracle(asked))


def test_a_part_for_the_rows_of_the_example_alone_is_refused(tmp_path):
    class Counting(Weighed):
        def forward(self, user_x):
            found = super().forward(user_x)
            return dict(found) if len(user_x) == 3 else found

    model = Staged(Rest(), {"person": Counting()}, STAGED).eval()
    with pytest.raises(Exception, match="specialized"):
        save(model, STAGED, request(3, users=3), tmp_path / "x.pt2")


def test_rows_of_a_part_must_not_see_each_other(tmp_path):
    class Mixing(Weighed):
        def forward(self, user_x):
            return {"user_y": user_x - user_x.mean(0)}

    model = Staged(Rest(), {"person": Mixing()}, STAGED).eval()
    signature = replace(STAGED, independent=False)
    model.signature = signature
    with pytest.raises(TreeError, match="from its own inputs"):
        save(model, signature, request(3, users=3), tmp_path / "x.pt2")


def test_models_must_have_the_parts_that_signatures_name(tmp_path):
    example_request = request(3, users=3)
    with pytest.raises(TreeError, match="Staged"):
        save(Toy().eval(), STAGED, example_request, tmp_path / "x.pt2")
    with pytest.raises(TreeError, match="Staged"):
        save(staged(), SIGNATURE, example_request, tmp_path / "x.pt2")
    with pytest.raises(TreeError, match="Staged"):
        runner(Toy().eval(), STAGED)
    with pytest.raises(TreeError, match="coarse"):
        Staged(Rest(), {}, STAGED)
    with pytest.raises(TreeError, match="cache_bytes"):
        runner(cache_bytes=100)
    with pytest.raises(TreeError, match="chunk_rows"):
        runner(staged(), STAGED, chunk_rows=1)


PART = STAGED.coarse["person"]


@pytest.mark.parametrize(
    "coarse",
    [
        {"vendor": PART},
        {"person": replace(PART, takes=("vendor_x",))},
        {"person": replace(PART, takes=("nothing",))},
        {"person": replace(PART, takes=())},
        {"person": replace(PART, gives={})},
        {"person": replace(PART, gives={"word": Input("person")})},
        {"person": replace(PART, gives={"tree": Input("person")})},
        {"person": replace(PART, gives={"y": Input("item")})},
        {"person": replace(PART, gives={"y": Input("person", torch.int64)})},
    ],
    ids=str,
)
def test_coarse_parts_are_checked(coarse):
    with pytest.raises(TreeError, match="coarse"):
        replace(SIGNATURE, coarse=coarse)


def test_two_tables_may_not_give_the_same():
    tables = {"person": "user", "shop": "vendor"}
    inputs = {"x": Input("person"), "y": Input("shop")}
    coarse = {
        "person": Coarse(("x",), {"z": Input("person")}),
        "shop": Coarse(("y",), {"z": Input("shop")}),
    }
    with pytest.raises(TreeError, match="new arguments"):
        Signature("user", SIGNATURE.parents, inputs, "item", tables, coarse=coarse)


def test_a_signature_with_parts_survives_json():
    assert Signature.from_json(STAGED.to_json()) == STAGED
    old = SIGNATURE.to_json()
    del old["coarse"]
    assert Signature.from_json(old) == SIGNATURE


@pytest.mark.parametrize(
    ("versions", "keys"),
    [
        ({"user": [1.5]}, {"user": [1]}),
        ({"user": [1, 2]}, {"user": [1]}),
        ({"user": "a"}, {"user": [1]}),
        ({"user": [1]}, {}),
    ],
)
def test_versions_are_checked(versions, keys):
    with pytest.raises(BadRequestError) as error:
        check(replace(request(1), versions=versions, keys=keys), STAGED)
    assert error.value.argument == 'versions["user"]'
