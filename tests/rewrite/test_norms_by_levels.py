"""Normalisation by levels errs no more than in one piece, even where means are large."""

import pytest
import torch
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree.testing.budget import assert_within_budget

MAP = torch.tensor([0, 0, 1, 2, 2, 2, 2, 1])
NORMS = {
    "layer_norm": lambda: nn.LayerNorm(40),
    "layer_norm_plain": lambda: nn.LayerNorm(40, elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(40),
    "rms_norm_eps": lambda: nn.RMSNorm(40, eps=1e-3),
}


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.top = norm(), nn.Linear(40, 7)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, user_x, item_x, item_to_user):
        # The user's features on both sides of the item's: one group of columns apart.
        user = user_x[item_to_user]
        x = torch.cat([user[:, :14], item_x, user[:, 14:]], 1)
        return self.top(self.norm(x))


def rewritten(name, offset):
    model = Model(NORMS[name]).eval()
    generator = torch.Generator().manual_seed(1)
    given = {
        "user_x": torch.randn(3, 30, generator=generator) + offset,
        "item_x": torch.randn(8, 10, generator=generator) - offset / 2,
        "item_to_user": MAP,
    }
    fast, report = ikbo.rewrite(
        model,
        given,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        profit=False,
        check_seconds=0.2,
    )
    assert [step.action for step in report.steps if "norm" in step.op] == ["put off"]
    assert [step.action for step in report.steps if "linear" in step.op] == ["split"]
    return model, fast, given


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("name", NORMS)
def test_error_is_within_the_budget_of_the_model(name, offset):
    model, fast, given = rewritten(name, offset)
    with torch.no_grad():
        found, flat = fast(**given), model(**given)
        wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
        if name == "rms_norm":  # whose eps is that of the dtype
            model.norm.eps = torch.finfo(torch.float32).eps
        exact = model.double()(**wide)
    assert_within_budget(found, exact, flat)


def test_taken_whole_it_is_the_op_itself():
    class Whole(Model):
        def forward(self, user_x, item_x, item_to_user):
            return self.norm(torch.cat([user_x[item_to_user], item_x], 1)).sin()

    model = Whole(NORMS["layer_norm"]).eval()
    given = {"user_x": torch.randn(3, 30), "item_x": torch.randn(8, 10), "item_to_user": MAP}
    fast, _ = ikbo.rewrite(
        model,
        given,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        profit=False,
    )
    targets = [n.target for n in fast.graph.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.aten.layer_norm.default) == 1
    assert torch.equal(fast(**given), model(**given))


def test_16_bits_stay_in_one_piece():
    model = Model(NORMS["layer_norm"]).eval().bfloat16()
    given = {
        "user_x": torch.randn(3, 30).bfloat16(),
        "item_x": torch.randn(8, 10).bfloat16(),
        "item_to_user": MAP,
    }
    fast, report = ikbo.rewrite(
        model,
        given,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        profit=False,
    )
    assert report.count("put off") == 0
    assert torch.equal(fast(**given), model(**given))
