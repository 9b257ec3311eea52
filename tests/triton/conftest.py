"""Triton tests run twice: in the interpreter on CPU tensors, and on a GPU, through one body.

Triton reads TRITON_INTERPRET when kernels are defined, so the interpreter needs a process of its
own: `tests/test_interpreter.py` starts one for each file here. Without the variable the same tests
want a GPU.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:
            continue
        if INTERPRETED:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1"))


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")
