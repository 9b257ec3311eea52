"""Fresh processes: what importing costs, and that it works without Triton."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HIDE_TRITON = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "typer", "rich", "hypothesis", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_works_without_triton_and_extras(tmp_path):
    code = (
        HIDE_TRITON
        + """
import torch, ikbo_tree as ikbo
tree = ikbo.BroadcastTree.from_counts({"item": [2, 1]}, root="user")
x = {"user": torch.ones(2, 3), "item": torch.ones(3, 2)}
w = {"user": torch.ones(4, 3), "item": torch.ones(4, 2)}
print(ikbo.linear(x, w, tree=tree).sum().item())
try:
    ikbo.linear(x, w, tree=tree, impl="triton")
except ikbo.UnsupportedError as error:
    print(error)
try:
    tree.show()
except ImportError as error:
    print(error)
"""
    )
    total, refusal, hint = run(code, tmp_path).split("\n")
    assert float(total) == 60.0
    assert "triton" in refusal
    assert 'pip install "ikbo-tree[cli]"' in hint


def test_import_loads_neither_numba_nor_triton_kernels(tmp_path):
    code = """
import sys, torch
before = set(sys.modules)
import ikbo_tree
late = {"numba", "triton", "typer", "rich", "pandas"}
print(sorted(n for n in set(sys.modules) - before if n.partition(".")[0] in late))
"""
    assert run(code, tmp_path) == "[]"


@pytest.mark.slow
def test_import_costs_at_most_half_as_much_again_as_torch(tmp_path):
    """Seconds inside one process each, interleaved; the median of five ratios."""
    timed = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    ratios = []
    for _ in range(5):
        torch_s = float(run(timed.format("torch"), tmp_path))
        ours_s = float(run(timed.format("ikbo_tree"), tmp_path))
        ratios.append(ours_s / torch_s)
    assert statistics.median(ratios) < 1.5, ratios


def test_folder_names_do_not_shadow_other_packages():
    """In the checkout's root `import kernels` must not find our folder under that name."""
    for name in ("kernels", "mapping"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert f"No module named '{name}'" in done.stderr
