"""Ceilings and the times they allow; logs of requests; graphs of models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree import TreeError, analysis
from ikbo_tree.analysis import Ceilings, Cost, Step, Work

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_a_kernel_takes_as_long_as_what_takes_longer():
    """10 bytes and 100 operations a second: 20 bytes take 2 s, 500 operations 5 s."""
    ceilings = Ceilings(10.0, 100.0)
    assert ceilings.flops_a_byte == 10
    assert Cost(0, 20).seconds(ceilings) == 2
    assert Cost(500, 20).seconds(ceilings) == 5
    parts = (Step("a", "user", Cost(500, 0)), Step("b", "item", Cost(0, 20)))
    assert Work(parts).seconds(ceilings) == 7
    # Parts of one kernel overlap.
    assert Work(tuple(step._replace(op="a") for step in parts)).seconds(ceilings) == 5


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_ceilings_are_positive(bad):
    with pytest.raises(ValueError, match="bytes_per_second must be positive and finite; got"):
        Ceilings(bad, 1.0)
    with pytest.raises(ValueError, match="flops_per_second must be positive and finite; got"):
        Ceilings(1.0, bad)


def with_ceilings():
    contents = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return [path for path, x in contents.items() if (x.get("ceilings") or {}).get("copy_gbps")]


@pytest.mark.parametrize("path", with_ceilings(), ids=lambda path: path.stem)
def test_ceilings_come_from_results(path):
    found, content = Ceilings.from_results(path), json.loads(path.read_text())
    assert found.bytes_per_second == pytest.approx(content["ceilings"]["copy_gbps"] * 1e9)
    assert found.flops_per_second == pytest.approx(content["ceilings"]["matmul_tflops"] * 1e12)
    assert content["device"] in found.source


@pytest.mark.parametrize("content", [{}, [], {"ceilings": {"copy_gbps": 1.0}}, {"ceilings": None}])
def test_a_file_without_ceilings_is_refused(tmp_path, content):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"path must have copy_gbps and matmul_tflops; got .*some"):
        Ceilings.from_results(path)


def test_no_call_of_a_results_file_is_faster_than_its_ceilings_allow():
    """The same products were timed in the run that measured the ceilings.

    Not the bytes: what a benchmark works on again and again is in a CPU's cache.
    """
    path = RESULTS / "ops-cpu_amd-epyc-2-cores-1-threads.json"
    content, ceilings = json.loads(path.read_text()), Ceilings.from_results(path)
    tree = ikbo.BroadcastTree.from_counts({"item": [64] * 64}, root="user")
    found = analysis.linear(tree, {"user": 256, "item": 256}, 256)
    least = {"ikbo-torch": found.tree, "materialised": found.flat}
    timed = {
        record["who"]: record["median_ms"]
        for record in content["records"]
        if record["workload"] == "linear-b4096-r64-k256-n256"
        and (record["direction"], record["dtype"]) == ("fwd", "float32")
    }
    for who, work in least.items():
        arithmetic = work.total.flops / ceilings.flops_per_second * 1e3
        # Ceilings of a shared machine drift by a few per cent too.
        assert 0.9 * arithmetic < timed[who] < 3 * arithmetic


def test_counts_of_a_log():
    found = analysis.broadcasting([3, 0, 5], widths={"user": 4, "item": 2}, out=6)
    assert found.stats.extra_bytes == 4 * (8 - 3) * 4
    assert found.stats.extra_flops == 2 * (8 - 3) * 4 * 6
    assert found.linear.extra.flops == found.stats.extra_flops
    assert found.stats.levels["item"].fan_out == (0.0, 3.0, 4.6, 4.96, 5.0)
    same = analysis.broadcasting(torch.tensor([3, 0, 5]), widths={"user": 4, "item": 2}, out=6)
    assert same.stats == found.stats


def test_keys_of_a_log():
    """A user's second request is the same row, unless requests are named."""
    log = {"request": [1, 1, 2, 2, 2], "user": ["a", "a", "a", "a", "a"]}
    found = analysis.broadcasting({"user": log["user"]}, widths={"user": 4})
    assert found.tree.rows("user") == 1
    found = analysis.broadcasting(log, widths={"user": 4})
    assert (found.tree.rows("request"), found.tree.rows("user")) == (2, 2)
    assert found.stats.levels["user"].extra_bytes == 4 * (5 - 2) * 4
    assert found.stats.levels["user"].copies == 2.5


def test_a_tree_is_a_log_too_and_widths_bound_the_linear_map():
    tree = ikbo.BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
    widths = {"user": 4, "vendor": 3, "item": 2}
    found = analysis.broadcasting(tree, widths=widths, out=6, dtype=torch.float16)
    assert found.linear == analysis.linear(tree, widths, 6, dtype=torch.float16)
    by_level = [level.extra_flops for level in found.stats.levels.values()]
    assert sum(by_level) == found.linear.extra.flops == 2 * 6 * ((5 - 2) * 4 + (5 - 3) * 3)


def test_logs_that_do_not_fit():
    with pytest.raises(TreeError, match=r"log must have a column of keys; got none"):
        analysis.broadcasting({}, widths={})
    with pytest.raises(TreeError, match="levels must name the items by a name that no column has"):
        analysis.broadcasting({"item": [1, 2]}, widths={"item": 1})
    with pytest.raises(TreeError):
        analysis.broadcasting([3, -1], widths={"user": 4})
    with pytest.raises(TreeError, match="widths must name levels"):
        analysis.broadcasting([3], widths={"shop": 4})


def test_a_log_of_a_million_items():
    counts = np.random.default_rng(0).integers(0, 200, 10_000)
    found = analysis.broadcasting(counts, widths={"user": 1000, "item": 10}, out=512)
    copied = (int(counts.sum()) - 10_000) * 1000
    assert found.stats.extra_flops == 2 * copied * 512


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(4 + 2, 6)

    def forward(self, user_x, item_x, item_to_user):
        return self.top(torch.cat([user_x[item_to_user], item_x], 1)).relu()


class OnTree(Flat):
    def forward(self, user_x, item_x, tree):
        w = dict(zip(("user", "item"), self.top.weight.split([4, 2], 1), strict=True))
        hidden = ikbo.linear({"user": user_x, "item": item_x}, w, tree=tree, bias=self.top.bias)
        return hidden.relu()


def test_a_model_and_its_twin():
    tree = ikbo.BroadcastTree.from_counts({"item": [8] * 3}, root="user")
    x = {"user_x": torch.randn(3, 4), "item_x": torch.randn(24, 2)}
    levels = {"user_x": "user", "item_x": "item"}
    maps = {"item_to_user": tree.ancestors("item", of="user")}
    flat = analysis.of_model(
        Flat().eval(), x | maps, levels=levels, broadcasts={"item_to_user": ("item", "user")}
    )
    fast = analysis.of_model(OnTree().eval(), x | {"tree": tree}, levels=levels)
    product = 2 * 24 * 6 * 6
    assert flat.by_op()["linear"] == Cost(product, 4 * (24 * 6 + 6 * 6 + 6 + 24 * 6))
    assert flat.by_level() == {"item": flat.total}
    assert [step.op for step in flat.steps] == ["index", "cat", "linear", "relu"]
    (linear,) = (cost for op, cost in fast.by_op().items() if op.startswith("linear"))
    assert linear.flops == analysis.linear(tree, {"user": 4, "item": 2}, 6).tree.total.flops


def test_tables_are_printed(capsys):
    found = analysis.broadcasting([64] * 16, widths={"user": 512, "item": 512}, out=256)
    found.show(Ceilings(1e12, 1e14))
    text = capsys.readouterr().out
    # 264 MFLOP on copies, 2.064 MB of them; 536.871 MFLOP flat, at least 0.01681 ms.
    for number in ("264.241", "2.064", "536.871", "272.630", "0.01681"):
        assert number in text, number
    found.linear.show()
    assert "ms at least" not in capsys.readouterr().out
