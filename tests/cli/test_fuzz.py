"""The command `ikbo-tree fuzz`: passes what is right, prints how to see again what is not."""

import subprocess
import sys
import textwrap

import pytest
import typer
from planted_faults import planted
from typer.testing import CliRunner

from ikbo_tree.cli.fuzz import fuzz
from ikbo_tree.testing import CheckError


def run(*arguments):
    app = typer.Typer()
    app.command()(fuzz)
    return CliRunner().invoke(app, [*arguments, "--max-rows", "60"])


@pytest.fixture(autouse=True)
def register():
    with planted():
        yield


def test_passes_what_is_right():
    result = run("--op", "reduce", "--impl", "torch", "--examples", "8", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "1 ops, 8 trees each: nothing found" in result.output


def test_prints_the_smallest_failure_and_how_to_run_it():
    result = run("--op", "empty_maximum_is_zero", "--examples", "20", "--seed", "3")
    assert result.exit_code == 1
    assert "values: output 0" in result.output
    assert (
        "ikbo-tree fuzz --op empty_maximum_is_zero --impl auto --examples 20 --seed 3"
        " --dtype float32 --max-depth 5 --max-rows 60 --device cpu"
    ) in result.output
    code = result.output[result.output.index("import torch") :].partition("\n\n")[0]
    with pytest.raises(CheckError, match="values: output 0"):
        exec(code, {})


def test_the_same_seed_finds_the_same_failure():
    first, second = (run("--op", "gradient_doubled", "--examples", "5") for _ in range(2))
    code = [result.output.partition("again:")[2] for result in (first, second)]
    assert code[0]
    assert code[0] == code[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "no_such_op"), "must be all or one of broadcast"),
        (("--op", "reduce", "--dtype", "int8"), "must be one of float64"),
    ],
)
def test_refuses_unknown_names(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "extra"), [("typer", "cli"), ("rich", "cli"), ("hypothesis", "testing")]
)
def test_a_missing_extra_is_one_sentence(missing, extra):
    code = f"""
        import sys
        sys.modules["{missing}"] = None
        sys.argv = ["ikbo-tree", "fuzz", "--op", "reduce", "--examples", "1"]
        from ikbo_tree.cli import main
        main()
    """
    result = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f'pip install "ikbo-tree[{extra}]"' in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
