"""`check_model` passes a tree model that equals its flat one, and finds one that does not."""

import pytest
import torch
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.testing import BudgetError, check_model

LEVELS = {"user": "user", "vendor": "vendor", "item": "item"}
TREE = BroadcastTree.from_counts({"vendor": [2, 0, 1], "item": [3, 0, 2]}, root="user")


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6 + 4 + 5, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, user, vendor, item, temperature=None):
        hidden = self.first(torch.cat([user, vendor, item], dim=1)).relu()
        score = self.second(hidden).squeeze(1)
        return score if temperature is None else score * temperature


class Tree(Flat):
    def forward(self, tree, user, vendor, item, temperature=None):
        x = {"user": user, "vendor": vendor, "item": item}
        weight = dict(zip(x, self.first.weight.split([6, 4, 5], dim=1), strict=True))
        hidden = ikbo.linear(x, weight, tree=tree, bias=self.first.bias).relu()
        score = self.second(hidden).squeeze(1)
        return score if temperature is None else score * temperature


class Forgetful(Tree):
    """Drops the vendor's gradient."""

    def forward(self, tree, user, vendor, item):
        return super().forward(tree, user, vendor.detach(), item)


class Wrong(Tree):
    """Lets every item read the next one's features."""

    def forward(self, tree, user, vendor, item):
        return super().forward(tree, user, vendor, item.roll(1, 0))


class Coarse(nn.Module):
    """Two outputs, one of them at the users' level."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(6, 3)

    def forward(self, user, item, tree=None):
        mapped = self.map(user)
        per_item = (
            mapped if tree is None else ikbo.broadcast(mapped, tree=tree, level="user", to="item")
        )
        return mapped, per_item[:, :1] * item


def pair(kind=Tree, dtype=torch.float32):
    torch.manual_seed(0)
    flat, fast = Flat().to(dtype), kind().to(dtype)
    fast.load_state_dict(flat.state_dict())
    return flat, fast


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    sizes = {"user": (3, 6), "vendor": (3, 4), "item": (5, 5)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in sizes.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_models(dtype):
    report = check_model(*pair(dtype=dtype), TREE, inputs(dtype), levels=LEVELS)
    assert set(report.outputs) == {"0"}
    assert set(report.inputs) == set(LEVELS)
    assert set(report.parameters) == {
        "first.weight", "first.bias", "second.weight", "second.bias",
    }  # fmt: skip
    assert 0 <= report.worst <= 1


def test_models_stay_as_they_are():
    flat, fast = pair()
    before = [p.clone() for p in (*flat.parameters(), *fast.parameters())]
    check_model(flat, fast, TREE, inputs(), levels=LEVELS)
    for p, old in zip((*flat.parameters(), *fast.parameters()), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None


def test_forward_only_and_shared_inputs():
    x = inputs() | {"temperature": torch.tensor(0.5)}
    report = check_model(*pair(), TREE, x, levels=LEVELS, backward=False)
    assert not report.inputs
    report = check_model(*pair(), TREE, x, levels=LEVELS)
    assert "temperature" in report.inputs


def test_finds_wrong_outputs():
    with pytest.raises(BudgetError, match="output 0"):
        check_model(*pair(Wrong), TREE, inputs(), levels=LEVELS)


def test_finds_dropped_gradients():
    with pytest.raises(BudgetError, match="gradient of input vendor"):
        check_model(*pair(Forgetful), TREE, inputs(), levels=LEVELS)
    check_model(*pair(Forgetful), TREE, inputs(), levels=LEVELS, backward=False)


def test_finds_lost_precision():
    class Rounded(Tree):
        def forward(self, tree, user, vendor, item):
            return super().forward(tree, user.bfloat16().float(), vendor, item)

    with pytest.raises(BudgetError, match="output 0"):
        check_model(*pair(Rounded), TREE, inputs(), levels=LEVELS)


def test_outputs_at_several_levels():
    tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    torch.manual_seed(0)
    model = Coarse()
    x = {"user": torch.randn(3, 6), "item": torch.randn(5, 1)}
    levels = {"user": "user", "item": "item"}
    check_model(model, model, tree, x, levels=levels, output_levels=["user", "item"])
    with pytest.raises(ValueError, match="output_levels names 1 outputs of 2"):
        check_model(model, model, tree, x, levels=levels, output_levels=["user"])
    with pytest.raises(BudgetError, match=r"output 0 has shape \(3, 3\), should have \(5, 3\)"):
        check_model(model, model, tree, x, levels=levels)


def test_renamed_parameters():
    class Renamed(nn.Module):
        def __init__(self, flat):
            super().__init__()
            self.inner = flat

        def forward(self, tree, **x):
            return self.inner(tree, **x)

    flat, fast = pair()
    names = {f"inner.{name}": name for name, _ in flat.named_parameters()}
    check_model(flat, Renamed(fast), TREE, inputs(), levels=LEVELS, parameters=names)
    with pytest.raises(ValueError, match=r"'inner.first.weight' of the tree model has no counter"):
        check_model(flat, Renamed(fast), TREE, inputs(), levels=LEVELS)


def test_unequal_weights():
    flat, fast = pair()
    with torch.no_grad():
        fast.second.bias += 1
    with pytest.raises(ValueError, match=r"(?s)'second.bias' differs.*load_state_dict"):
        check_model(flat, fast, TREE, inputs(), levels=LEVELS)


def test_wrong_levels_and_trees():
    with pytest.raises(TreeError, match=r'inputs\["item"\] must have 3 rows'):
        check_model(*pair(), TREE, inputs(), levels=LEVELS | {"item": "user"})
    with pytest.raises(TreeError, match="levels must name inputs"):
        check_model(*pair(), TREE, inputs(), levels=LEVELS | {"shop": "vendor"})
    branched = BroadcastTree.from_counts(
        {"item": [1], "session": [2]}, root="user", under={"session": "user"}
    )
    with pytest.raises(TreeError, match="to must name one of the tree's leaves"):
        check_model(*pair(), branched, inputs(), levels={})
    padded = BroadcastTree.from_counts({"item": [1]}, root="user", capacity={"item": 4})
    with pytest.raises(TreeError, match="must have no dead rows"):
        check_model(*pair(), padded, inputs(), levels={})
