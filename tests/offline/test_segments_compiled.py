"""What the segment kernels compile to on GPUs that this machine does not have."""

import pytest
from offline.compiling import TARGETS, compile_for

from ikbo_tree.kernels.broadcast.triton_kernel import gather_kernel
from ikbo_tree.kernels.common.config import row_tile, segment_tile
from ikbo_tree.kernels.common.triton_lib import alignment
from ikbo_tree.kernels.common.triton_rows import PLANES, rows_kernel
from ikbo_tree.kernels.common.triton_segments import combine_kernel, reduce_kernel

BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
MAPS = {"index_ptr": "*i32", "offsets_ptr": "*i32"}
SIZES = {"segments": "i32", "slots": "i32"}
ROUTED = {"programs": "i32", "rows": "i32", "x_step": "i32", "g_step": "i32"}

REDUCE = [
    ("fp16", 64, "sum"),
    ("bf16", 256, "max"),
    ("fp32", 1, "logsumexp"),
    ("fp16", 433, "mean"),
]
ROWS = [("bf16", 64, "softmax_grad"), ("fp32", 1, "softmax"), ("fp16", 3, "ties")]


def tile_of(dtype, width):
    tile = segment_tile(width, BYTES[dtype])
    sizes = {"S": tile.segments, "R": tile.rows, "C": tile.columns}
    return tile, sizes | {"T": tile.short, "P": tile.piece, "WIDTH": width}


def compile_reduce(target, dtype, width, op):
    tile, sizes = tile_of(dtype, width)
    pointers = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "partial_ptr": "*fp32"}
    constants = {"order_ptr": None, "live_ptr": None, "X_ALIGN": alignment(width), "OP": op}
    constants["PLANES"] = 2 if op == "logsumexp" else 1
    signature = pointers | MAPS | SIZES | {"programs": "i32", "x_step": "i32"}
    return compile_for(
        reduce_kernel, signature, constants | sizes, target, num_warps=tile.num_warps
    )


def compile_rows(target, dtype, width, op):
    tile, sizes = tile_of(dtype, width)
    constants = {"order_ptr": None, "OP": op, "PLANES": PLANES[op], "AFTER": False}
    constants |= {"X_ALIGN": alignment(width), "G_ALIGN": alignment(width)}
    signature = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "partial_ptr": "*fp32"}
    wanted = {"softmax_grad": ["g_ptr"], "ties": ["extreme_ptr", "share_ptr"]}.get(op, [])
    for name in ("g_ptr", "extreme_ptr", "share_ptr"):
        if name in wanted:
            signature[name] = f"*{dtype}"
        else:
            constants[name] = None
    signature |= MAPS | SIZES | ROUTED
    return compile_for(rows_kernel, signature, constants | sizes, target, num_warps=tile.num_warps)


def compile_combine(target, op, planes):
    tile, sizes = tile_of("fp16", 64)
    constants = {"order_ptr": None, "live_ptr": None, "OP": op, "PLANES": planes}
    constants |= sizes | {"R": tile.step_rows}
    del constants["S"]
    signature = {"out_ptr": "*fp16", "partial_ptr": "*fp32", "candidates": "i32"} | MAPS | SIZES
    return compile_for(combine_kernel, signature, constants, target, num_warps=tile.num_warps)


def compile_gather(target, bits, width):
    tile = row_tile(width, bits // 8)
    signature = {"x_ptr": f"*i{bits}", "out_ptr": f"*i{bits}", "index_ptr": "*i32"}
    signature |= {"rows": "i32", "step": "i32"}
    constants = {"live_ptr": None, "ALIGN": alignment(width), "WIDTH": width}
    constants |= {"R": tile.rows, "C": tile.columns}
    return compile_for(gather_kernel, signature, constants, target, num_warps=tile.num_warps)


def check(built, registers):
    assert built.spills == 0
    assert built.registers <= registers
    assert built.fits


@pytest.mark.parametrize(("dtype", "width", "op"), REDUCE)
def test_reduce_on_hopper(dtype, width, op):
    built = compile_reduce("sm_90", dtype, width, op)
    check(built, 80)  # three blocks of eight warps or six of four fit a multiprocessor
    if width % 8 == 0:
        assert built.widest_load == 128


@pytest.mark.parametrize(("dtype", "width", "op"), ROWS)
def test_rows_on_hopper(dtype, width, op):
    built = compile_rows("sm_90", dtype, width, op)
    check(built, 128)
    if width % 8 == 0:
        assert built.widest_load == built.widest_store == 128


def test_combine_on_hopper():
    check(compile_combine("sm_90", "sum", 1), 128)
    check(compile_combine("sm_90", "logsumexp", 2), 128)


@pytest.mark.parametrize(("bits", "width"), [(16, 64), (32, 1), (64, 3)])
def test_broadcast_on_hopper(bits, width):
    built = compile_gather("sm_90", bits, width)
    check(built, 80)
    if width == 64:
        assert built.widest_load == built.widest_store == 128


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"sm_90"}))
def test_elsewhere(target):
    check(compile_reduce(target, "fp16", 64, "sum"), 128)
    check(compile_rows(target, "bf16", 64, "softmax_grad"), 168)
    check(compile_gather(target, 16, 64), 80)
