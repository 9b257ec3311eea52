"""docs/ops.md names every public op and module; the examples run and print what stands below."""

import re
from pathlib import Path

import pytest

import ikbo_tree
import ikbo_tree.ops
from ikbo_tree.testing.fuzzing import known_ops

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n?```text\n(.*?)```)?", re.S)
EXAMPLES = sorted((DOCS / "examples").glob("*.md"))


def first_column(title):
    (table,) = re.findall(rf"\| {title} \|.*?\n\|[-|]+\|\n(.*?)\n\n", TEXT, re.S)
    cells = [line.split("|")[1] for line in table.split("\n")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


TEXT = (DOCS / "ops.md").read_text()


def test_every_op_has_a_row():
    # It lays out a weight for other ops, and is none itself.
    public = {n for n in ikbo_tree.ops.__all__ if n[0].islower()} - {"pad_weight"}
    assert first_column("op") == public
    assert public < set(ikbo_tree.__all__)


def test_every_op_is_fuzzed():
    assert first_column("op") <= set(known_ops())


def test_every_module_has_a_row():
    assert first_column("module") == {n for n in ikbo_tree.nn.__all__ if n != "HSTULayer"}


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_block_runs_and_prints_what_it_says(path, capsys):
    scope = {"__name__": path.stem}
    blocks = BLOCK.findall(path.read_text())
    assert sum(bool(printed) for _, printed in blocks) > 2
    for code, printed in blocks:
        exec(compile(code, path.name, "exec"), scope)
        assert capsys.readouterr().out == printed
