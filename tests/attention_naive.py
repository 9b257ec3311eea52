"""Calls of the attention ops, and what they should give: one query row after another in NumPy.

Nothing is shared with the ops: rows are found through a tree's parents one step at a time, each row
attends to the list of its keys, gradients are the textbook sums. Beside each exact result stands
its `size`: the same sums over absolute values, each weight with the condition of its exponent. A
float32 evaluation cannot be asked to err less than one rounding of that where terms cancel (one key
gets all weight: dS is exactly zero, and another order of summation leaves a rounding of dP).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.testing import oracles
from ikbo_tree.testing.budget import assert_within_budget
from ikbo_tree.tree import BroadcastTree

IMPLS = ("reference", "torch")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One call of target_attention, or with `q_self` of self_target_attention over one memory."""

    tree: BroadcastTree
    level: str
    q: Tensor
    memories: list[ikbo.Memory]
    scale: float | None = None
    q_self: Tensor | None = None
    causal: bool = False
    grads: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Every tensor a gradient may be asked for."""
        found = {"q": self.q} if self.q_self is None else {"q_self": self.q_self, "q": self.q}
        for i, memory in enumerate(self.memories):
            found |= {f"k{i}": memory.k, f"v{i}": memory.v}
            if memory.bias is not None:
                found[f"bias{i}"] = memory.bias
        return found

    def run(self, impl="torch"):
        """The public function; results by name."""
        options = {"tree": self.tree, "level": self.level, "scale": self.scale, "impl": impl}
        if self.q_self is None:
            o, lse = ikbo.target_attention(self.q, self.memories, return_lse=True, **options)
            return {"o": o, "lse": lse}
        (m,) = self.memories
        o_self, o, lse_self, lse = ikbo.self_target_attention(
            self.q_self,
            self.q,
            m.k,
            m.v,
            of=m.level,
            lengths=m.lengths,
            offsets=m.offsets,
            causal=self.causal,
            return_lse=True,
            **options,
        )
        return {"o": o, "lse": lse, "o_self": o_self, "lse_self": lse_self}


def draw(*shape, dtype=torch.float32, seed=0):
    """Normal values, the same ones rounded for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def memory(
    tree,
    level,
    form="whole",
    *,
    keys=5,
    heads=(2, 2),
    widths=(8, 8),
    bias=None,
    mask=False,
    dtype=torch.float32,
    seed=0,
    lengths=None,
    before=3,
):
    """A memory of random keys; NaN wherever nobody may read, nonsense in lengths of dead rows.

    Args:
        tree: the tree.
        level: whose rows own it.
        form: "whole", "padded" (with lengths) or "packed" (with entries before and behind).
        keys: the padded length, and the most that a row of a packed one has.
        heads: of the queries, of the keys.
        widths: of the keys, of the values.
        bias: None, "key" or "head".
        mask: whether to mask a third of the keys.
        dtype: of all tensors.
        seed: of everything random.
        lengths: of the live rows, in place of random ones.
        before: entries of a packed memory ahead of the first key.
    """
    rng = np.random.default_rng(seed)
    live, rows = tree.rows(level), tree.capacity(level)
    if lengths is None:
        lengths = rng.integers(0, keys + 1, live)
    offsets = None
    if form == "packed":
        given = before + np.concatenate([[0], np.cumsum(lengths)])
        offsets = torch.full((rows + 1,), 2**20, dtype=torch.int64)
        offsets[: live + 1] = torch.from_numpy(given)
        places = (int(given[-1]) + 2,)
        owned = torch.zeros(places, dtype=torch.bool)
        owned[before : given[-1]] = True
    else:
        places = (rows, keys)
        if form == "whole":
            lengths = np.full(live, keys)
        owned = torch.zeros(places, dtype=torch.bool)
        owned[:live] = torch.from_numpy(np.arange(keys) < np.asarray(lengths)[:, None])
    shown = torch.from_numpy(rng.random(places) < 2 / 3) if mask else None
    read = owned if shown is None else owned & shown
    given = None
    if form == "padded":
        given = torch.full((rows,), -7, dtype=torch.int32)
        given[:live] = torch.from_numpy(np.asarray(lengths))

    def values(*tail, seed):
        x = draw(*places, *tail, dtype=dtype, seed=seed)
        x[~read] = torch.nan
        return x

    return ikbo.Memory(
        level,
        values(heads[1], widths[0], seed=seed),
        values(heads[1], widths[1], seed=seed + 1),
        lengths=given,
        offsets=offsets,
        bias=None
        if bias is None
        else values(*((heads[0],) if bias == "head" else ()), seed=seed + 2),
        mask=shown,
    )


def queries(tree, level, n=1, heads=2, width=8, *, dtype=torch.float32, seed=50):
    """Random queries, NaN in dead rows."""
    q = draw(tree.capacity(level), n, heads, width, dtype=dtype, seed=seed)
    q[tree.rows(level) :] = torch.nan
    return q


def with_grads(call, lse=True, seed=99):
    """The call with a gradient for each result."""
    dtype = call.q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    width = call.memories[0].v.shape[-1]
    shapes = {"o": call.q.shape[:-1]} | (
        {} if call.q_self is None else {"o_self": call.q_self.shape[:-1]}
    )
    for i, (name, shape) in enumerate(shapes.items()):
        call.grads[name] = draw(*shape, width, dtype=dtype, seed=seed + i)
        if lse:
            call.grads[name.replace("o", "lse", 1)] = draw(*shape, dtype=wide, seed=seed + 7 + i)
    for name, x in call.grads.items():
        if not name.endswith("_self"):
            x[call.tree.rows(call.level) :] = torch.nan
    return call


def results(call, impl="torch", wanted=None):
    """Results and gradients of `wanted` inputs (default all), by name."""
    names = list(call.inputs) if wanted is None else list(wanted)
    for name, tensor in call.inputs.items():
        tensor.requires_grad_(name in names)
    found = call.run(impl)
    if names and call.grads:
        outputs = [found[name] for name in call.grads]
        grads = torch.autograd.grad(
            outputs, [call.inputs[n] for n in names], list(call.grads.values())
        )
        found |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    for tensor in call.inputs.values():
        tensor.requires_grad_(False)
    return {name: x.detach() for name, x in found.items()}


def keys_of(memory, row):
    """Where the keys of one row lie in k: flat positions of [rows * S] or [total]."""
    if memory.offsets is not None:
        keys = np.arange(int(memory.offsets[row]), int(memory.offsets[row + 1]))
    else:
        longest = memory.k.shape[1]
        length = longest if memory.lengths is None else int(memory.lengths[row])
        keys = row * longest + np.arange(length)
    if memory.mask is not None:
        keys = keys[memory.mask.flatten().numpy()[keys]]
    return keys


def expected(call, dtype=np.float64, weights=None):
    """Results and gradients by name, computed in `dtype`, and the sizes of their terms.

    What belongs to a padded memory has its first two dims joined.

    Args:
        call: the call.
        dtype: of the computation.
        weights: torch dtype that P and dS are rounded to before they are multiplied with values,
            keys, queries and gradients, as matrix instructions take them; None: they are not.
    """
    flat = {name: _joined(name, x, call, dtype) for name, x in _floats(call).items()}
    width = call.memories[0].v.shape[-1]
    exact = {f"d{name}": np.zeros_like(flat[name]) for name in call.inputs}
    for suffix in ("",) if call.q_self is None else ("", "_self"):
        rows = flat[f"q{suffix}"].shape[:-1]
        exact |= {
            f"o{suffix}": np.zeros((*rows, width), dtype),
            f"lse{suffix}": np.zeros(rows, dtype),
        }
    sizes = {name: np.zeros_like(x) for name, x in exact.items()}
    up = oracles.Parents(call.tree)
    for row in range(call.tree.rows(call.level)):
        keys = [keys_of(m, up.above(call.level, row, m.level)) for m in call.memories]
        _attend(call, flat, exact, sizes, "", np.array([row]), keys, weights)
    if call.q_self is not None:
        (memory,) = call.memories
        for row in range(call.tree.rows(memory.level)):
            keys = keys_of(memory, row)
            _attend(call, flat, exact, sizes, "_self", keys, [keys], weights)
    return exact, sizes


def _floats(call):
    return call.inputs | {f"grad_{name}": x for name, x in call.grads.items()}


def _joined(name, x, call, dtype):
    """As an array with a row for each query row, or for each key."""
    array = x.detach().double().numpy().astype(dtype)
    of_keys = name.endswith("_self") or (name in call.inputs and name != "q")
    if of_keys:
        memory = call.memories[int(name[-1]) if name[-1].isdigit() else 0]
        if memory.offsets is None:
            return array.reshape(-1, *array.shape[2:])
    return array


def _attend(call, flat, exact, sizes, suffix, mine, at, weights):
    """Adds what query rows `mine` give and get; they attend to the keys `at` of each memory."""
    q_rows, heads = flat[f"q{suffix}"][mine], call.q.shape[2]
    if len(mine) == 0:
        return
    q = q_rows.reshape(-1, heads, q_rows.shape[-1])
    k, v, bias = (
        np.concatenate(x)
        for x in zip(*(_keys(flat, i, keys, heads) for i, keys in enumerate(at)), strict=True)
    )
    do, dlse = (
        flat[name][mine].reshape(*q.shape[:2], -1)
        if name in flat
        else np.zeros((*q.shape[:2], width), q.dtype)
        for name, width in ((f"grad_o{suffix}", v.shape[-1]), (f"grad_lse{suffix}", 1))
    )
    scale = q.dtype.type(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    scores = np.einsum("nhd,lhd->nhl", q, k) * scale + bias.T
    if suffix and call.causal:
        later = np.arange(len(k)) > np.arange(len(q))[:, None]
        scores = np.where(later[:, None], -np.inf, scores)
    peak = scores.max(axis=-1, initial=-np.inf, keepdims=True)
    terms = np.exp(scores - np.where(peak == -np.inf, 0, peak))
    total = terms.sum(-1, keepdims=True)
    p = terms / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + peak
    o = np.einsum("nhl,lhe->nhe", p, v)
    dp = np.einsum("nhe,lhe->nhl", do, v)
    delta = (do * o).sum(-1, keepdims=True) - dlse

    finite_lse, finite_bias = (np.where(np.isinf(x), 0, abs(x)) for x in (lse, bias.T))
    condition = np.einsum("nhd,lhd->nhl", abs(q), abs(k)) * abs(scale) + finite_bias
    weight = p * (1 + condition + finite_lse)
    o_size = np.einsum("nhl,lhe->nhe", weight, abs(v))
    delta_size = (abs(do) * o_size).sum(-1, keepdims=True) + abs(dlse)
    dp_size = np.einsum("nhe,lhe->nhl", abs(do), abs(v))
    ds_size = weight * abs(dp - delta) + p * (dp_size + delta_size)
    lse_size = finite_lse + (p * condition).sum(-1, keepdims=True)

    p16, ds = (_rounded(x, weights) for x in (p, p * (dp - delta)))
    o = np.einsum("nhl,lhe->nhe", p16, v)
    _add(exact, suffix, mine, at, o, lse, ds, p16, q, k, do, scale)
    _add(
        sizes,
        suffix,
        mine,
        at,
        o_size,
        lse_size,
        ds_size,
        weight,
        abs(q),
        abs(k),
        abs(do),
        abs(scale),
    )


def _rounded(x, dtype):
    return x if dtype is None else torch.from_numpy(x).to(dtype).double().numpy().astype(x.dtype)


def _keys(flat, i, keys, heads):
    """Keys, values and bias of one memory for every query head: [keys, H, ...]."""
    k, v = (flat[f"{name}{i}"][keys] for name in "kv")
    k, v = (x.repeat(heads // x.shape[1], axis=1) for x in (k, v))
    bias = flat[f"bias{i}"][keys] if f"bias{i}" in flat else np.zeros(len(keys), k.dtype)
    return (
        k,
        v,
        np.broadcast_to(
            bias.reshape(len(keys), bias.size // max(1, len(keys)) or 1), (len(keys), heads)
        ),
    )


def _add(store, suffix, mine, at, o, lse, ds, p, q, k, do, scale):
    """Results of rows `mine`, and the sums over them that are gradients."""
    for name, x in (
        (f"o{suffix}", o),
        (f"lse{suffix}", lse),
        (f"dq{suffix}", scale * np.einsum("nhl,lhd->nhd", ds, k)),
    ):
        store[name][mine] += x.reshape(store[name][mine].shape)
    of_keys = {
        "dk": scale * np.einsum("nhl,nhd->lhd", ds, q),
        "dv": np.einsum("nhl,nhe->lhe", p, do),
        "dbias": ds.sum(0).T,
    }
    begin = 0
    for i, keys in enumerate(at):
        for name, x in of_keys.items():
            if (name := f"{name}{i}") in store and len(keys):
                shape = store[name].shape
                shared = shape[1] if len(shape) > 1 else 1
                part = x[begin : begin + len(keys)].reshape(len(keys), shared, -1, *shape[2:])
                store[name][keys] += part.sum(2).reshape(len(keys), *shape[1:])
        begin += len(keys)


def check(call, impl="torch", wanted=None):
    """Results and gradients against their budgets; returns how much of them was used."""
    found = results(call, impl, wanted)
    exact, sizes = expected(call)
    near, _ = expected(call, np.float32)
    unit = torch.finfo(torch.float32).eps / 2
    spent = {}
    for name, x in found.items():
        rounded = torch.from_numpy(exact[name] + unit * sizes[name])
        evaluations = (torch.from_numpy(near[name].astype(np.float64)), rounded)
        assert x.is_contiguous()
        x = x.reshape(exact[name].shape)
        spent[name] = assert_within_budget(x, exact[name], evaluations, name=name)
    return spent
