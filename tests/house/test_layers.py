"""Imports go one way: mapping <- kernels <- ikbo_tree. Read from syntax trees, nothing is run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "mapping": ("torch", "triton", "ikbo_tree.kernels"),
    "kernels": (),
    "ikbo_tree": ("triton",),
}
OWN = {
    "mapping": ("ikbo_tree.mapping",),
    "kernels": ("ikbo_tree.mapping", "ikbo_tree.kernels"),
    "ikbo_tree": ("ikbo_tree",),
}


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the layer"
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def below(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def breaches(folder: str, path: Path):
    for line, module in imports(path):
        if below(module, FORBIDDEN[folder]):
            yield f"{path.name}:{line} imports {module}"
        if (
            below(module, ("ikbo_tree",))
            and module != "ikbo_tree"
            and not below(module, OWN[folder])
        ):
            yield f"{path.name}:{line} imports {module}"
        if below(module, ("kernels", "mapping")):
            yield f"{path.name}:{line} imports {module} by its folder name"


@pytest.mark.parametrize("folder", sorted(OWN))
def test_imports_go_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [b for path in files for b in breaches(folder, path)] == []


def test_the_rule_notices_a_breach(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import torch\nfrom ikbo_tree.kernels import x\nfrom ikbo_tree import tree\n")
    found = list(breaches("mapping", bad))
    assert {line.split(" ")[0] for line in found} == {"bad.py:1", "bad.py:2", "bad.py:3"}


def test_triton_is_imported_by_kernel_modules_alone():
    """What `import ikbo_tree` or an op's definition runs must work where Triton is missing."""
    wanting = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        if any(below(module, ("triton",)) for _, module in imports(path))
        and not path.name.startswith(("triton_", "gluon_"))
    ]
    assert wanting == []
