"""Hopper kernels: GPU tests need sm_90; what is arithmetic runs anywhere."""

import pytest
import torch


def hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def device():
    if not hopper():
        pytest.skip("needs a Hopper GPU (sm_90)")
    return torch.device("cuda")
