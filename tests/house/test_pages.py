"""The code of the pages in docs/ runs, and prints what stands below it.

docs/five_minutes.md and docs/examples have tests of their own, in tests/demo and tests/nn.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n?```text\n(.*?)```)?", re.S)
PAGES = ("index.md", "trees.md", "models.md", "contracts.md", "faq.md")


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs_and_prints_what_it_says(name, capsys):
    blocks = BLOCK.findall((DOCS / name).read_text())
    assert blocks
    scope = {"__name__": name}
    for code, printed in blocks:
        exec(compile(code, name, "exec"), scope)
        assert capsys.readouterr().out == printed


def test_every_cell_of_the_comparison_has_its_source():
    text = (DOCS / "comparison.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.split("\n") if line.startswith("| **")]
    assert len(rows) == 18
    for name, *cells in rows:
        for cell in cells:
            assert re.search(r"\]\(\S+\.md|\]\[\S+\]", cell), (name, cell)
    used, known = (
        set(re.findall(r"\]\[(\S+?)\]", text)),
        set(re.findall(r"^\[(\S+)\]:", text, re.M)),
    )
    assert used == known


# The packages that a page adds modules to find them beside their own.
RUN = """
import contextlib, importlib, io, json, sys
folder, blocks = sys.argv[1], json.load(open(sys.argv[2]))
for package, place in (("kernels", "kernels"), ("ops", "ikbo_tree/ops"),
                       ("testing", "ikbo_tree/testing")):
    importlib.import_module("ikbo_tree." + package).__path__.append(f"{folder}/{place}")
scope = {"__name__": "page"}
for code, printed in blocks:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "new_op.md", "exec"), scope)
    assert out.getvalue() == printed, (code, out.getvalue(), printed)
print("blocks:", len(blocks))
"""


def written(folder, blocks):
    """Puts blocks that begin with a file's name into that file; the others."""
    rest = []
    for code, printed in blocks:
        name = re.match(r"# ((?:kernels|ikbo_tree)/\S+\.py)\n", code)
        if name is None:
            rest.append((code, printed))
            continue
        path = folder / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        if name[1].startswith("kernels/"):
            (path.parent / "__init__.py").write_text('"""`center`: see op.py."""\n')
    return rest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_new_op_is_written_checked_and_fuzzed(tmp_path):
    """In a process of its own: Triton's interpreter is chosen when kernels are defined."""
    blocks = written(tmp_path, BLOCK.findall((DOCS / "new_op.md").read_text()))
    assert len(blocks) == 3
    given = tmp_path / "blocks.json"
    given.write_text(json.dumps(blocks))
    command = [sys.executable, "-P", "-c", RUN, str(tmp_path), str(given)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("blocks: 3\n")


def test_its_files_keep_the_style(tmp_path):
    """What is shown to be copied passes the linter."""
    written(tmp_path, BLOCK.findall((DOCS / "new_op.md").read_text()))
    config = str(DOCS.parent / "pyproject.toml")
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--config", config], ["format", "--check", "--config", config]):
        done = subprocess.run(
            [*ruff, *command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout
