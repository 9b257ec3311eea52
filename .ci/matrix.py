"""Runs parts of the tests under several versions of torch and Triton, without a GPU.

    python .ci/matrix.py --folder /tmp/matrix
    python .ci/matrix.py --folder /tmp/matrix --torch 2.13.0 --triton 3.6.0 3.9.0

One environment for each torch is made in the folder, and kept; a CUDA build of torch takes 5 GB.
Triton is put into it without torch's consent: torch asks for one version and runs with others.
Prints a table of what passed; exits with 1 if anything failed. What pip cannot install is said in
the table, and is no failure.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# Triton 3.6's interpreter fails on run-time loop bounds under numpy 2.4.
BESIDE = ("numpy<2.4", "numba>=0.61", "pytest>=8", "hypothesis>=6.100", "setuptools>=77")
PYTEST = ("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
STAGES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "import": ((".ci/smoke.py",), {}),
    "launch": ((*PYTEST, "tests/offline/test_launch.py"), {}),
    "interpreter": (
        (*PYTEST, "tests/triton/test_tiles.py", "tests/triton/test_linear_kernels.py"),
        {"TRITON_INTERPRET": "1"},
    ),
    "compile": (
        (
            *PYTEST,
            "tests/offline/test_linear_compiled.py",
            "tests/offline/test_attention_compiled.py",
            "tests/offline/test_gluon_linear_compiled.py",
        ),
        {},
    ),
}
"""What python is called with, from the checkout's root, and what is set for it."""

BOUNDS = ("compile",)
"""Stages whose tests also hold registers and spills to bounds, set with the Triton that
constraints-cpu.txt pins: a bound that another one passes is said, and is no failure."""


def main() -> int:
    """Fills the table."""
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, failures = [], 0
    for torch in options.torch:
        python = environment(options.folder / f"torch-{torch}", torch)
        for triton in options.triton:
            if python is None or not pip(python, "--no-deps", f"triton=={triton}"):
                rows.append((torch, triton, *["not installable"] * len(STAGES)))
                print(*rows[-1], sep=" | ", flush=True)
                continue
            cells = [stage(python, name, options.folder, triton) for name in STAGES]
            failures += sum(cell.startswith("failed") for cell in cells)
            rows.append((torch, triton, *cells))
            print(*rows[-1], sep=" | ", flush=True)
    print(f"\n| torch | triton | {' | '.join(STAGES)} |\n|{'---|' * (2 + len(STAGES))}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for environments and logs")
    parser.add_argument("--torch", nargs="+", default=TORCH, help="versions")
    parser.add_argument("--triton", nargs="+", default=TRITON, help="versions")
    found = parser.parse_args()
    found.folder = found.folder.resolve()
    return found


def environment(folder: Path, torch: str) -> Path | None:
    """The interpreter of an environment with this torch and this checkout; None: there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not pip(python, f"torch=={torch}", *BESIDE):
        return None
    return python if pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT)) else None


def pip(python: Path, *wanted: str) -> bool:
    """Whether they could be installed."""
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def stage(python: Path, name: str, folder: Path, triton: str) -> str:
    """What a cell says; the log lies in the folder."""
    arguments, extra = STAGES[name]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "400", **extra}
    command = [str(python), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    log = folder / f"{python.parents[1].name}-triton-{triton}-{name}.log"
    log.write_text(f"{command}\n{done.stdout}\n{done.stderr}")
    counted = re.findall(r"\d+ (?:passed|failed|errors?)\b", done.stdout)
    if done.returncode == 0:
        return ", ".join(counted) or "ok"
    reasons = re.findall(r"^(?:FAILED|ERROR) \S+(?: - (.*))?$", done.stdout, re.M)
    bounds = [reason for reason in reasons if re.search(r"assert \d+ (?:<=|==|>=) \d+", reason)]
    if name in BOUNDS and reasons and len(bounds) == len(reasons):
        return f"{counted[-1]}, {len(bounds)} over a bound"
    log.rename(log.with_name(f"failed-{log.name}"))
    return f"failed: {', '.join(counted) or 'see its log'}"


if __name__ == "__main__":
    raise SystemExit(main())
