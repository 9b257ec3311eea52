"""The README's code runs, and its commands are what they claim."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "user 2 -> vendor 3 -> item 5" in capsys.readouterr().out


def test_commands_are_marked_for_ci():
    for name in ("demo", "tests"):
        (block,) = re.findall(
            rf"<!-- {name} -->\n```bash\n(.*?)```\n<!-- end {name} -->", README, re.S
        )
        assert "constraints-cpu.txt" in block
    assert block.strip().endswith("-m pytest")


def test_figures_are_those_of_the_results():
    files, table = re.search(r"<!-- figures: (.*?) -->\n(.*?)<!-- end", README, re.S).groups()
    medians = {}
    for name in files.split(", "):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for record in content["records"]:
            if record["dtype"] == "float32":
                key = (record["workload"], record["direction"], record["who"])
                medians[key] = record["median_ms"]
    rows = re.findall(
        r"\| `(\S+)`.*? \| (forward|with backward) \| (.*?) \| (.*?) \| (.*?)x \|", table
    )
    assert len(rows) == table.count("\n") - 2
    for workload, direction, flat, tree, ratio in rows:
        key = workload, {"forward": "fwd", "with backward": "fwd_bwd"}[direction]
        assert medians[*key, "materialised+broadcast"] == pytest.approx(float(flat), abs=0.005)
        assert medians[*key, "ikbo-torch"] == pytest.approx(float(tree), abs=0.005)
        assert float(ratio) == pytest.approx(float(flat) / float(tree), abs=0.05)


def test_gpu_figures_are_those_of_the_results():
    files, table = re.search(r"<!-- gpu figures: (.*?) -->\n(.*?)<!-- end", README, re.S).groups()
    found = {}
    for name in files.split(", "):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for record in content["records"]:
            key = record["workload"], record["direction"]
            found.setdefault(key, {})[record["who"]] = record["median_ms"]
    row = r"\| `(\S+)` \| (\w+) \| (\S+) \| (\S+) `(\S+)` \| (\S+) \| (\S+)x \| (\S+)x \|"
    rows = re.findall(row, table)
    assert len(rows) == table.count("\n") - 2
    directions = {"forward": "fwd", "backward": "bwd", "both": "fwd_bwd"}
    for workload, direction, flat, best, who, tree, to_flat, to_best in rows:
        medians = found[workload, directions[direction]]
        ours = medians["ikbo-gluon"]
        # The product of the finest level alone is no peer: it computes less.
        others = [w for w in medians if not w.startswith("ikbo") and w != "cublas-candidate"]
        assert who == min(others, key=medians.get)
        (copied,) = (w for w in others if w in ("materialised+broadcast", "cudnn-broadcast"))
        assert medians[copied] == pytest.approx(float(flat), abs=0.0006)
        assert medians[who] == pytest.approx(float(best), abs=0.0006)
        assert ours == pytest.approx(float(tree), abs=0.0006)
        assert medians[copied] / ours == pytest.approx(float(to_flat), abs=0.06)
        assert medians[who] / ours == pytest.approx(float(to_best), abs=0.006)
