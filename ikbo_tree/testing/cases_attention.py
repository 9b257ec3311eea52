"""Random calls of the attention ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.kernels.target_attention import reference
from ikbo_tree.ops import Memory, self_target_attention, target_attention
from ikbo_tree.testing import oracles
from ikbo_tree.testing.cases import (
    Arrays,
    Call,
    Input,
    Rows,
    Tensors,
    flag,
    op_case,
    pick,
    reachable,
    some_of,
)
from ikbo_tree.testing.oracles import Array, OracleMemory
from ikbo_tree.tree import BroadcastTree

_INTEGERS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class Owned:
    """Which keys the live rows of a level own: padded (`lengths`) or packed (`offsets`)."""

    level: str
    keys: int
    lengths: NDArray[np.int64] | None
    offsets: NDArray[np.int64] | None
    dtype: torch.dtype

    @staticmethod
    def draw(tree: BroadcastTree, level: str, rng: np.random.Generator) -> Owned:
        """Keys of none, few or many a row; packed ones with entries in front and behind."""
        rows = tree.rows(level)
        longest = pick(rng, [0, 1, 3, 7, 20])
        lengths = rng.integers(0, longest + 1, rows)
        dtype = pick(rng, _INTEGERS)
        kind = pick(rng, ["whole", "padded", "packed"])
        if kind == "packed":
            start = pick(rng, [0, 2])
            offsets = start + np.concatenate([[0], np.cumsum(lengths)])
            return Owned(level, int(offsets[-1]) + pick(rng, [0, 3]), None, offsets, dtype)
        return Owned(level, longest, lengths if kind == "padded" else None, None, dtype)

    def rows(self, mask: NDArray[np.bool_] | None = None) -> dict[str, Any]:
        """Arguments of `Rows` for tensors of one entry a key."""
        if self.offsets is not None:
            owners = np.full(self.keys, -1, np.int64)
            for row, (low, high) in enumerate(
                zip(self.offsets[:-1], self.offsets[1:], strict=True)
            ):
                owners[low:high] = row
            if mask is not None:
                owners[~mask] = -1
            return {"level": self.level, "owners": owners}
        unused = None if mask is None else ~mask
        if self.lengths is not None:
            beyond = np.arange(self.keys) >= self.lengths[:, None]
            unused = beyond if unused is None else unused | beyond
        return {"level": self.level, "unused": unused}

    def shape(self, *tail: int) -> tuple[int, ...]:
        """Of an entry of dim 0."""
        return tail if self.offsets is not None else (self.keys, *tail)

    def options(self, tree: BroadcastTree) -> dict[str, Any]:
        """The keyword that says who owns what; nonsense for dead rows."""
        if self.lengths is None and self.offsets is None:
            return {}
        name, live = (
            ("lengths", self.lengths) if self.offsets is None else ("offsets", self.offsets)
        )
        assert live is not None
        rows = tree.capacity(self.level) + (name == "offsets")
        given = torch.full((rows,), 9999, dtype=self.dtype)
        given[: len(live)] = torch.from_numpy(live)
        return {name: given.to(tree.device)}


@dataclass(frozen=True)
class DrawnMemory:
    """One memory of a call and the names of its tensors."""

    name: str
    owned: Owned
    mask: NDArray[np.bool_] | None
    biased: bool

    @staticmethod
    def draw(tree: BroadcastTree, level: str, name: str, rng: np.random.Generator) -> DrawnMemory:
        """With a mask or a bias now and then."""
        owned = Owned.draw(tree, level, rng)
        mask = None
        if pick(rng, [False, False, True]):
            size = (owned.keys,) if owned.offsets is not None else (tree.rows(level), owned.keys)
            mask = rng.random(size) < 0.7
        return DrawnMemory(name, owned, mask, pick(rng, [False, False, True]))

    def inputs(
        self, shared: int, dim: int, width: int, heads: int, rng: np.random.Generator
    ) -> dict[str, Input]:
        """Keys, values and bias."""
        rows, shape = self.owned.rows(self.mask), self.owned.shape
        made = {
            f"k_{self.name}": Input(**rows, shape=shape(shared, dim)),
            f"v_{self.name}": Input(**rows, shape=shape(shared, width)),
        }
        if self.biased:
            tail = (heads,) if flag(rng) else ()
            made[f"bias_{self.name}"] = Input(**rows, shape=shape(*tail))
        return made

    def memory(self, tree: BroadcastTree, x: Tensors) -> Memory:
        """As an argument of the op."""
        mask = None
        if self.mask is not None:
            mask = torch.from_numpy(self.mask)
            if mask.dim() == 2:
                spare = tree.capacity(self.owned.level) - len(mask)
                mask = torch.cat([mask, mask.new_ones(spare, mask.shape[1])])
            mask = mask.to(tree.device)
        return Memory(
            self.owned.level,
            x[f"k_{self.name}"],
            x[f"v_{self.name}"],
            bias=x.get(f"bias_{self.name}"),
            mask=mask,
            **self.owned.options(tree),
        )

    def oracle(self, x: Arrays) -> OracleMemory:
        """As an argument of the oracle."""
        return OracleMemory(
            self.owned.level,
            x[f"k_{self.name}"],
            x[f"v_{self.name}"],
            self.owned.lengths,
            self.owned.offsets,
            x.get(f"bias_{self.name}"),
            self.mask,
        )

    def code(self) -> str:
        """For messages."""
        how = "padded" if self.owned.offsets is None else "packed"
        lengths = ", lengths" if self.owned.lengths is not None else ""
        more = ", bias" * self.biased + ", mask" * (self.mask is not None)
        return f'Memory("{self.owned.level}", {how} {self.owned.keys}{lengths}{more})'


def _heads(rng: np.random.Generator) -> tuple[int, int, int, int, int]:
    """n_seed, heads of the queries and of the keys, their width and the values'."""
    n = pick(rng, [1, 2, 5])
    heads, shared = pick(rng, [(1, 1), (2, 2), (2, 1), (4, 2)])
    dim = pick(rng, [1, 4, 24])
    return n, heads, shared, dim, pick(rng, [dim, 3])


class _Terms(torch.autograd.Function):
    """The reference's `attend` and its gradients, as sums of the absolute values of their terms.

    The gradient of a score is p (dO . V - dO . O): where one key has nearly all the weight the two
    products cancel, and how they were rounded is what remains. And p = exp(score - lse), which is
    computed where results over several memories are merged and where a backward pass keeps only
    the log-sum-exp, errs by roundings of both.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, valid: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        o, lse = _ATTEND(q, k, v, bias, valid, scale)
        scores = torch.einsum("rnhd,rkhd->rnhk", q, k) * scale + bias.transpose(1, 2).unsqueeze(1)
        known = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
        p = (scores - known).exp() * (1 + scores.abs() + known.abs())
        p = p.masked_fill(~valid.unsqueeze(2) | (scores == -torch.inf), 0)
        ctx.save_for_backward(q.abs(), k.abs(), v.abs(), o.abs(), p)
        ctx.scale = abs(scale)
        return torch.einsum("rnhk,rkhd->rnhd", p, v.abs()), p.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, p = ctx.saved_tensors
        size = grad_o.abs()
        inner = (size * o).sum(-1) + grad_lse.abs()
        grad = p * (torch.einsum("rnhd,rkhd->rnhk", size, v) + inner.unsqueeze(-1))
        grad = grad.masked_fill(p == 0, 0)
        dq = torch.einsum("rnhk,rkhd->rnhd", grad, k) * ctx.scale
        dk = torch.einsum("rnhk,rnhd->rkhd", grad, q) * ctx.scale
        dv = torch.einsum("rnhk,rnhd->rkhd", p, size)
        return dq, dk, dv, grad.sum(1).transpose(1, 2), None, None


_ATTEND = reference.attend


def _attend_terms(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    bias = q.new_zeros(k.shape[:3]) if bias is None else bias
    found: tuple[Tensor, Tensor] = _Terms.apply(q, k, v, bias, valid, scale)  # type: ignore[no-untyped-call]
    return found


def _terms() -> Any:
    return mock.patch.object(reference, "attend", _attend_terms)


@op_case("target_attention")
def _target_attention(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    names = some_of(rng, reachable(tree, level) * 2)[:3]
    memories = [DrawnMemory.draw(tree, name, str(i), rng) for i, name in enumerate(names)]
    n, heads, shared, dim, width = _heads(rng)
    inputs = {"q": Input(level, shape=(n, heads, dim))}
    for memory in memories:
        inputs |= memory.inputs(shared, dim, width, heads, rng)
    options: dict[str, Any] = {"return_lse": flag(rng), "scale": pick(rng, [None, 0.7])}

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        listed = [memory.memory(tree, x) for memory in memories]
        out = target_attention(x["q"], listed, tree=tree, level=level, impl=impl, **options)
        return out if isinstance(out, tuple) else (out,)

    def oracle(tree: BroadcastTree, x: Arrays) -> tuple[Array, ...]:
        owned = [memory.oracle(x) for memory in memories]
        out = oracles.target_attention(tree, x["q"], owned, level, options["scale"])
        return out if options["return_lse"] else out[:1]

    listed = ", ".join(memory.code() for memory in memories)
    code = f'target_attention(q, [{listed}], level="{level}", **{options})'
    outputs = (Rows(level),) * (2 if options["return_lse"] else 1)
    return Call("target_attention", code, inputs, outputs, run, oracle, terms=_terms)


@op_case("self_target_attention")
def _self_target_attention(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    of = pick(rng, reachable(tree, level))
    owned = Owned.draw(tree, of, rng)
    n, heads, shared, dim, width = _heads(rng)
    rows, causal = owned.rows(), flag(rng)
    inputs = {
        "q_self": Input(**rows, shape=owned.shape(heads, dim)),
        "q": Input(level, shape=(n, heads, dim)),
        "k": Input(**rows, shape=owned.shape(shared, dim)),
        "v": Input(**rows, shape=owned.shape(shared, width)),
    }

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = self_target_attention(
            x["q_self"],
            x["q"],
            x["k"],
            x["v"],
            tree=tree,
            level=level,
            of=of,
            causal=causal,
            return_lse=True,
            impl=impl,
            **owned.options(tree),
        )
        return out

    def oracle(tree: BroadcastTree, x: Arrays) -> tuple[Array, ...]:
        memory = OracleMemory(of, x["k"], x["v"], owned.lengths, owned.offsets)
        o_self, lse_self = oracles.self_attention(tree, x["q_self"], memory, causal)
        o, lse = oracles.target_attention(tree, x["q"], [memory], level)
        return o_self, o, lse_self, lse

    how = "padded" if owned.offsets is None else "packed"
    code = f'self_target_attention(..., {how}, level="{level}", of="{of}", causal={causal})'
    outputs = (Rows(**rows), Rows(level), Rows(**rows), Rows(level))
    return Call(
        "self_target_attention",
        code,
        inputs,
        outputs,
        run,
        oracle,
        terms=_terms,
        entangled=causal,
    )
