"""What is installed is what lies in the checkout."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_name(folder: Path, root: Path = ROOT) -> str:
    parts = folder.relative_to(root).parts
    return ".".join(parts if parts[0] == "ikbo_tree" else ("ikbo_tree", *parts))


def packages_on_disk() -> set[str]:
    tops = [ROOT / name for name in ("ikbo_tree", "kernels", "mapping")]
    return {
        installed_name(init.parent) for top in tops for init in sorted(top.rglob("__init__.py"))
    }


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_module_lies_in_a_package():
    stray = [
        path
        for top in ("ikbo_tree", "kernels", "mapping")
        for path in sorted((ROOT / top).rglob("*.py"))
        if not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path):
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, files):
        origin = ROOT / name
        if origin.is_file() and not origin.is_symlink():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(origin.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        installed_name(path.parent, source).replace(".", "/") + "/" + path.name
        for top in ("ikbo_tree", "kernels", "mapping")
        for path in sorted((source / top).rglob("*.py"))
    }
    assert inside == expected | {"ikbo_tree/py.typed"}


def test_version_is_one():
    import ikbo_tree

    assert ikbo_tree.__version__ == PROJECT["project"]["version"]
