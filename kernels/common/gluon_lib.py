"""What Hopper kernels in Gluon share: names that moved, tickets, flags between programs.

A persistent kernel takes its tiles by number from a counter in memory, so that a tile is always in
the hands of a program that runs; and tiles tell each other through flags in memory that their
results can be read. Both live in int32 words that are zero when the kernel starts.

    writer                                 reader
    every thread stores its results        spins on `load_acquire(flag)`, in every thread
    cta_sync()                             reads the results
    atomic_add(flag, sem="release")        (flag_is_up, then an mbarrier: for other warps, too)

The barrier orders the stores of a warpgroup's threads before the one thread's release at the scope
of the device; release and acquire are cumulative, as are the arrivals and waits of mbarriers.
Results are stored and read by ordinary instructions: the copy engine would need proxy fences.
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ikbo_tree.kernels.common.triton_launch import defaults

# Names of Triton 3.6, and what replaced them by 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cta_sync = getattr(gl, "barrier", None) or gl.thread_barrier


_DEFAULTS = defaults(TensorDescriptor)


def described(
    base: Tensor,
    shape: list[int],
    strides: list[int],
    block_shape: list[int],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    """A descriptor, without the checks that its constructor makes in every call.

    Args:
        base: begins at a multiple of 16 bytes.
        shape: of the tensor, up to five dims.
        strides: multiples of 16 bytes; the last is 1.
        block_shape: powers of two; the last dim has 16 bytes or more.
        layout: of a block in shared memory.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = base, shape, strides, block_shape
    made.layout = layout
    vars(made).update(_DEFAULTS)
    return made


_CLAIM = gl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.b32 $0, 0;
@first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}""")


@gluon.jit
def claim(counter_ptr):
    """Asks for the next ticket: adds one to the counter. Called by a partition of one warp.

    Nothing waits for the answer yet, which only one lane gets: pass it to `ticket`.
    """
    return gl.inline_asm_elementwise(
        _CLAIM, "=&r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def first_lane(value):
    """The first lane's value of an int32, in every lane; to the compilers a value of its own."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def ticket(claimed):
    """The ticket that `claim` asked for, in every lane."""
    return first_lane(claimed)


@gluon.jit
def load_acquire(flag_ptr):
    """A word of memory; what its writer released with it can be read after this."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [flag_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_flag(flag_ptr, value):
    """Waits until the flag has reached the value."""
    while load_acquire(flag_ptr) < value:
        pass
