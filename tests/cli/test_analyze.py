"""`ikbo-tree analyze`: the numbers of a log, and what it says of bad arguments."""

import json
import sys
from pathlib import Path

import pytest

from ikbo_tree import analysis
from ikbo_tree.cli import main

LOG = """request,user,vendor,item
1,a,x,501
1,a,x,502
1,a,y,731
2,b,x,502
2,b,x,740
"""
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CEILINGS = RESULTS / "ops-cpu_amd-epyc-2-cores-1-threads.json"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command on the log; returns exit code, stdout and stderr."""
    log = tmp_path / "log.csv"
    log.write_text(LOG)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ikbo-tree", "analyze", str(log), *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capsys.readouterr()
        return exit_.value.code or 0, said.out, " ".join(said.err.replace("│", " ").split())

    return call


def test_numbers_are_those_of_the_analysis(run, tmp_path):
    out = tmp_path / "numbers.json"
    widths = ["--width", "user=512", "--width", "item=64"]
    code, text, _ = run(
        "--keys", "user,vendor", *widths, "--out", 256, "--json", out, "--ceilings", CEILINGS
    )
    assert code == 0
    found = json.loads(out.read_text())
    assert found["rows"] == {"user": 2, "vendor": 3, "item": 5}
    assert found["copied_bytes"] == (5 - 2) * 512 * 4
    assert found["flops_on_copies"] == 2 * (5 - 2) * 512 * 256
    columns = {"user": list("aaabb"), "vendor": list("xxyxx")}
    expected = analysis.broadcasting(columns, widths={"user": 512, "item": 64}, out=256).linear
    ceilings = analysis.Ceilings.from_results(CEILINGS)
    for name, work in (("flat", expected.flat), ("tree", expected.tree)):
        assert found["linear"][name]["flops"] == work.total.flops
        assert found["linear"][name]["bytes"] == work.total.bytes
        assert found["linear"][name]["seconds_at_least"] == work.seconds(ceilings)
    assert f"{expected.flat.total.flops / 1e6:.3f}" in text
    assert "ms at least" in text


def test_requests_may_have_copies_of_their_own(run, tmp_path):
    """User a asks twice here: two rows below two requests."""
    out = tmp_path / "numbers.json"
    assert run("--keys", "request,user", "--width", "user=8", "--json", out)[0] == 0
    assert json.loads(out.read_text())["rows"] == {"request": 2, "user": 2, "item": 5}
    assert "seconds_at_least" not in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keys", "shop", "--width", "shop=8"), "must name columns of"),
        (("--keys", "user", "--width", "user"), "must be LEVEL=ELEMENTS, e.g. user=512; got"),
        (("--keys", "user", "--width", "shop=8"), "widths must name levels of"),
        (("--keys", "user", "--width", "user=8", "--dtype", "int8"), "must be one of float64"),
        (("--keys", "user,item", "--width", "user=8"), "a name that no column has"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    code, _, text = run(*arguments)
    assert code == 2
    assert message in text


def test_a_file_without_ceilings_is_refused(run, tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    code, _, text = run("--keys", "user", "--width", "user=8", "--ceilings", empty)
    assert code == 2
    assert "must have copy_gbps and matmul_tflops" in text
