"""docs/benchmarks.md and docs/kernels say what the results files say."""

import re
from pathlib import Path

import pytest
import render

DOCUMENTS = pytest.mark.parametrize("path", render.DOCUMENTS, ids=lambda path: path.stem)


@DOCUMENTS
def test_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert render.document(text, path) == text


def test_every_results_file_of_a_benchmark_is_there():
    shown = {path: set(render.named(path.read_text())) for path in render.DOCUMENTS}
    files = {path.stem for path in render.RESULTS.glob("*.json")}
    assert set().union(*shown.values()) >= {
        stem for stem in files if not stem.startswith("movielens")
    }
    assert shown[render.DOCUMENT] <= files


@DOCUMENTS
def test_pictures_that_are_shown_exist(path):
    shown = re.findall(r"!\[.*?\]\((.*?)\)", path.read_text())
    for picture in shown:
        assert Path(path.parent, picture).is_file()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    return tmp_path


def test_a_block_of_a_missing_file_says_so(folder):
    text = "<!-- results: ablation_none lce -->\nold\n<!-- end -->\nbehind\n"
    written = render.document(text)
    assert "There is no `benchmarks/results/ablation_none.json` yet." in written
    assert "old" not in written
    assert written.endswith("<!-- end -->\nbehind\n")
    assert render.document(written) == written
    assert render.named(written) == ["ablation_none"]
