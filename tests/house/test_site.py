"""The site builds without a warning, and its API pages name everything that is public."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "ikbo_tree": ("ikbo_tree", "ops"),
    "ikbo_tree.ops": ("ops",),
    "ikbo_tree.nn": ("nn",),
    "ikbo_tree.rewriting": ("rewrite",),
    "ikbo_tree.serving": ("serving",),
    "ikbo_tree.testing": ("testing",),
    "ikbo_tree.analysis": ("analysis",),
}
ELSEWHERE = {"nn", "rewrite"}
"""Of `ikbo_tree`: what has a page of its own."""


def listed(page):
    return re.findall(r"^::: (\S+)$", (DOCS / "api" / f"{page}.md").read_text(), re.M)


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_is_listed(module):
    names = {path.rpartition(".")[2] for page in PAGES[module] for path in listed(page)}
    public = set(importlib.import_module(module).__all__)
    assert public - names <= (ELSEWHERE if module == "ikbo_tree" else set())


@pytest.mark.parametrize("page", sorted(path.stem for path in (DOCS / "api").glob("*.md")))
def test_what_is_listed_exists_once(page):
    paths = listed(page)
    assert paths
    assert len(set(paths)) == len(paths)
    for path in paths:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(re.findall(r"(\S+\.md)$", navigation, re.M)) == pages


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason='needs pip install "ikbo-tree[docs]"')
    pytest.importorskip("mkdocstrings", reason='needs pip install "ikbo-tree[docs]"')
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    text = (tmp_path / "api/ops/index.html").read_text()
    assert "which is never built" in text  # the docstring of `linear`
    assert (tmp_path / "drawings/tree.svg").is_file()
