"""What the matrix kernels compile to on GPUs that this machine does not have."""

import pytest
import torch
from offline.compiling import compile_only, read
from offline.miscompiled import miscompiled
from triton.runtime.jit import JITFunction

from ikbo_tree.kernels.linear import triton_kernel as linear
from ikbo_tree.kernels.linear_compression import triton_kernel as linear_compression

ROWS = 3
HALF = torch.float16


def forward_compression(dtype, K, M, N, final=True):
    x, weight = torch.zeros(ROWS, K, N, dtype=dtype), torch.zeros(M, K, dtype=dtype)
    out = torch.empty(ROWS, M, N, dtype=dtype if final else torch.float32)
    partial = (torch.zeros(2, M, N), torch.zeros(ROWS, dtype=torch.int32))
    linear_compression.BATCHES.multiply(
        x, weight, out, None, [partial] if final else [], None, final
    )


def input_gradient_compression(dtype, K, M, N):
    grad, weight = torch.zeros(1, ROWS, M, N, dtype=dtype), torch.zeros(1, M, K, dtype=dtype)
    out = torch.empty(ROWS, K, N, dtype=dtype)
    linear_compression.BATCHES.input_gradient(grad, weight, out, None)


def weight_gradient_compression(dtype, K, M, N, pieces=1):
    grad = torch.zeros(pieces, ROWS, M, N, dtype=dtype)
    x = torch.zeros(pieces, ROWS, K, N, dtype=dtype)
    linear_compression.BATCHES.weight_gradient(grad, x, None, dtype)


def forward_linear(dtype, K, N):
    x, weight = torch.zeros(ROWS, K, dtype=dtype), torch.zeros(N, K, dtype=dtype)
    partial = (torch.zeros(2, N), torch.zeros(ROWS, dtype=torch.int32))
    out, bias = torch.empty(ROWS, N, dtype=dtype), torch.zeros(N, dtype=dtype)
    linear.MATRICES.multiply(x, weight, out, bias, [partial], None, True)


def weight_gradient_linear(dtype, K, N):
    grad, x = torch.zeros(1, 200, N, dtype=dtype), torch.zeros(1, 200, K, dtype=dtype)
    linear.MATRICES.weight_gradient(grad, x, None, dtype)


def compiled(monkeypatch, target, function, *args, **options):
    """What the function launches, read: the matrix kernels alone."""
    for module in (linear, linear_compression):
        monkeypatch.setattr(module, "architecture", lambda device: target)
    kept = []
    with compile_only(target):
        warm = JITFunction.run

        def run(self, *args, **kwargs):
            built = warm(self, *args, **kwargs)
            if self.__name__ in ("gemm_kernel", "weight_gradient_kernel"):
                kept.append(built)
            return built

        monkeypatch.setattr(JITFunction, "run", run)
        function(*args, **options)
        monkeypatch.setattr(JITFunction, "run", warm)
    assert kept
    return [read(built, target) for built in kept]


def check(found, *, registers, hgmma=False, widest_store=None):
    for built in found:
        assert built.spills == 0
        assert built.registers <= registers
        assert built.fits
        assert (built.hgmma > 0) == hgmma
        assert not hgmma or not miscompiled(built.listing)
        if widest_store:
            assert built.widest_store == widest_store


@pytest.mark.parametrize(
    ("function", "registers", "widest_store"),
    [
        (forward_compression, 224, 128),
        (input_gradient_compression, 224, None),
        (weight_gradient_compression, 224, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hopper(monkeypatch, function, registers, widest_store):
    """Warpgroup products, operands by the copy engine, no spills, 16-byte partials and stores."""
    found = compiled(monkeypatch, "sm_90", function, HALF, 866, 433, 256)
    check(found, registers=registers, hgmma=True, widest_store=widest_store)
    for built in found:
        assert "UTMALDG" in built.listing
        assert "LDGSTS" not in built.listing


def test_hopper_coarse_stage(monkeypatch):
    found = compiled(monkeypatch, "sm_90", forward_compression, HALF, 866, 433, 256, final=False)
    check(found, registers=128, hgmma=True, widest_store=128)


def test_hopper_linear(monkeypatch):
    check(compiled(monkeypatch, "sm_90", forward_linear, HALF, 512, 512), registers=255, hgmma=True)


@pytest.mark.slow
def test_hopper_pieces(monkeypatch):
    found = compiled(
        monkeypatch, "sm_90", weight_gradient_compression, torch.bfloat16, 866, 433, 256, pieces=2
    )
    check(found, registers=224, hgmma=True)


@pytest.mark.slow
def test_hopper_rows_that_are_no_multiple_of_16_bytes(monkeypatch):
    for function in (forward_compression, weight_gradient_compression):
        check(
            compiled(monkeypatch, "sm_90", function, HALF, 511, 433, 466), registers=255, hgmma=True
        )
    for function in (forward_linear, weight_gradient_linear):
        check(compiled(monkeypatch, "sm_90", function, HALF, 866, 466), registers=255, hgmma=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_elsewhere(monkeypatch, target):
    found = compiled(monkeypatch, target, forward_compression, HALF, 866, 433, 256)
    check(found, registers=255, widest_store=128)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_everything_elsewhere(monkeypatch, target, dtype):
    for function in (input_gradient_compression, weight_gradient_compression):
        check(compiled(monkeypatch, target, function, dtype, 866, 433, 256), registers=255)
    for function in (forward_linear, weight_gradient_linear):
        check(compiled(monkeypatch, target, function, dtype, 512, 512), registers=255)
