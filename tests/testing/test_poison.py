"""Fresh memory is NaN, canaries sing, and both leave torch as they found it."""

import pytest
import torch

from ikbo_tree.testing.poison import CanaryError, canary_rows, natural_memory, poisoned_memory


def state():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_fresh_memory_is_poisoned():
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        # Inside torch's own functions too.
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()


def test_state_is_restored_even_after_an_error():
    before = state()
    for context in (poisoned_memory, natural_memory):
        with pytest.raises(RuntimeError, match="stop"), context():
            raise RuntimeError("stop")
        assert state() == before


def test_natural_memory_inside_poisoned():
    with poisoned_memory():
        with natural_memory():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("at", [-1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(2, 3, dtype=dtype),
        lambda dtype: torch.empty((2, 3), dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
        lambda dtype: torch.zeros(1, dtype=dtype).new_empty(2, 3),
        lambda dtype: torch.zeros(1, dtype=dtype).new_zeros((2, 3)),
    ],
)
def test_writes_beside_a_buffer_are_seen(make, dtype, at):
    with canary_rows():
        make(dtype).fill_(1)

    def write():
        buffer = make(dtype)
        buffer.as_strided((1,), (1,), buffer.storage_offset() + at).fill_(1)

    with pytest.raises(CanaryError, match="written beside"), canary_rows():
        write()


def test_guarded_buffers_are_poisoned_and_torch_is_put_back():
    functions = torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new_zeros
    with canary_rows():
        assert torch.empty(4, 2).isnan().all()
        assert (torch.zeros(2).new_zeros(3, 2) == 0).all()
        assert torch.empty(0, 5).shape == (0, 5)
    assert functions == (
        torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.Tensor.new_zeros,
    )  # fmt: skip
