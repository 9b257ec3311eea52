"""What the kernels of add, mul, gate and film compile to on GPUs that are not here."""

import pytest
import torch
from offline.compiling import TARGETS, compile_for, compile_only

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.config import row_tile, segment_tile
from ikbo_tree.kernels.common.triton_lib import alignment
from ikbo_tree.kernels.modulate import triton_kernel
from ikbo_tree.kernels.modulate.triton_gradients import TILE_BYTES_OF, product_gradients_kernel
from ikbo_tree.kernels.modulate.triton_kernel import modulate_kernel

BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
STEPS = {"x_step": "i32", "scale_step": "i32"}


def compile_forward(target, dtype, width, coarse, shifted):
    tile, align = row_tile(width, BYTES[dtype]), alignment(width)
    pointers = {"x_ptr": f"*{dtype}", "scale_ptr": f"*{coarse}", "out_ptr": f"*{dtype}"}
    constants = {"live_ptr": None, "X_ALIGN": align, "SCALE_ALIGN": align, "SHIFT_ALIGN": align}
    constants |= {"WIDTH": width, "R": tile.rows, "C": tile.columns}
    if shifted:
        pointers["shift_ptr"] = f"*{coarse}"
    else:
        constants["shift_ptr"] = None
    signature = pointers | STEPS | {"index_ptr": "*i32", "rows": "i32", "shift_step": "i32"}
    return compile_for(modulate_kernel, signature, constants, target, num_warps=tile.num_warps)


def compile_gradients(target, dtype, width, shifted):
    tile, align = segment_tile(width, TILE_BYTES_OF), alignment(width)
    names = ("g_ptr", "x_ptr", "scale_ptr", "dx_ptr", "d_scale_ptr", "d_shift_ptr")
    signature = dict.fromkeys(names, f"*{dtype}")
    signature |= {"product_ptr": "*fp32", "plain_ptr": "*fp32"}
    signature |= {"index_ptr": "*i32", "offsets_ptr": "*i32", "segments": "i32", "slots": "i32"}
    signature |= STEPS | {"programs": "i32", "rows": "i32", "g_step": "i32"}
    constants = {"order_ptr": None, "G_ALIGN": align, "X_ALIGN": align, "SCALE_ALIGN": align}
    constants |= {"S": tile.segments, "R": tile.rows, "C": tile.columns, "T": tile.short}
    constants |= {"P": tile.piece, "WIDTH": width}
    if not shifted:
        for name in ("d_shift_ptr", "plain_ptr"):
            del signature[name]
            constants[name] = None
    return compile_for(
        product_gradients_kernel, signature, constants, target, num_warps=tile.num_warps
    )


def check(built, registers):
    assert built.spills == 0
    assert built.registers <= registers
    assert built.fits


@pytest.mark.parametrize(
    ("dtype", "width", "coarse", "shifted"),
    [("fp16", 512, "fp16", True), ("bf16", 64, "fp32", False), ("fp32", 433, "fp32", True)],
)
def test_forward_on_hopper(dtype, width, coarse, shifted):
    built = compile_forward("sm_90", dtype, width, coarse, shifted)
    check(built, 128)
    if width % 8 == 0:
        assert built.widest_load == built.widest_store == 128


@pytest.mark.parametrize(
    ("dtype", "width", "shifted"), [("fp16", 512, True), ("fp32", 64, False), ("bf16", 433, False)]
)
def test_gradients_on_hopper(dtype, width, shifted):
    built = compile_gradients("sm_90", dtype, width, shifted)
    check(built, 168)
    if width % 8 == 0:
        assert built.widest_load == built.widest_store == 128


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"sm_90"}))
def test_elsewhere(target):
    check(compile_forward(target, "fp16", 512, "fp16", True), 168)
    check(compile_gradients(target, "fp16", 512, True), 255)


def test_row_counts_compile_nothing():
    """Sizes 1, 16 and between: the values that Triton would specialise a kernel for."""
    with compile_only("sm_90") as compiled:
        for seed, counts in enumerate([[3], [1], [16], [5, 3], [4] * 16, [0], [1500, 1548]]):
            tree = BroadcastTree.from_counts({"item": counts}, root="user")
            route = tree.route("item", "user")
            x, y = torch.randn(sum(counts), 48), torch.randn(len(counts), 48)
            triton_kernel.forward(x, y, y, route, x.dtype)
            triton_kernel.backward(x, x, y, route, [x.dtype] * 3, [True] * 3)
            if seed == 0:  # the smallest batch compiles what the largest one needs
                first = list(compiled)
    assert len(first) == 3
    assert compiled == first
