"""Runs each file of tests/triton in Triton's interpreter; see tests/triton/conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.name
    for path in (ROOT / "tests" / "triton").glob("test_*.py")
    if not path.stem.endswith("_cuda")
)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", f"tests/triton/{name}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
