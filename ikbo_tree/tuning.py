"""Which tiles of the Triton kernels are fastest for given widths on the present GPU.

Never on the call path: `ikbo-tree tune` runs this once and writes a file that later processes read
(`kernels.common.tuned`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import tuned
from ikbo_tree.kernels.common.gemm_config import Choice
from ikbo_tree.kernels.common.gemm_forms import Tile as GemmTile
from ikbo_tree.kernels.common.gemm_forms import architecture, power_of_two
from ikbo_tree.kernels.linear import config as linear_config
from ikbo_tree.kernels.linear_compression import config as lce_config
from ikbo_tree.kernels.target_attention import config as attention_config
from ikbo_tree.ops import linear, linear_compression, target_attention
from ikbo_tree.tree import BroadcastTree

Measure = Callable[[Callable[[], object]], float]
"""Milliseconds of a call."""


@dataclass(frozen=True)
class Question:
    """One tile to choose.

    Attributes:
        key: of the choice, as files have it.
        frozen: the present choice.
        candidates: what else there is.
        call: runs the kernel.
    """

    key: str
    frozen: tuned.Fields
    candidates: Sequence[tuned.Fields]
    call: Callable[[], object]


@dataclass(frozen=True)
class Answer:
    """The fastest choice: its fields, its time and the frozen one's in ms, how many were tried."""

    fields: tuned.Fields
    best_ms: float
    frozen_ms: float
    tried: int


MARGIN = 0.98
"""A candidate must take less than this of the frozen tile's time: two runs differ by as much."""


def answer(question: Question, measure: Measure) -> Answer:
    """Tries all candidates; those that a GPU has no room for are left out."""
    frozen_ms = measure(question.call)
    fields, best_ms, tried = question.frozen, frozen_ms, 1
    for candidate in question.candidates:
        with tuned.override(question.key, candidate):
            try:
                ms = measure(question.call)
            except Exception as error:  # what compilers raise has no common base
                if not _no_room(error):
                    raise
                continue
        tried += 1
        if ms < best_ms * (MARGIN if fields is question.frozen else 1.0):
            fields, best_ms = candidate, ms
    return Answer(fields, best_ms, frozen_ms, tried)


def _no_room(error: Exception) -> bool:
    names = ("OutOfResources", "PTXASError", "CompilationError")
    return type(error).__name__ in names or "PassManager" in str(error)


_GEMMS = [
    GemmTile(BM, BN, BK, warps, stages, parts=parts)
    for BM, BN, warps in ((64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
    for BK in (32, 64)
    for stages in (3, 4)
    for parts in (1, 2)
]
_ATTENTION = [
    attention_config.Tile(rows, keys, warps, stages, described)
    for rows, keys in ((64, 64), (64, 128), (128, 64), (128, 128))
    for warps in (4, 8)
    for stages in (2, 3)
    for described in (True, False)
]


def _gemm_fields(choice: Choice) -> tuned.Fields:
    return dataclasses.asdict(choice)


def _gemm_candidates(frozen: Choice) -> list[tuned.Fields]:
    return [_gemm_fields(dataclasses.replace(frozen, tile=tile)) for tile in _GEMMS]


def linear_questions(
    tree: BroadcastTree, N: int, K: Sequence[int], dtype: torch.dtype
) -> Iterator[Question]:
    """Of `linear` on a tree's last levels.

    Args:
        tree: on the GPU; K has an entry for each of its last levels.
        N: output features.
        K: input features of each level.
        dtype: of everything.
    """
    levels = tree.levels[-len(K) :]
    arch = architecture(tree.device)
    x = {n: _random(tree.rows(n), k, dtype=dtype) for n, k in zip(levels, K, strict=True)}
    w = {n: _random(N, k, dtype=dtype) for n, k in zip(levels, K, strict=True)}

    def call() -> Tensor:
        return linear(x, w, tree=tree, impl="triton")

    sizes: dict[str, tuple[int, ...]] = {"forward": (N,), "partial": (N,)}
    sizes |= {"input_gradient": (K[-1],), "weight_gradient": (N, K[-1])}
    for role, given in sizes.items():
        frozen = linear_config.choose(role, arch, dtype, *given)
        key = tuned.key_of("linear", role, arch, dtype, *given)
        yield Question(key, _gemm_fields(frozen), _gemm_candidates(frozen), _run(call, role, x, w))


def linear_compression_questions(
    tree: BroadcastTree, M: int, N: int, K: Sequence[int], dtype: torch.dtype
) -> Iterator[Question]:
    """Of `linear_compression` on a tree's last levels.

    Args:
        tree: on the GPU; K has an entry for each of its last levels.
        M: rows of the weights.
        N: width of the embeddings.
        K: embeddings of each level.
        dtype: of everything.
    """
    levels = tree.levels[-len(K) :]
    arch = architecture(tree.device)
    x = {n: _random(tree.rows(n), k, N, dtype=dtype) for n, k in zip(levels, K, strict=True)}
    w = {n: _random(M, k, dtype=dtype) for n, k in zip(levels, K, strict=True)}

    def call() -> Tensor:
        return linear_compression(x, w, tree=tree, impl="triton")

    sizes = {"forward": (M, N), "partial": (M, N)}
    sizes |= {"input_gradient": (K[-1], N), "weight_gradient": (M, K[-1])}
    for role, given in sizes.items():
        frozen = lce_config.choose(role, arch, dtype, *given)
        key = tuned.key_of("linear_compression", role, arch, dtype, *given)
        yield Question(key, _gemm_fields(frozen), _gemm_candidates(frozen), _run(call, role, x, w))


def attention_questions(
    tree: BroadcastTree, n_seed: int, heads: int, dim: int, keys: int, dtype: torch.dtype
) -> Iterator[Question]:
    """Of `target_attention` from a tree's last level to its first.

    Args:
        tree: on the GPU.
        n_seed: query rows a row.
        heads: of queries and keys.
        dim: of a head.
        keys: of each root row.
        dtype: of everything.
    """
    root, last = tree.levels[0], tree.levels[-1]
    q = _random(tree.rows(last), n_seed, heads, dim, dtype=dtype)
    k, v = (_random(tree.rows(root), keys, heads, dim, dtype=dtype) for _ in range(2))
    arch, width = architecture(tree.device), max(16, power_of_two(dim))

    def call() -> Tensor:
        found = target_attention(q, {root: (k, v)}, tree=tree, level=last, impl="triton")
        assert isinstance(found, Tensor)
        return found

    config = attention_config.attention_config(arch, dtype.itemsize, width)
    few = n_seed < attention_config.FUSED_SEEDS
    for role in ("chunks" if few else "forward", "queries", "keys"):
        key = tuned.key_of("target_attention", role, arch, dtype.itemsize, width)
        candidates = [
            {"tile": dataclasses.asdict(tile)}
            for tile in _ATTENTION
            if role != "keys" or config.piece % tile.rows == 0
        ]
        frozen = {"tile": dataclasses.asdict(getattr(config, role))}
        wanted = {"q": q} if role == "queries" else {"k": k, "v": v}
        yield Question(key, frozen, candidates, _run(call, role, wanted, {}))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def _run(
    call: Callable[[], Tensor], role: str, x: Mapping[str, Tensor], w: Mapping[str, Tensor]
) -> Callable[[], Any]:
    """Runs the kernel of a role: the forward, or the backward of a forward that is kept."""
    if role in ("forward", "partial", "chunks"):

        def forward() -> Tensor:
            with torch.no_grad():
                return call()

        return forward
    out = call()
    grad = torch.randn_like(out)
    wanted = list((w if role == "weight_gradient" else x).values())
    return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)
