"""What the report says and draws: levels of ops, JSON, tables, a picture."""

import json
import re

import pytest
import torch
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree.extras import MissingExtraError
from ikbo_tree.rewriting.picture import COLOURS


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.top = nn.Linear(6, 8), nn.Linear(8 + 4, 1)

    def forward(self, user_x, item_x, item_to_user):
        user = self.user(user_x[item_to_user]).relu()
        return self.top(torch.cat([user, item_x - item_x.mean(0)], 1))


@pytest.fixture(scope="module")
def report():
    inputs = torch.randn(2, 6), torch.randn(64, 4), torch.arange(64) % 2
    return ikbo.rewrite(
        Ranker().eval(),
        inputs,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        rows={"user": (1, 2, 8), "item": (1, 64, 512)},
        check_seconds=0.1,
    )[1]


def test_every_op_has_the_level_of_its_rows(report):
    found = {op.op.split(".")[1]: (op.level, op.reads, op.together) for op in report.ops}
    assert found["relu"] == ("user", ("user",), False)
    assert found["mean"] == ("item", ("item",), True)
    assert found["sub"] == ("item", ("item",), True)
    assert found["index_select"] == ("item", ("user", "item"), False)
    assert {op.level for op in report.ops if op.op == "aten.linear.default"} == {"user", "item"}


def test_costs_of_ops_add_up_to_those_of_levels(report):
    for level, cost in report.after.items():
        own = [op.cost for op in report.ops if (op.level or "-") == level]
        assert sum(c.flops for c in own) == cost.flops, level
        assert sum(c.bytes for c in own) == cost.bytes, level


def test_a_changed_signature_is_stated():
    class Two(nn.Module):
        def forward(self, user_x, item_x, item_to_user):
            return user_x.exp() * item_x + user_x[:, :1] * item_to_user[:, None]

    tree = ikbo.BroadcastTree.from_counts({"item": [3, 4]}, root="user")
    inputs = torch.randn(7, 4), torch.randn(7, 4), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    _, report = ikbo.rewrite(
        Two().eval(),
        inputs,
        levels={"user_x": "item", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        compact={"user_x": "user"},
        tree=tree,
    )
    assert report.inputs == {
        "user_x": "rows of user, no more of item",
        "item_x": "rows of item",
        "tree": "the tree BroadcastTree(user 2 -> item 7, cpu)",
        "item_to_user": "left out: the tree has it (map of item and user)",
    }


def test_lines_are_the_model_s(report):
    for op in report.ops:
        if op.op == "aten.relu.default":
            assert "test_report.py" in op.source
            assert "self.user(user_x[item_to_user]).relu()" in op.source


def test_json_has_everything(report):
    written = json.loads(report.to_json())
    assert set(written) == {"inputs", "levels", "steps", "ops", "costs", "checks"}
    assert written["levels"]["item"] == {"least": 1, "usual": 64, "most": 512}
    assert len(written["ops"]) == len(report.ops)
    assert {step["action"] for step in written["steps"]} >= {"gathered", "sunk", "split", "kept"}
    assert set(written["costs"]["before"]) <= {"user", "item", "-"}
    assert written["checks"][0]["user"] == 3


def test_tables_show_steps_levels_and_costs(report, capsys):
    report.show()
    shown = capsys.readouterr().out
    words = ("what became of it", "test_report.py", "take rows", "MFLOP before", "512", "rewritten")
    for word in words:
        assert word in shown


def test_dot_has_a_cluster_a_level_and_a_colour_each(report, tmp_path):
    path = tmp_path / "graph.dot"
    report.draw(path)
    text = path.read_text()
    assert text.count("subgraph") == 2
    shown = dict(re.findall(r'"(\w+)" \[label="\w+", fillcolor="(#\w+)"', text))
    colours = dict(zip(("user", "item"), COLOURS, strict=False))
    assert shown == {op.name: colours[op.level] for op in report.ops if op.level}
    names = {op.op.split(".")[1]: op.name for op in report.ops if op.level}
    assert f'"{names["relu"]}" -> ' in text
    assert text.count("octagon") == sum(op.together for op in report.ops)


def test_picture_shows_each_level_s_colour(report, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "graph.png"
    report.draw(path)
    pixels = torch.from_numpy(image.imread(path))[..., :3]
    for colour in COLOURS[:2]:
        wanted = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert ((pixels - wanted).abs().amax(-1) < 0.01).sum() > 500, colour


def test_a_missing_matplotlib_is_a_sentence(report, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises((MissingExtraError, ImportError), match="matplotlib"):
        report.draw(tmp_path / "graph.png")
