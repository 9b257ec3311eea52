"""The Hopper path of `linear`: one persistent launch for up to four levels of a tree.

Deeper trees, and those with many side tables, take several launches: one hands its partial results
to the next. Nothing waits for the device, and the host knows allocated sizes only; a captured graph
serves every smaller tree. Weights and inputs whose rows the copy engine cannot read, because their
stride is no multiple of 16 bytes, are copied to such rows: of an input that costs reading and
writing it once, a fraction of what element-wise loads cost the product.

Backward is that of the Triton module.
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
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import INTERPRETED, alignment, guard
from ikbo_tree.kernels.linear import op, triton_kernel
from ikbo_tree.kernels.linear.gluon_config import BK, PIECE, Form, Tile, choose
from ikbo_tree.kernels.linear.gluon_kernel import stages_kernel
from ikbo_tree.kernels.linear.gluon_producer import LINE
from ikbo_tree.kernels.linear.gluon_schedule import ROWS, tile_count
from ikbo_tree.kernels.linear_compression.gluon_prepare import prepare
from ikbo_tree.kernels.linear_compression.gluon_schedule import (
    EDGES,
    JOIN,
    LEVELS,
    Launch,
    launches,
)

_DTYPES = (torch.float16, torch.bfloat16)
_ROW_BYTES = 16
_STRIDE_LIMIT = 2**40
_ROW_LIMIT = 2**31 - 2 * ROWS

backward = triton_kernel.backward


@dataclass
class _Level:
    """A stage, or a sum of some of a stage's producers.

    Attributes:
        x: [rows, K] or, where it adds nothing of its own, None.
        weight: [N, K], or None likewise.
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

    @property
    def width(self) -> int:
        """K."""
        return 0 if self.x is None else self.x.shape[1]

    @property
    def steps(self) -> int:
        """Over K. Two at least, as the kernel's pipeline has a first and a last; zeros are free."""
        return max(2, -(-self.width // BK))


def unsupported(device: torch.device, x: Sequence[Tensor], *rest: object) -> str | None:
    """Why it cannot take a call, or None."""
    if device.type != "cuda" or INTERPRETED:
        return f"it needs a Hopper GPU; the tensors are on {device}"
    arch = architecture(device)
    if arch != "sm_90":
        return f"it is written for Hopper (sm_90); the tensors are on {arch}"
    if x[0].dtype not in _DTYPES:
        return f"its kernels take float16 and bfloat16; got {x[0].dtype}"
    return None


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Tensor | None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, N] of the last stage."""
    out = x[-1].new_empty(op.out_shape(x[-1], weight[-1]))
    if out.numel() == 0:
        return out
    dtype = partial_dtype or torch.float32
    with guard(out):
        levels = _levels(x, weight, stages)
        _copy_weights(levels)
        _run(levels, bias, out, choose(out.shape[1], dtype.itemsize), dtype)
    return out


def _levels(x: Sequence[Tensor], weight: Sequence[Tensor], stages: Stages) -> list[_Level]:
    """The stages as levels of at most `JOIN` producers each, in an order that launches can take."""
    levels: list[_Level] = []
    number: dict[int, int] = {}
    for stage, (value, w) in enumerate(zip(x, weight, strict=True)):
        rows, live = value.shape[0], stages.live_of(stage)
        if rows >= _ROW_LIMIT:
            raise UnsupportedError("gluon", "linear", f"it counts rows in 32 bits; got {rows}")
        producers: list[tuple[int, Tensor | None]] = [
            (number[p], stages.index[p]) for p in stages.producers(stage)
        ]
        while len(producers) > JOIN:
            levels.append(_Level(None, None, rows, live, producers[:JOIN]))
            producers = [(len(levels) - 1, None), *producers[JOIN:]]
        number[stage] = len(levels)
        levels.append(_Level(value, w, rows, live, producers))
    return levels


def _copy_weights(levels: list[_Level]) -> None:
    """Puts weights that the copy engine cannot read on aligned rows, in one launch."""
    copied = [
        level
        for level in levels
        if level.weight is not None and level.has_product and not _describable(level.weight)
    ]
    given = [level.weight for level in copied if level.weight is not None]
    if given:
        unused = torch.empty(1, dtype=torch.int32, device=given[0].device)
        for level, weight in zip(copied, prepare(unused, given), strict=True):
            level.weight = weight


def _run(
    levels: list[_Level], bias: Tensor | None, out: Tensor, tile: Tile, dtype: torch.dtype
) -> None:
    """Launches all levels."""
    N = out.shape[1]
    column_blocks = -(-N // tile.BN)
    first_rows = [0]
    for level in levels[:-1]:
        first_rows.append(first_rows[-1] + level.rows)
    if first_rows[-1] >= _ROW_LIMIT:
        raise UnsupportedError(
            "gluon", "linear", f"it counts rows in 32 bits; got {first_rows[-1]}"
        )
    plan = launches([[p for p, _ in level.producers] for level in levels])
    partial = torch.empty((first_rows[-1], column_blocks * tile.BN), dtype=dtype, device=out.device)
    bias = None if bias is None else _whole_bias(bias)
    work = _work(out.device)
    for part in plan:
        here = levels[part.first : part.first + part.levels]
        tiles = sum(tile_count(level.rows, column_blocks) for level in here)
        if tiles == 0:
            continue
        if tiles >= 2**30:
            raise UnsupportedError("gluon", "linear", f"it takes less than 2^30 tiles; got {tiles}")
        biased = -1 if bias is None else _biased(len(levels), dtype) - part.first
        form = _form(part, here, part.first + part.levels == len(levels), biased, out, tile)
        launch(
            stages_kernel,
            (min(multiprocessors(out.device), tiles),),
            *_operands(here, out, tile),
            _result(out, form),
            bias if form.biased >= 0 else None,
            partial,
            work,
            *_padded([here[e.slot].producers[e.turn][1] for e in part.edges], EDGES),
            *_padded([level.live for level in here], LEVELS),
            *_padded([level.rows for level in here], LEVELS, 0),
            *_padded([level.steps for level in here], LEVELS, 0),
            *_padded(first_rows[part.first : part.first + part.levels], LEVELS, 0),
            *_padded([first_rows[e.producer] for e in part.edges], EDGES, 0),
            N // form.unit,
            FORM=form,
            num_warps=4,
        )  # fmt: skip


def _form(
    part: Launch, here: list[_Level], final: bool, biased: int, out: Tensor, tile: Tile
) -> Form:
    N = out.shape[1]
    rests = [(level.width - (level.steps - 1) * BK + 15) // 16 * 16 for level in here]
    return Form(
        levels=part.levels,
        result=part.levels - 1 if final else -1,
        biased=biased if 0 <= biased < part.levels else -1,
        edges=tuple((e.slot, e.turn, max(-1, e.producer - part.first)) for e in part.edges),
        join=max((e.turn + 1 for e in part.edges), default=0),
        column_blocks=-(-N // tile.BN),
        k_tail=max(16, *rests),
        described=N * out.element_size() % _ROW_BYTES == 0,
        unit=min(8, alignment(N)),
        BN=tile.BN,
        stages=tile.stages,
        prefetch=tile.prefetch,
        outstanding=tile.outstanding,
        keep=tile.keep,
        ahead=tile.ahead,
        behind=tile.behind,
        branch=tile.branch,
        consumer_registers=tile.consumer_registers,
        producer_registers=tile.producer_registers,
    )


def _biased(levels: int, dtype: torch.dtype) -> int:
    """The level that adds the bias.

    Each row of the result has one row in every level, so the first, and smallest, may add it for
    all; unless that would round it with the partial.
    """
    return 0 if dtype == torch.float32 else levels - 1


def _padded(values: Sequence[Any], length: int, value: Any = None) -> list[Any]:
    return [*values, *[value] * (length - len(values))]


_WORK: dict[tuple[torch.device, int], Tensor] = {}


def _work(device: torch.device) -> Tensor:
    """[2 + LEVELS, 32] int32 zeros that no launch at the same time uses; a launch leaves them zero.

    Launches of one stream follow each other and share them. A graph may run on any stream, so each
    call that is captured has its own, which the graph clears.
    """
    words = (2 + LEVELS, LINE.value)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _WORK:
        _WORK[key] = torch.zeros(words, dtype=torch.int32, device=device)
    return _WORK[key]


def _operands(levels: list[_Level], out: Tensor, tile: Tile) -> list[TensorDescriptor | None]:
    """Inputs and weights, of each level."""
    found: list[TensorDescriptor | None] = []
    for level in levels:
        x, weight = level.x, level.weight
        if x is None or weight is None or not level.has_product:
            # Nothing to multiply: all that lies outside of these is zero, and so are they.
            x = weight = out.new_zeros((1, 8))
        found += [_descriptor(_aligned(x), ROWS), _descriptor(weight, tile.BN)]
    return _padded(found, 2 * LEVELS)


def _aligned(x: Tensor) -> Tensor:
    """`x` [rows, K], copied where the copy engine cannot read its rows."""
    if _describable(x):
        return x
    rows, K = x.shape
    return x.new_empty((rows, -(-K // 8) * 8))[:, :K].copy_(x)


def _whole_bias(bias: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes, and a multiple of 8 elements."""
    missing = -bias.shape[0] % 8
    if missing:
        return torch.nn.functional.pad(bias, (0, missing))
    bias = bias.contiguous()
    return bias if bias.data_ptr() % _ROW_BYTES == 0 else bias.clone()


def _result(out: Tensor, form: Form) -> TensorDescriptor | Tensor | None:
    if form.result < 0:
        return None
    return _descriptor(out, ROWS) if form.described else out


@functools.cache
def _sample(dtype: torch.dtype, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor for tiles of that size, checked once."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    base = torch.empty((1, 8), dtype=dtype)
    return TensorDescriptor(base, [1, 8], [8, 1], [rows, columns], layout)


def _descriptor(data: Tensor, rows: int) -> TensorDescriptor:
    """Of [height, width] for tiles of so many rows, without the checks of every constructor call.

    Args:
        data: as `_describable` wants it.
        rows: of a tile; its columns are 128 bytes.
    """
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.__dict__.update(_sample(data.dtype, rows, PIECE).__dict__)
    height, width = data.shape
    # What a dimension of one entry has for a stride may be no multiple of 16 bytes.
    pitch = data.stride(0) if height > 1 else -(-width // 8) * 8
    made.base, made.shape, made.strides = data, [height, width], [pitch, 1]
    return made


def _describable(data: Tensor) -> bool:
    """Whether the copy engine can read or write the rows of [height, width] where they are."""
    if data.data_ptr() % _ROW_BYTES or (data.stride(1) != 1 and data.shape[1] > 1):
        return False
    step = data.stride(0) * data.element_size()
    return data.shape[0] == 1 or (step % _ROW_BYTES == 0 and 0 < step < _STRIDE_LIMIT)
