"""What goes before a launch on Hopper: plain Triton, so it is held wherever Triton runs."""

import pytest
import torch

from ikbo_tree.kernels.linear_compression.gluon_prepare import prepare


@pytest.mark.parametrize(
    ("M", "K", "words"),
    [
        (433, (1178, 866), 137),
        (1, (1, 3), 1),
        (9, (20,), 9000),
        (5, (), 40),
        (17, (3, 5, 7, 9, 300, 1), 5000),
    ],
    ids=str,
)
def test_clears_and_copies(M, K, words, device):
    work = torch.full((words + 1,), 7, dtype=torch.int32, device=device)
    weights = [torch.randn(M, k, device=device).half() for k in K]
    if len(K) > 4:  # transposed, strided
        weights[2] = torch.randn(K[2], M, device=device).half().t()
        weights[4] = torch.randn(M, 2 * K[4], device=device).half()[:, ::2]
    copies = prepare(work[:words], weights)
    assert not work[:words].any()
    assert work[words] == 7
    for copy, weight in zip(copies, weights, strict=True):
        assert torch.equal(copy, weight)
        assert copy.stride() == (-(-weight.shape[1] // 8) * 8, 1)
        assert copy.data_ptr() % 16 == 0
