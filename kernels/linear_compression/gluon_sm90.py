"""The Hopper path of `linear_compression`: one persistent launch for up to four levels of a tree.

Deeper trees, and those with many side tables, take several launches: one hands its partial results
and flags to the next. Nothing waits for the device, and the host knows allocated sizes only; a
captured graph serves every smaller tree. The counters and flags of a call are one buffer, which the
launch that also copies weights to aligned rows clears (`gluon_prepare`).

Backward is that of the Triton module, until the same machinery serves it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.kernels.common.gemm_forms import architecture, multiprocessors
from ikbo_tree.kernels.common.gluon_lib import described
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import guard
from ikbo_tree.kernels.linear_compression import op, triton_kernel
from ikbo_tree.kernels.linear_compression.gluon_config import BK, Tile, choose, partial_type
from ikbo_tree.kernels.linear_compression.gluon_form import Form
from ikbo_tree.kernels.linear_compression.gluon_kernel import stages_kernel
from ikbo_tree.kernels.linear_compression.gluon_prepare import prepare
from ikbo_tree.kernels.linear_compression.gluon_schedule import (
    EDGES,
    JOIN,
    LEVELS,
    ROWS,
    Launch,
    launches,
    tile_count,
)

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_ROW_BYTES = 16
_STRIDE_LIMIT = 2**40
_COUNTER_WORDS = 32
"""A line of memory for each launch's counter, so that flags lie in others."""


@dataclass
class _Level:
    """A stage, or a sum of some of a stage's producers.

    Attributes:
        x: [rows, K, N] or, where it adds nothing of its own, None.
        weight: [M, K], or None likewise.
        rows: allocated rows.
        live: live count.
        producers: levels that are added, each with its map; None: row to row.
    """

    x: Tensor | None
    weight: Tensor | None
    rows: int
    live: Tensor | None
    producers: list[tuple[int, Tensor | None]]

    @property
    def has_product(self) -> bool:
        """Whether there is anything to multiply."""
        return self.x is not None and self.x.numel() > 0


def unsupported(device: torch.device, x: Sequence[Tensor], *rest: object) -> str | None:
    """Why it cannot take a call, or None."""
    if device.type != "cuda":
        return f"it needs a Hopper GPU; the tensors are on {device}"
    arch = architecture(device)
    if arch != "sm_90":
        return f"it is written for Hopper (sm_90); the tensors are on {arch}"
    if x[0].dtype not in _DTYPES:
        return f"its kernels take float16 and bfloat16; got {x[0].dtype}"
    N = x[0].shape[2]
    if N * x[0].element_size() % _ROW_BYTES:
        return f"rows of N elements must be a multiple of {_ROW_BYTES} bytes; got N = {N}"
    return None


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, M, N] of the last stage."""
    out = x[-1].new_empty(op.out_shape(x[-1], weight[-1]))
    if out.numel() == 0:
        return out
    dtype = partial_type(partial_dtype)
    tile = choose(out.shape[2], dtype.itemsize)
    with guard(out):
        _run(_levels(x, weight, stages), out, tile, dtype)
    return out


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for."""
    return triton_kernel.backward(grad, x, weight, stages, wants)


def _levels(x: Sequence[Tensor], weight: Sequence[Tensor], stages: Stages) -> list[_Level]:
    """The stages as levels of at most `JOIN` producers each, in an order that launches can take."""
    levels: list[_Level] = []
    number: dict[int, int] = {}
    for stage, (value, w) in enumerate(zip(x, weight, strict=True)):
        rows, live = value.shape[0], stages.live_of(stage)
        producers: list[tuple[int, Tensor | None]] = [
            (number[p], stages.index[p]) for p in stages.producers(stage)
        ]
        while len(producers) > JOIN:
            levels.append(_Level(None, None, rows, live, producers[:JOIN]))
            producers = [(len(levels) - 1, None), *producers[JOIN:]]
        number[stage] = len(levels)
        levels.append(_Level(value, w, rows, live, producers))
    return levels


def _run(levels: list[_Level], out: Tensor, tile: Tile, dtype: torch.dtype) -> None:
    """Launches all levels."""
    _, M, N = out.shape
    row_blocks, column_blocks = ceil_div(M, ROWS), ceil_div(N, tile.BN)
    first_rows = [0]
    for level in levels[:-1]:
        first_rows.append(first_rows[-1] + level.rows)
    all_rows = first_rows[-1]
    plan = launches([[p for p, _ in level.producers] for level in levels])
    partial = torch.empty(
        (all_rows * column_blocks * (-(-M // 16) * 16), tile.BN), dtype=dtype, device=out.device
    )
    counters = len(plan) * _COUNTER_WORDS
    work = torch.empty(
        counters + all_rows * row_blocks * column_blocks, dtype=torch.int32, device=out.device
    )
    _prepare(levels, work)
    for i, part in enumerate(plan):
        here = levels[part.first : part.first + part.levels]
        tiles = tile_count(sum(level.rows for level in here), row_blocks, column_blocks)
        if tiles == 0:
            continue
        if tiles * 2 >= 2**31:
            reason = f"a launch takes less than 2^30 tiles of 128 rows of M; these are {tiles}"
            raise UnsupportedError("gluon", "linear_compression", reason)
        final = part.first + part.levels == len(levels)
        slots = multiprocessors(out.device)
        launch(
            stages_kernel,
            (min(slots, tiles),),
            *_operands(here, out, tile),
            _result_descriptor(out, tile) if final else None,
            partial,
            work[i * _COUNTER_WORDS :],
            work[counters:],
            *_padded([here[e.slot].producers[e.turn][1] for e in part.edges], EDGES),
            *_padded([level.live for level in here], LEVELS),
            *_padded([level.rows for level in here], LEVELS, 0),
            *_padded([_steps(level) for level in here], LEVELS, 0),
            *_padded(first_rows[part.first : part.first + part.levels], LEVELS, 0),
            *_padded([first_rows[e.producer] for e in part.edges], EDGES, 0),
            M,
            slots // ((row_blocks + 1) // 2) if tile.late else 0,
            FORM=_form(part, here, final, row_blocks, column_blocks, tile),
            num_warps=4,
        )  # fmt: skip


def _prepare(levels: list[_Level], work: Tensor) -> None:
    """Clears `work` and puts weights that the copy engine cannot read on aligned rows."""
    copied = [
        level
        for level in levels
        if level.weight is not None and level.has_product and not _describable(level.weight)
    ]
    copies = prepare(work, [level.weight for level in copied if level.weight is not None])
    for level, weight in zip(copied, copies, strict=True):
        level.weight = weight


def _form(
    part: Launch,
    here: list[_Level],
    final: bool,
    row_blocks: int,
    column_blocks: int,
    tile: Tile,
) -> Form:
    rests = [(_width(level) - (_steps(level) - 1) * BK + 15) // 16 * 16 for level in here]
    return Form(
        part.levels,
        part.levels - 1 if final else -1,
        tuple((e.slot, e.turn) for e in part.edges),
        max((e.turn + 1 for e in part.edges), default=0),
        row_blocks,
        column_blocks,
        max(16, *rests),
        tile.BN,
        tile.stages,
        tile.prefetch,
        tile.outstanding,
        tile.keep,
        tile.ahead,
        tile.behind,
        tile.branch,
        tile.consumer_registers,
        tile.producer_registers,
    )


def _padded(values: Sequence[Any], length: int, value: Any = None) -> list[Any]:
    return [*values, *[value] * (length - len(values))]


def _width(level: _Level) -> int:
    return 0 if level.x is None else level.x.shape[1]


def _steps(level: _Level) -> int:
    """Over K. Two at least, since the kernel's pipeline has a first and a last; zeros are free."""
    return max(2, -(-_width(level) // BK))


def _operands(levels: list[_Level], out: Tensor, tile: Tile) -> list[TensorDescriptor | None]:
    """W and E of each level."""
    found: list[TensorDescriptor | None] = []
    for level in levels:
        if level.x is None or level.weight is None or not level.has_product:
            # Nothing to multiply: all that lies outside of these is zero, and so are they.
            found += [
                _weight_descriptor(out.new_zeros((1, 8))),
                _input_descriptor(out.new_zeros((1, 1, out.shape[2])), tile),
            ]
        else:
            found += [_weight_descriptor(level.weight), _input_descriptor(level.x, tile)]
    return _padded(found, 2 * LEVELS)


def _weight_descriptor(weight: Tensor) -> TensorDescriptor:
    """Of W [M, K], in rows of a multiple of 16 bytes."""
    M, K = weight.shape
    step = weight.stride(0) if M > 1 else -(-K // 8) * 8
    return described(weight, [M, K], [step, 1], [ROWS, BK], _layout(128, 2))


def _input_descriptor(x: Tensor, tile: Tile) -> TensorDescriptor:
    """Of E [rows, K, N], copied where its rows are not contiguous and aligned."""
    rows, K, N = x.shape
    if not _describable(x):
        x = x.clone(memory_format=torch.contiguous_format)
    inner = x.stride(1) if K > 1 else N
    outer = x.stride(0) if rows > 1 else K * inner
    return described(
        x, list(x.shape), [outer, inner, 1], [1, BK, tile.BN], _layout(min(128, tile.BN), 3)
    )


def _result_descriptor(out: Tensor, tile: Tile) -> TensorDescriptor:
    piece = min(64, tile.BN // 2)
    layout = _layout(2 * piece, 3)
    return described(out, list(out.shape), list(out.stride()), [1, ROWS, piece], layout)


@functools.cache
def _layout(swizzle: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=rank)


def _describable(data: Tensor) -> bool:
    """Whether the copy engine can read it where it is."""
    if data.data_ptr() % _ROW_BYTES or data.stride(-1) != 1:
        return False
    for size, stride in zip(data.shape[:-1], data.stride()[:-1], strict=True):
        step = stride * data.element_size()
        if size > 1 and (step % _ROW_BYTES or not 0 < step < _STRIDE_LIMIT):
            return False
    return True
