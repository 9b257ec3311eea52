"""What ops that are compositions of tree ops check of their operands at the public edge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError, UnsupportedError
from ikbo_tree.kernels.common import dispatch
from ikbo_tree.ops.memories import FLOATS, shape_of
from ikbo_tree.tree import BroadcastTree


def in_force(impl: str) -> str:
    """What backward shall use too; a traced program reads the context when it runs."""
    return impl if torch.compiler.is_compiling() else dispatch.in_force(impl)


def check_plain(impl: str, op: str) -> None:
    """Raises an UnsupportedError where a kernel is asked for and plain torch alone would run."""
    if in_force(impl) not in ("auto", "reference", "torch"):
        raise UnsupportedError(in_force(impl), op, "it has no such implementation")


def check_float(argument: str, x: Tensor) -> None:
    """Raises a TypeError unless `x` is of a dtype that ops calculate with."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{argument} must be float64, float32, float16 or bfloat16; got {x.dtype}")


def check_rows(argument: str, x: Tensor, like: Tensor, tree: BroadcastTree, name: str) -> None:
    """Raises unless `x` is a float tensor like `like` with the rows of a level or table."""
    check_float(argument, x)
    if x.dtype != like.dtype:
        raise TypeError(f"{argument} must be {like.dtype} like the first operand; got {x.dtype}")
    tree.check(argument, x, name)


def check_trailing(argument: str, tensors: Sequence[Tensor]) -> None:
    """Raises a TreeError unless all dims but the first broadcast, in as many dims."""
    sizes = list(tensors[0].shape[1:])
    for x in tensors[1:]:
        fits = x.dim() == len(sizes) + 1 and all(
            size == other or size == 1 or other == 1
            for size, other in zip(sizes, x.shape[1:], strict=True)
        )
        if not fits:
            rule = f"must broadcast with {sizes} beyond dim 0, in as many dims"
            raise TreeError(argument, rule, shape_of(x))
        sizes = [
            other if size == 1 else size for size, other in zip(sizes, x.shape[1:], strict=True)
        ]
