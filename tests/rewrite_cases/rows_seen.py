"""Which ops ran with how many rows, seen by PyTorch's dispatcher and by nothing of the rewrite.

On a tree whose row counts are primes that divide no product of a model's widths (`trees.DISTINCT`),
a dimension's size tells the level it belongs to, even where rows and heads are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewrite_cases.case import Case

# Names of one op: composite and native, eager and decomposed.
SYNONYMS = {
    "linalg_vector_norm": "norm",
    "native_layer_norm": "layer_norm",
    "fused_rms_norm": "rms_norm",
    "native_batch_norm_legit_no_training": "batch_norm",
    "native_group_norm": "group_norm",
    "safe_softmax": "softmax",
    "square": "pow",
    "adaptive_avg_pool1d": "avg_pool1d",
    "concat": "cat",
    "concatenate": "cat",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "negative": "neg",
    "log_sigmoid_forward": "log_sigmoid",
    "prelu_kernel": "prelu",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "rshift": "bitwise_right_shift",
    "clip": "clamp",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "max_pool1d_with_indices": "max_pool1d",
    "to": "to_copy",
}

# Ops that do one another's work: a rewrite may choose among them.
FAMILIES = (
    frozenset({"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum", "mv", "tensordot"}),
    frozenset({"scaled_dot_product_attention", "target_attention", "self_target_attention"}),
    frozenset({"norm", "layer_norm", "rms_norm"}),
)

# Ops that move or make values and compute none.
_MOVES = """alias arange as_strided broadcast broadcast_to cat chunk clone column_stack contiguous
detach empty empty_like expand expand_as eye flatten full full_like gather hsplit hstack index
index_select lift_fresh lift_fresh_copy movedim narrow new_empty new_full new_ones new_zeros ones
ones_like permute repeat repeat_interleave reshape select slice split split_with_sizes squeeze stack
swapaxes sym_size t take_along_dim tile to_copy transpose tril_indices triu_indices type_as unbind
unflatten unsafe_view unsqueeze view view_as vstack zeros zeros_like"""
MOVES = frozenset(_MOVES.split())

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of an op: its plain name, and the shapes of the tensors it took and gave."""

    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    floating: bool


class RowsSeen(TorchDispatchMode):
    """Records every call of an op while it is active.

    Under `torch.inference_mode`, where composite ops reach the dispatcher whole. An op of another
    library is one call, whatever it does inside; only `ikbo_tree::linear` is a call a level.

    Args:
        rows: rows of every level, coarse first.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        super().__init__()
        self.rows = dict(rows)
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        op = plain(name.partition(".")[0])
        took = _tensors((args, kwargs))
        if namespace == "ikbo_tree" and op in ("linear", "linear_compression"):
            # One call, but a product a level: x[l] times weight[l], the last one giving the result.
            parts = [_tensors(part) for part in zip(args[0], args[1], strict=True)]
            for part in parts[:-1]:
                self._add("linear", part, [])
            self._add("linear", parts[-1], _tensors(out))
            return out
        if op == "embedding" and self.level_of(tuple(took[0].shape)) is not None:
            op = "index"  # a gather of a level's rows, no look-up in a vocabulary
        self._add(op, took, _tensors(out))
        return out

    def _add(self, op: str, took: list[Tensor], gave: list[Tensor]) -> None:
        floating = any(x.is_floating_point() for x in gave or took)
        shapes = [tuple(tuple(x.shape) for x in tensors) for tensors in (took, gave)]
        self.calls.append(Call(op, shapes[0], shapes[1], floating))

    def level_of(self, shape: Shape) -> str | None:
        """The finest level that some dimension of `shape` holds rows of, alone or merged."""
        found = None
        for level, rows in self.rows.items():
            if any(size > 0 and size % rows == 0 for size in shape):
                found = level
        return found

    def finest(self, call: Call) -> str | None:
        """The finest level of whose rows a call saw any."""
        order = [None, *self.rows]
        levels = [self.level_of(shape) for shape in (*call.inputs, *call.outputs)]
        return max(levels, key=order.index, default=None)

    def named(self, op: str) -> list[Call]:
        """The calls of an op such as `"aten.relu"` or of one that does its work."""
        name = plain(op.removeprefix("aten."))
        if name == "*":
            return [call for call in self.calls if call.floating and call.op not in MOVES]
        names = next((family for family in FAMILIES if name in family), frozenset({name}))
        return [call for call in self.calls if call.op in names]

    def widest(self, level: str) -> float:
        """Elements per row of `level` of the largest tensor that holds rows of it."""
        rows = self.rows[level]
        return max((size / rows for size in self._sizes(level)), default=0.0)

    def _sizes(self, level: str) -> Iterator[int]:
        for call in self.calls:
            for shape in (*call.inputs, *call.outputs):
                if self.level_of(shape) == level:
                    yield torch.Size(shape).numel()


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def plain(name: str) -> str:
    """An op's name without the marks of in-place and private forms; one of several synonyms."""
    name = name.strip("_")
    return SYNONYMS.get(name, name)


def unmet(case: Case, seen: RowsSeen) -> list[str]:
    """What a case asks of row counts and `seen` does not show, a sentence each."""
    order = [None, *seen.rows]
    fine = order[-1]
    assert fine is not None
    missing = []
    for asked in case.sunk or ():
        op, level = _level(asked)
        found = [seen.finest(call) for call in seen.named(op)]
        if level not in found:
            missing.append(f"{op} never ran at {level} alone, but at {found}")
        elif any(order.index(at) > order.index(level) for at in found):
            missing.append(f"{op} ran at {found}, not only at {level}")
    for asked in case.split:
        op, level = _level(asked)
        found = [seen.finest(call) for call in seen.named(op)]
        if level not in found:
            missing.append(f"no part of {op} ran at {level} alone, but at {found}")
    for op in case.kept:
        found = [seen.finest(call) for call in seen.named(op)]
        if fine not in found:
            missing.append(f"{op} never saw rows of {fine}, but those of {found}")
    if case.limit is not None and seen.widest(fine) > case.limit:
        widest = seen.widest(fine)
        missing.append(f"a tensor holds {widest:g} elements a row of {fine}, not {case.limit}")
    return missing


def _level(asked: str) -> tuple[str, str]:
    op, _, level = asked.partition("@")
    return op, level or "user"
