"""What every op means, one output row at a time, in NumPy loops.

They share nothing with the ops but the tree's `parents` and table maps: no offsets, no orders, no
composed maps. Results have the dtype of the first array given, float64 for an oracle. Dead rows
are never read and come out zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.tree import BroadcastTree

Array = NDArray[np.floating]


class Parents:
    """A tree's parents and table maps as arrays, and the way up through them."""

    def __init__(self, tree: BroadcastTree) -> None:
        self.tree = tree
        self._maps = {name: tree.parents(name).cpu().numpy() for name in tree.levels[1:]}
        for name in tree.tables:
            self._maps[name] = tree.ancestors(tree.table_level(name), of=name).cpu().numpy()

    def above(self, level: str, row: int, of: str) -> int:
        """The row of `of`, above `level` or a table reached from it, that a row belongs to."""
        target = self.tree.table_level(of) if of in self.tree.tables else of
        while level != target:
            parent = self.tree.parent(level)
            if parent is None:
                raise ValueError(f"{of!r} is not above the level")
            row, level = int(self._maps[level][row]), parent
        return int(self._maps[of][row]) if of in self.tree.tables else row

    def below(self, level: str, of: str) -> list[list[int]]:
        """For each live row of `of`, the live rows of `level` that belong to it, ascending."""
        found: list[list[int]] = [[] for _ in range(self.tree.rows(of))]
        for row in range(self.tree.rows(level)):
            found[self.above(level, row, of)].append(row)
        return found


def broadcast(tree: BroadcastTree, x: Array, level: str, to: str) -> Array:
    """[rows of `to`, ...]: each row of `x` [rows of `level`, ...] at the rows below it."""
    out = np.zeros((tree.capacity(to), *x.shape[1:]), x.dtype)
    up = Parents(tree)
    for row in range(tree.rows(to)):
        out[row] = x[up.above(to, row, level)]
    return out


def reduce(tree: BroadcastTree, x: Array, level: str, to: str, op: str) -> Array:
    """[rows of `to`, ...]: the rows of `x` [rows of `level`, ...] below each row reduced."""
    out = np.zeros((tree.capacity(to), *x.shape[1:]), x.dtype)
    for row, below in enumerate(Parents(tree).below(level, to)):
        out[row] = _reduced(x[below], op)
    return out


def _reduced(x: Array, op: str) -> Array | float:
    nothing = {"sum": 0.0, "mean": 0.0, "max": -np.inf, "min": np.inf, "logsumexp": -np.inf}[op]
    if len(x) == 0:
        return nothing
    if op == "logsumexp":
        return _softmax(x)[1]
    result: Array = getattr(x, op)(axis=0)
    return result


def _softmax(x: Array) -> tuple[Array, Array]:
    """Softmax over dim 0, which may be empty, and the logarithm of the sum of exponentials.

    Over nothing but -inf 0 and -inf. Not exp(x - logsumexp), whose error is as large as a rounding
    of the logsumexp.
    """
    peak = x.max(axis=0, initial=-np.inf)
    peak = np.where(np.isinf(peak), 0, peak).astype(x.dtype)
    terms = np.exp(x - peak)
    total = terms.sum(axis=0)
    with np.errstate(divide="ignore"):
        return terms / np.where(total == 0, 1, total), np.log(total) + peak


def segment_softmax(tree: BroadcastTree, x: Array, level: str, of: str) -> Array:
    """[rows of `level`, ...]: softmax over the rows that share a row of `of`."""
    out = np.zeros_like(x)
    for below in Parents(tree).below(level, of):
        if below:
            out[below] = _softmax(x[below])[0]
    return out


def linear(
    tree: BroadcastTree,
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    bias: Array | None,
    level: str,
) -> Array:
    """[rows of `level`, N]: x_l [rows_l, K_l] of all ancestors side by side, times [W_l ...]."""
    flat = np.concatenate([weights[name] for name in inputs], axis=1)
    out = np.zeros((tree.capacity(level), flat.shape[0]), flat.dtype)
    up = Parents(tree)
    for row in range(tree.rows(level)):
        x = np.concatenate([inputs[n][up.above(level, row, n)] for n in inputs])
        out[row] = flat @ x
        if bias is not None:
            out[row] += bias
    return out


def linear_compression(
    tree: BroadcastTree, inputs: Mapping[str, Array], weights: Mapping[str, Array], level: str
) -> Array:
    """[rows of `level`, M, N]: [W_l ...] times E_l [rows_l, K_l, N] of all ancestors, stacked."""
    flat = np.concatenate([weights[name] for name in inputs], axis=1)
    width = next(iter(inputs.values())).shape[2]
    out = np.zeros((tree.capacity(level), flat.shape[0], width), flat.dtype)
    up = Parents(tree)
    for row in range(tree.rows(level)):
        e = np.concatenate([inputs[n][up.above(level, row, n)] for n in inputs], axis=0)
        out[row] = flat @ e
    return out


@dataclass(frozen=True)
class OracleMemory:
    """Keys and values of one level: the arguments of `ikbo_tree.Memory`, as arrays.

    Attributes:
        level: the level or table that owns them.
        k: [rows, S, Hkv, D], or packed [total, Hkv, D].
        v: [rows, S, Hkv, Dv], or packed [total, Hkv, Dv].
        lengths: [rows], the keys that each row has, if padded; None: S each.
        offsets: [rows + 1], if packed.
        bias: [rows, S], [rows, S, H], or packed [total] or [total, H]; added to scaled scores.
        mask: bool [rows, S] or packed [total]; true where a key takes part.
    """

    level: str
    k: Array
    v: Array
    lengths: NDArray[np.integer] | None = None
    offsets: NDArray[np.integer] | None = None
    bias: Array | None = None
    mask: NDArray[np.bool_] | None = None

    def of_row(self, row: int) -> tuple[Array, Array, Array | None]:
        """Keys [n, Hkv, D], values [n, Hkv, Dv] and bias [n] or [n, H] that one row owns."""
        if self.offsets is not None:
            keys = np.arange(int(self.offsets[row]), int(self.offsets[row + 1]))
            k, v, bias, mask = self.k, self.v, self.bias, self.mask
        else:
            n = self.k.shape[1] if self.lengths is None else int(self.lengths[row])
            keys = np.arange(n)
            k, v = self.k[row], self.v[row]
            bias = None if self.bias is None else self.bias[row]
            mask = None if self.mask is None else self.mask[row]
        if mask is not None:
            keys = keys[mask[keys]]
        return k[keys], v[keys], None if bias is None else bias[keys]


def target_attention(
    tree: BroadcastTree,
    q: Array,
    memories: Sequence[OracleMemory],
    level: str,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """One softmax over the union of the keys that all ancestors own.

    Args:
        tree: the tree.
        q: [rows of `level`, n, H, D].
        memories: what levels and tables at or above `level` own.
        level: the query level.
        scale: of the scores; default 1 / sqrt(D).

    Returns:
        [rows, n, H, Dv] and the log-sum-exp [rows, n, H]; over no keys 0 and -inf.
    """
    _, n, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((tree.capacity(level), n, heads, memories[0].v.shape[-1]), q.dtype)
    lse = np.zeros((tree.capacity(level), n, heads), q.dtype)
    up = Parents(tree)
    for row in range(tree.rows(level)):
        owned = [m.of_row(up.above(level, row, m.level)) for m in memories]
        for head in range(heads):
            out[row, :, head], lse[row, :, head] = attend(
                q[row, :, head], owned, head, heads, scale
            )
    return out, lse


def attend(
    q: Array,
    owned: Sequence[tuple[Array, Array, Array | None]],
    head: int,
    heads: int,
    scale: float,
) -> tuple[Array, Array]:
    """One head of one row: q [n, D] over what `OracleMemory.of_row` gave for each memory."""
    keys, values, scores = [], [], []
    for k, v, bias in owned:
        shared = head * k.shape[1] // heads
        keys.append(k[:, shared])
        values.append(v[:, shared])
        score = np.asarray(q @ k[:, shared].T * scale, q.dtype)
        if bias is not None:
            score = score + (bias if bias.ndim == 1 else bias[:, head])
        scores.append(score)
    score, value = np.concatenate(scores, axis=1), np.concatenate(values)
    p, lse = _softmax(score.T)
    return p.T @ value, lse


def self_attention(
    tree: BroadcastTree,
    q: Array,
    memory: OracleMemory,
    causal: bool,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Attention of each history's own queries to its keys; entries that no row owns are zero.

    Args:
        tree: the tree.
        q: [rows, S, H, D] or packed [total, H, D], a query for each key of `memory`.
        memory: without bias and mask.
        causal: query i sees keys 0 ... i.
        scale: of the scores; default 1 / sqrt(D).

    Returns:
        Like q but Dv wide, and the log-sum-exp [rows, S, H] or [total, H].
    """
    heads, dim = q.shape[-2:]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((*q.shape[:-1], memory.v.shape[-1]), q.dtype)
    lse = np.zeros(q.shape[:-1], q.dtype)
    for row in range(tree.rows(memory.level)):
        k, v, _ = memory.of_row(row)
        for i in range(len(k)):
            at = (row, i) if memory.offsets is None else (int(memory.offsets[row]) + i,)
            seen = i + 1 if causal else len(k)
            for head in range(heads):
                o, total = attend(
                    q[at][None, head], [(k[:seen], v[:seen], None)], head, heads, scale
                )
                out[at][head], lse[at][head] = o[0], total[0]
    return out, lse
