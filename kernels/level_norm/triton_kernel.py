"""The Triton path of `level_norm`: a program has whole rows, whose parts it reads where they lie.

Coarse parts come from caches: a user's are read by all of its items' programs, which run side by
side. So forward moves the finest part and the result, and nothing else that grows with the rows.
Backward reads the gradient and the finest part once for that part's gradient, the weight's and the
bias's, and the gradient's coarse columns again for the coarse parts (`triton_coarse.py`).
"""

# mypy: disable-error-code="no-untyped-def, assignment, no-redef"
# Triton's compiler knows no starred tuples.
# ruff: noqa: RUF005

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import (
    alignment,
    flat_rows,
    guard,
    live_rows,
    parents_at,
    refused,
)
from ikbo_tree.kernels.level_norm.config import LIMIT, PROGRAMS, STEPS, norm_tile
from ikbo_tree.kernels.level_norm.op import Concatenation
from ikbo_tree.kernels.level_norm.triton_coarse import coarse_gradient

PARTS = 4
"""Parts that have arguments of their own, one by one: Triton compiles for what is in a tuple, and
where maps begin changes with every batch."""

_MAPS = ["live_ptr", *(f"index{p}_ptr" for p in range(PARTS))]
_STEPS = [f"step{p}" for p in range(PARTS)]


def unsupported(device: torch.device, call: Concatenation) -> str | None:
    """Why it cannot take a call, or None."""
    if len(call.x) > PARTS:
        return f"its kernels take up to {PARTS} levels; got {len(call.x)}"
    columns = sum(norm_tile(tuple(call.widths)).columns)
    if columns > LIMIT:
        return f"a row has {columns} columns, each level's rounded up to a power of two, of {LIMIT}"
    return refused(device, *(part.dtype for part in call.x))


def forward(call: Concatenation) -> Tensor:
    """[rows, K] in the parts' dtype."""
    rows, widths = call.rows, tuple(call.widths)
    out = call.x[0].new_empty(rows, sum(widths))
    if rows == 0:
        return out
    tile = norm_tile(widths)
    operands, steps, aligned = _operands(call)
    with guard(out):
        launch(
            norm_kernel, (ceil_div(rows, 2 * tile.rows),),
            *operands, call.weight, call.bias, out, call.live, rows, *steps, call.eps,
            ALIGN=aligned, WIDTHS=widths, BEGINS=_begins(widths), COLUMNS=tile.columns,
            CENTRED=call.centred, R=2 * tile.rows, num_warps=tile.num_warps,
        )  # fmt: skip
    return out


def backward(grad: Tensor, call: Concatenation, wants: Sequence[bool]) -> list[Tensor]:
    """The wanted gradients of each x, the weight and the bias."""
    rows, widths, n = call.rows, tuple(call.widths), len(call.x)
    total = sum(widths)
    if rows == 0:
        shapes = [*(part.shape for part in call.x), (total,), (total,)]
        return [grad.new_zeros(shape) for shape, want in zip(shapes, wants, strict=True) if want]
    grad = flat_rows(grad, total)
    coarse = any(
        want and route is not None for want, route in zip(wants[:n], call.routes, strict=True)
    )
    made: list[Tensor | None] = [
        torch.empty_like(part, memory_format=torch.contiguous_format)
        if want and route is None
        else None
        for part, route, want in zip(call.x, call.routes, wants[:n], strict=True)
    ]
    numbers = grad.new_empty((4, rows), dtype=torch.float32) if coarse else None
    sums = _row_gradients(grad, call, made, numbers, wants[n:])
    for at, (part, route) in enumerate(zip(call.x, call.routes, strict=True)):
        columns = slice(_begins(widths)[at], _begins(widths)[at + 1])
        if wants[at] and route is not None:
            assert numbers is not None
            weight = None if call.weight is None else call.weight[columns]
            made[at] = coarse_gradient(grad[:, columns], part, weight, numbers, route, call.centred)
    found = [dx for dx in made if dx is not None]
    return [*found, *(part.sum(0).to(grad.dtype) for part in sums if part is not None)]


def _row_gradients(
    grad: Tensor,
    call: Concatenation,
    made: Sequence[Tensor | None],
    numbers: Tensor | None,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Writes the gradients of parts at the result's rows; returns partial ones [.., K] of weights.

    Args:
        grad: [rows, K].
        call: what was normalised.
        made: for each part its gradient, or None.
        numbers: [4, rows], what coarse parts need of each row; or None.
        wants: those of the weight and the bias.
    """
    rows, widths = call.rows, tuple(call.widths)
    tile = norm_tile(widths)
    programs = min(PROGRAMS, ceil_div(rows, tile.rows * STEPS))
    sums = [
        grad.new_empty((programs, sum(widths)), dtype=torch.float32) if want else None
        for want in wants
    ]
    operands, steps, aligned = _operands(call)
    align = alignment(grad.stride(0))
    with guard(grad):
        launch(
            norm_gradients_kernel, (programs,),
            *operands, call.weight, grad, *made, *[None] * (PARTS - len(made)), numbers, *sums,
            call.live, rows, *steps, grad.stride(0) // align, call.eps,
            ALIGN=aligned, G_ALIGN=align, WIDTHS=widths, BEGINS=_begins(widths),
            COLUMNS=tile.columns, CENTRED=call.centred, R=tile.rows, num_warps=tile.num_warps,
        )  # fmt: skip
    return sums


@functools.cache
def _begins(widths: tuple[int, ...]) -> tuple[int, ...]:
    """The first column of each part, and one beyond the last."""
    return tuple(itertools.accumulate(widths, initial=0))


def _operands(call: Concatenation) -> tuple[list[Tensor | None], list[int], tuple[int, ...]]:
    """Parts and maps as arguments, and row strides over what they are multiples of."""
    spare = PARTS - len(call.x)
    parts = [flat_rows(part, part.shape[1]) for part in call.x]
    aligned = tuple(alignment(part.stride(0)) for part in parts)
    steps = [part.stride(0) // align for part, align in zip(parts, aligned, strict=True)]
    index = [None if route is None else route.index for route in call.routes]
    return [*parts, *[None] * spare, *index, *[None] * spare], [*steps, *[0] * spare], aligned


@triton.jit
def _load(
    x_ptr, index_ptr, row, live, step, ALIGN: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr
):
    """[R, C] float32 rows of a part; zeros beyond its width and in dead rows."""
    cols = tl.arange(0, C)
    at = parents_at(index_ptr, row, live)[:, None] * (step.to(tl.int64) * ALIGN) + cols[None, :]
    mask = live[:, None] & (cols < WIDTH)[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _vector(ptr, begin, default, WIDTH: tl.constexpr, C: tl.constexpr):
    """[1, C] float32 part of the weight or bias; `default` without one."""
    cols = tl.arange(0, C)
    if ptr is None:
        value = tl.full([C], default, tl.float32)
    else:
        value = tl.load(ptr + begin + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    return value[None, :]


@triton.jit
def _centred(x, mean, WIDTH: tl.constexpr, C: tl.constexpr):
    """`x` less the mean, still zero beyond its width."""
    return tl.where((tl.arange(0, C) < WIDTH)[None, :], x - mean[:, None], 0.0)


@triton.jit
def _zeros(R: tl.constexpr, C: tl.constexpr):
    return tl.zeros([R, C], tl.float32)


@triton.jit
def _normalised_rows(
    x, index, steps, row, live, eps, ALIGN, WIDTHS, COLUMNS, CENTRED: tl.constexpr, R: tl.constexpr
):
    """The normalised parts [R, C_p] of R rows; and [R] the mean and the reciprocal deviation."""
    width = 0
    parts = ()
    total = tl.zeros([R], tl.float32)
    for p in tl.static_range(len(WIDTHS)):
        part = _load(x[p], index[p], row, live, steps[p], ALIGN[p], WIDTHS[p], COLUMNS[p])
        parts = parts + (part,)
        total += tl.sum(part, axis=1)
        width += WIDTHS[p]
    mean = tl.zeros([R], tl.float32)
    centred = ()
    squares = tl.zeros([R], tl.float32)
    if CENTRED:
        mean = total / width
    for p in tl.static_range(len(WIDTHS)):
        part = parts[p]
        if CENTRED:
            part = _centred(part, mean, WIDTHS[p], COLUMNS[p])
        centred = centred + (part,)
        squares += tl.sum(part * part, axis=1)
    # Of dead rows 1, so that nothing of them is infinite without an eps.
    variance = tl.where(live, squares / width + eps, 1.0)
    rstd = tl.div_rn(tl.full([R], 1.0, tl.float32), tl.sqrt_rn(variance))
    normal = ()
    for p in tl.static_range(len(WIDTHS)):
        normal = normal + (centred[p] * rstd[:, None],)
    return normal, mean, rstd


@triton.jit(do_not_specialize=["rows", *_STEPS], do_not_specialize_on_alignment=_MAPS)
def norm_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    index0_ptr,
    index1_ptr,
    index2_ptr,
    index3_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    live_ptr,
    rows,
    step0,
    step1,
    step2,
    step3,
    eps,
    ALIGN: tl.constexpr,
    WIDTHS: tl.constexpr,
    BEGINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTRED: tl.constexpr,
    R: tl.constexpr,
):
    """Writes R rows; zeros to dead ones."""
    x = (x0_ptr, x1_ptr, x2_ptr, x3_ptr)
    index = (index0_ptr, index1_ptr, index2_ptr, index3_ptr)
    steps = (step0, step1, step2, step3)
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < live_rows(live_ptr, rows)
    normal, _, _ = _normalised_rows(
        x, index, steps, row, live, eps, ALIGN, WIDTHS, COLUMNS, CENTRED, R
    )
    width: tl.constexpr = BEGINS[len(WIDTHS)]
    for p in tl.static_range(len(WIDTHS)):
        cols = tl.arange(0, COLUMNS[p])
        y = normal[p] * _vector(weight_ptr, BEGINS[p], 1.0, WIDTHS[p], COLUMNS[p])
        y += _vector(bias_ptr, BEGINS[p], 0.0, WIDTHS[p], COLUMNS[p])
        y = tl.where(live[:, None], y, 0.0).to(out_ptr.dtype.element_ty)
        mask = (row < rows)[:, None] & (cols < WIDTHS[p])[None, :]
        to = row.to(tl.int64)[:, None] * width + (BEGINS[p] + cols)[None, :]
        tl.store(out_ptr + to, y, mask=mask)


@triton.jit(do_not_specialize=["rows", "g_step", *_STEPS], do_not_specialize_on_alignment=_MAPS)
def norm_gradients_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    index0_ptr,
    index1_ptr,
    index2_ptr,
    index3_ptr,
    weight_ptr,
    g_ptr,
    dx0_ptr,
    dx1_ptr,
    dx2_ptr,
    dx3_ptr,
    numbers_ptr,
    d_weight_ptr,
    d_bias_ptr,
    live_ptr,
    rows,
    step0,
    step1,
    step2,
    step3,
    g_step,
    eps,
    ALIGN: tl.constexpr,
    G_ALIGN: tl.constexpr,
    WIDTHS: tl.constexpr,
    BEGINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTRED: tl.constexpr,
    R: tl.constexpr,
):
    """Each program takes every so many-th R rows, and keeps its own sums for weight and bias.

    With y = (x - mean) rstd, h = g weight, a = mean of h and b = mean of h y over a row, the
    gradient of x is rstd (h - a - y b). What is kept of each row for coarse parts: rstd, a, mean
    and rstd b; without a mean to take away, a and mean are 0.
    """
    x = (x0_ptr, x1_ptr, x2_ptr, x3_ptr)
    index = (index0_ptr, index1_ptr, index2_ptr, index3_ptr)
    dx = (dx0_ptr, dx1_ptr, dx2_ptr, dx3_ptr)
    steps = (step0, step1, step2, step3)
    width: tl.constexpr = BEGINS[len(WIDTHS)]
    alive = live_rows(live_ptr, rows)
    d_weight = ()
    d_bias = ()
    for p in tl.static_range(len(WIDTHS)):
        if d_weight_ptr is not None:
            d_weight = d_weight + (_zeros(R, COLUMNS[p]),)
        if d_bias_ptr is not None:
            d_bias = d_bias + (_zeros(R, COLUMNS[p]),)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = block * R + tl.arange(0, R)
        live = row < alive
        y, mean, rstd = _normalised_rows(
            x, index, steps, row, live, eps, ALIGN, WIDTHS, COLUMNS, CENTRED, R
        )
        a = tl.zeros([R], tl.float32)
        b = tl.zeros([R], tl.float32)
        weighted = ()
        new_weight = ()
        new_bias = ()
        for p in tl.static_range(len(WIDTHS)):
            g = _load(g_ptr + BEGINS[p], None, row, live, g_step, G_ALIGN, WIDTHS[p], COLUMNS[p])
            h = g * _vector(weight_ptr, BEGINS[p], 1.0, WIDTHS[p], COLUMNS[p])
            weighted = weighted + (h,)
            if CENTRED:
                a += tl.sum(h, axis=1)
            b += tl.sum(h * y[p], axis=1)
            if d_weight_ptr is not None:
                new_weight = new_weight + (d_weight[p] + g * y[p],)
            if d_bias_ptr is not None:
                new_bias = new_bias + (d_bias[p] + g,)
        d_weight, d_bias = new_weight, new_bias
        a, b = a / width, b / width
        for p in tl.static_range(len(WIDTHS)):
            if dx[p] is not None:
                cols = tl.arange(0, COLUMNS[p])
                d = rstd[:, None] * (weighted[p] - a[:, None] - y[p] * b[:, None])
                d = tl.where(live[:, None], d, 0.0).to(dx[p].dtype.element_ty)
                to = row.to(tl.int64)[:, None] * WIDTHS[p] + cols[None, :]
                mask = (row < rows)[:, None] & (cols < WIDTHS[p])[None, :]
                tl.store(dx[p] + to, d, mask=mask)
        if numbers_ptr is not None:
            at = numbers_ptr + row
            plane = rows.to(tl.int64)
            tl.store(at, rstd, mask=live)
            tl.store(at + plane, a, mask=live)
            tl.store(at + 2 * plane, mean, mask=live)
            tl.store(at + 3 * plane, rstd * b, mask=live)
    mine = tl.program_id(0).to(tl.int64) * width
    for p in tl.static_range(len(WIDTHS)):
        cols = tl.arange(0, COLUMNS[p])
        to = mine + BEGINS[p] + cols
        if d_weight_ptr is not None:
            tl.store(d_weight_ptr + to, tl.sum(d_weight[p], axis=0), mask=cols < WIDTHS[p])
        if d_bias_ptr is not None:
            tl.store(d_bias_ptr + to, tl.sum(d_bias[p], axis=0), mask=cols < WIDTHS[p])
