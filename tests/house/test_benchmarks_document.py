"""docs/benchmarks.md says what the results files say."""

import re
from pathlib import Path

import render


def test_tables_are_those_of_the_results():
    text = render.DOCUMENT.read_text()
    assert render.document(text) == text


def test_every_results_file_of_a_benchmark_is_there():
    named = set(re.findall(r"<!-- results: (\S+) -->", render.DOCUMENT.read_text()))
    files = {path.stem for path in render.RESULTS.glob("*.json")}
    assert named == files - {stem for stem in files if stem.startswith("movielens")}


def test_pictures_that_are_shown_exist():
    shown = re.findall(r"!\[.*?\]\((.*?)\)", render.DOCUMENT.read_text())
    for path in shown:
        assert Path(render.DOCUMENT.parent, path).is_file()
