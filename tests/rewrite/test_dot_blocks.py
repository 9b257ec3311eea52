"""Dot products of all pairs: a block for each pair of levels, however features are ordered."""

import pytest
import torch
from torch import nn

import ikbo_tree as ikbo

MAPS = {"item_to_user": ("item", "user"), "item_to_vendor": ("item", "vendor")}
LEVELS = {"user_x": "user", "vendor_x": "vendor", "item_x": "item"}


class Dots(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, user_x, vendor_x, item_x, item_to_user, item_to_vendor):
        user, vendor = user_x[item_to_user], vendor_x[item_to_vendor]
        x = torch.stack([user, item_x, user.exp(), vendor, item_x.exp(), user.sin()], 1)
        return torch.bmm(x, self.turn(x))


def blocks(turn):
    item_to_vendor = torch.tensor([0, 2, 1, 1, 4, 4, 3, 0, 0, 2, 4])
    given = {
        "user_x": torch.randn(3, 4, dtype=torch.float64),
        "vendor_x": torch.randn(5, 4, dtype=torch.float64),
        "item_x": torch.randn(11, 4, dtype=torch.float64),
        "item_to_user": torch.tensor([0, 2, 1, 1, 0, 0, 1, 0, 0, 2, 0]),
        "item_to_vendor": item_to_vendor,
    }
    model = Dots(turn).eval()
    fast, _ = ikbo.rewrite(
        model, given, levels=LEVELS, broadcasts=MAPS, profit=False, check_seconds=0.2
    )
    torch.testing.assert_close(fast(**given), model(**given), rtol=1e-12, atol=1e-12)
    calls = [n for n in fast.graph.nodes if n.target is torch.ops.aten.bmm.default]
    return sorted(tuple(n.meta["val"].shape[1:]) for n in calls)


@pytest.mark.parametrize(
    "turn", [lambda x: x.transpose(1, 2), lambda x: x.transpose(-1, -2)], ids=["front", "back"]
)
def test_transposed_blocks_are_not_computed_twice(turn):
    """Three features of the user, one of the vendor, two of the item: 6 of 9 blocks."""
    found = blocks(turn)
    assert len(found) == 6
    assert {(1, 1), (2, 2), (3, 3)} <= set(found)


def test_other_factors_have_all_blocks():
    assert len(blocks(lambda x: x.cos().transpose(1, 2))) == 9
