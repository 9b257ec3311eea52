"""What a release says of itself: one version, one licence, the licences of what it uses."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = (ROOT / "CITATION.cff").read_text()


def named(requirements):
    """Distributions, less our own extras."""
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
    return names - {PROJECT["name"]}


def test_the_citation_has_the_projects_version_and_licence():
    assert f"\nversion: {PROJECT['version']}\n" in CITATION
    assert f"\nlicense: {PROJECT['license']}\n" in CITATION


def test_the_citation_is_valid_where_its_fields_go():
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(CITATION)
    assert {"cff-version", "message", "title", "authors"} <= set(content)
    assert all("name" in author for author in content["authors"])


def test_licences_of_all_dependencies_are_listed():
    table = re.findall(
        r"^\| (\S+) \| (.*?) \| .+ \|$", (ROOT / "docs/licences.md").read_text(), re.M
    )
    listed = {name: where for name, where in table if name not in ("package", "---")}
    extras = PROJECT["optional-dependencies"]
    expected = dict.fromkeys(named(PROJECT["dependencies"]))
    for extra, requirements in extras.items():
        if extra != "dev":
            expected |= dict.fromkeys(named(requirements), f"extra `{extra}`")
    assert set(listed) == set(expected)
    for name, where in expected.items():
        assert where is None or listed[name] == where


@pytest.mark.parametrize("script", ["run", "release"])
def test_scripts_of_ci_are_whole(script):
    path = ROOT / ".ci" / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_matrix_names_versions_that_the_package_allows():
    command = [sys.executable, str(ROOT / ".ci/matrix.py"), "--help"]
    assert "--torch" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (ROOT / ".ci/matrix.py").read_text()
    oldest = {
        name: re.search(rf'"{name}>=([\d.]+)', " ".join(f'"{r}"' for r in PROJECT["dependencies"]))[
            1
        ]
        for name in ("torch", "triton")
    }
    for name, least in oldest.items():
        versions = re.search(rf"^{name.upper()} = \((.*?)\)", lines, re.M)[1]
        assert versions.startswith(f'"{least}.'), (name, least, versions)
