"""What the kernels of layer_norm and rms_norm compile to on GPUs that are not here."""

import itertools

import pytest
import torch
from offline.compiling import TARGETS, compile_for, compile_only

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.config import segment_tile
from ikbo_tree.kernels.common.triton_lib import alignment
from ikbo_tree.kernels.level_norm import triton_kernel
from ikbo_tree.kernels.level_norm.config import norm_tile
from ikbo_tree.kernels.level_norm.op import Concatenation
from ikbo_tree.kernels.level_norm.triton_coarse import coarse_gradient_kernel
from ikbo_tree.kernels.level_norm.triton_kernel import norm_gradients_kernel, norm_kernel


def whole_rows(dtype, widths, centred):
    """Signature and constants that both kernels share: the last part is the items' own."""
    n = len(widths)
    signature = {f"x{p}_ptr": f"*{dtype}" for p in range(n)}
    signature |= {f"index{p}_ptr": "*i32" for p in range(n - 1)}
    signature |= {f"step{p}": "i32" for p in range(4)} | {"rows": "i32", "eps": "fp32"}
    signature["weight_ptr"] = f"*{dtype}"
    absent = [f"x{p}_ptr" for p in range(n, 4)] + [f"index{p}_ptr" for p in range(n - 1, 4)]
    tile = norm_tile(widths)
    constants = dict.fromkeys([*absent, "live_ptr"]) | {"CENTRED": centred, "WIDTHS": widths}
    constants |= {"ALIGN": tuple(alignment(k) for k in widths), "COLUMNS": tile.columns}
    constants["BEGINS"] = tuple(itertools.accumulate(widths, initial=0))
    return signature, constants, tile


def compile_forward(target, dtype, widths, centred):
    signature, constants, tile = whole_rows(dtype, widths, centred)
    signature["out_ptr"] = f"*{dtype}"
    constants["R"] = 2 * tile.rows
    if centred:
        signature["bias_ptr"] = f"*{dtype}"
    else:
        constants["bias_ptr"] = None
    return compile_for(norm_kernel, signature, constants, target, num_warps=tile.num_warps)


def compile_gradients(target, dtype, widths, centred):
    signature, constants, tile = whole_rows(dtype, widths, centred)
    own = len(widths) - 1
    signature |= {"g_ptr": f"*{dtype}", f"dx{own}_ptr": f"*{dtype}", "g_step": "i32"}
    signature |= {"numbers_ptr": "*fp32", "d_weight_ptr": "*fp32"}
    constants |= dict.fromkeys(f"dx{p}_ptr" for p in range(4) if p != own)
    constants |= {"G_ALIGN": alignment(sum(widths)), "R": tile.rows}
    if centred:
        signature["d_bias_ptr"] = "*fp32"
    else:
        constants["d_bias_ptr"] = None
    return compile_for(
        norm_gradients_kernel, signature, constants, target, num_warps=tile.num_warps
    )


def compile_coarse(target, dtype, width, centred):
    tile, align = segment_tile(width, 4), alignment(width)
    signature = dict.fromkeys(("g_ptr", "x_ptr", "weight_ptr", "dx_ptr"), f"*{dtype}")
    signature |= {"numbers_ptr": "*fp32", "partial_ptr": "*fp32"}
    signature |= {"index_ptr": "*i32", "offsets_ptr": "*i32", "segments": "i32", "slots": "i32"}
    signature |= dict.fromkeys(("programs", "rows", "g_step", "x_step"), "i32")
    constants = {"order_ptr": None, "G_ALIGN": align, "X_ALIGN": align, "CENTRED": centred}
    constants |= {"S": tile.segments, "R": tile.rows, "C": tile.columns, "T": tile.short}
    constants |= {"P": tile.piece, "WIDTH": width}
    return compile_for(
        coarse_gradient_kernel, signature, constants, target, num_warps=tile.num_warps
    )


def check(built, registers):
    assert built.spills == 0
    assert built.registers <= registers
    assert built.fits


WIDTHS = [("fp16", (256, 256)), ("bf16", (64, 32, 128)), ("fp32", (433, 20)), ("bf16", (4096, 64))]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("dtype", "widths"), WIDTHS)
def test_whole_rows_on_hopper(dtype, widths, centred):
    for built in (
        compile_forward("sm_90", dtype, widths, centred),
        compile_gradients("sm_90", dtype, widths, centred),
    ):
        check(built, 128)
        if widths[0] % 8 == 0:
            assert built.widest_load == built.widest_store == 128


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [("fp16", 512), ("fp32", 64), ("bf16", 433)])
def test_coarse_parts_on_hopper(dtype, width, centred):
    built = compile_coarse("sm_90", dtype, width, centred)
    check(built, 168)
    if width % 8 == 0:
        assert built.widest_load == 128


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"sm_90"}))
def test_elsewhere(target):
    check(compile_forward(target, "fp16", (256, 256), True), 168)
    check(compile_gradients(target, "fp16", (256, 256), True), 255)
    check(compile_coarse(target, "fp16", 256, True), 255)


def test_row_counts_compile_nothing():
    """Sizes 1, 16 and between: the values that Triton would specialise a kernel for."""
    weight = torch.ones(72)
    with compile_only("sm_90") as compiled:
        for seed, counts in enumerate([[3], [1], [16], [5, 3], [4] * 16, [1500, 1548]]):
            tree = BroadcastTree.from_counts({"item": counts}, root="user")
            x = [torch.randn(len(counts), 24), torch.randn(sum(counts), 48)]
            routes = [tree.route("item", "user"), None]
            call = Concatenation(x, routes, weight, weight, None, 1e-5, True)
            out = triton_kernel.forward(call)
            triton_kernel.backward(out, call, [True] * 4)
            if seed == 0:  # the smallest batch compiles what the largest one needs
                first = list(compiled)
    assert len(first) == 4
    assert compiled == first
