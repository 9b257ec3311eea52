"""Other ways to compute linear compression over levels, each as good as its form can be made.

`materialised` and what follows it take what their form takes for granted as given: a concatenated
input, a concatenated weight, inputs and weights padded to a multiple of 8 along K (outside of what
is timed). All but `cublas-candidate`, which leaves the coarse levels out, compute the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peers import MissingPeerError

PAD = 8
"""Elements that K is padded to: 16 bytes of a 16-bit dtype."""


@dataclass
class Problem:
    """One call, coarse level first.

    Attributes:
        e: E of each level [rows, K, N].
        w: W of each level [M, K].
        parents: for each level but the first [rows] int64, its rows in the level before it.
        above: for each level [rows of the last] int64, where its rows lie above the last level's.
    """

    e: list[Tensor]
    w: list[Tensor]
    parents: list[Tensor]
    above: list[Tensor]

    @functools.cached_property
    def padded(self) -> Problem:
        """The same with zeros up to a multiple of `PAD` along K."""
        e = [_padded(x, 1) for x in self.e]
        w = [_padded(x, 1) for x in self.w]
        return Problem(e, w, self.parents, self.above)

    def inputs(self) -> list[Tensor]:
        """What gradients are taken of."""
        return [*self.e, *self.w]


@dataclass
class Peer:
    """A contender.

    Attributes:
        call: computes the result.
        inputs: what gradients are taken of; none: it has no backward.
        note: what to know of it.
    """

    call: Callable[[], Tensor]
    inputs: Sequence[Tensor] = ()
    note: str | None = None


def _padded(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] += -shape[dim] % PAD
    out = x.new_zeros(shape)
    out.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    return out.requires_grad_(x.requires_grad)


def _chain(e: Sequence[Tensor], w: Sequence[Tensor], parents: Sequence[Tensor]) -> Tensor:
    """One product a level, coarse results gathered and added."""
    total = _product(w[0], e[0])
    for x, weight, index in zip(e[1:], w[1:], parents, strict=True):
        total = _product(weight, x) + total.index_select(0, index)
    return total


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """`weight @ x` as a batched product: `torch.matmul` copies x where it wants a gradient."""
    return torch.bmm(weight.expand(len(x), -1, -1), x)


def _flat(problem: Problem) -> Tensor:
    pairs = zip(problem.e, problem.above, strict=True)
    return torch.cat([x.index_select(0, index) for x, index in pairs], 1)


def materialised(problem: Problem) -> Peer:
    """One product of a concatenation that is given."""
    flat = _flat(problem).detach().requires_grad_(problem.e[0].requires_grad)
    weight = torch.cat(problem.w, 1).detach().requires_grad_(problem.e[0].requires_grad)
    return Peer(lambda: _product(weight, flat), (flat, weight), "broadcast and cat given")


def materialised_broadcast(problem: Problem) -> Peer:
    """What an unmodified model runs: index_select, cat, one product."""
    weight = torch.cat(problem.w, 1).detach().requires_grad_(problem.e[0].requires_grad)
    return Peer(lambda: _product(weight, _flat(problem)), (*problem.e, weight))


def decomposed(problem: Problem) -> Peer:
    """One product a level, in eager torch."""
    return Peer(lambda: _chain(problem.e, problem.w, problem.parents), problem.inputs())


def decomposed_padded(problem: Problem) -> Peer:
    """The same with K padded."""
    p = problem.padded
    return Peer(lambda: _chain(p.e, p.w, p.parents), p.inputs(), "E and W padded outside")


def baddbmm(problem: Problem) -> Peer:
    """Padded; the last level's product added to the gathered partial in one call."""
    p = problem.padded

    def call() -> Tensor:
        coarse = _chain(p.e[:-1], p.w[:-1], p.parents[:-1])
        weight = p.w[-1].expand(len(p.e[-1]), -1, -1)
        return torch.baddbmm(coarse.index_select(0, p.parents[-1]), weight, p.e[-1])

    return Peer(call, p.inputs(), "E and W padded outside")


def torch_compile(problem: Problem) -> Peer:
    """Padded, decomposed, compiled with max-autotune."""
    p = problem.padded
    torch.compiler.reset()
    chain: Any = torch.compile(_chain, mode="max-autotune-no-cudagraphs", dynamic=False)
    return Peer(lambda: chain(p.e, p.w, p.parents), p.inputs(), "E and W padded outside")


def cublas_candidate(problem: Problem) -> Peer:
    """The last level's product alone, padded: it does less than all others."""
    p = problem.padded
    note = "the last level's product alone: it does less"
    return Peer(lambda: _product(p.w[-1], p.e[-1]), (), note)


def published_triton(problem: Problem) -> Peer:
    """The Triton kernel published with the in-kernel broadcast system, if it can be imported."""
    kernel = _published("ikbo.ops.triton_ikbo_lce", "triton_ikbo_lce", problem)
    p = problem.padded
    index = p.parents[0].int()
    return Peer(lambda: kernel(p.w[1], p.w[0], p.e[1], p.e[0], index), (), "E and W padded outside")


def published_tlx(problem: Problem) -> Peer:
    """The warp-specialised kernel published with it, which needs a Triton with TLX."""
    if problem.e[0].dtype != torch.float16:
        raise MissingPeerError("it computes in float16 whatever it is given")
    kernel = _published("ikbo.ops.tlx_ikbo_lce", "tlx_ikbo_lce", problem)
    flag = _published("ikbo.ops.tlx_ikbo_lce", "create_user_flag", problem)
    p = problem.padded
    index, done = p.parents[0].int(), flag(p.w[0], p.e[0])
    call = functools.partial(kernel, p.w[1], p.w[0], p.e[1], p.e[0], index, done)
    return Peer(call, (), "E and W padded outside")


def _published(module: str, name: str, problem: Problem) -> Callable[..., Any]:
    if len(problem.e) != 2:
        raise MissingPeerError(f"{name} has two levels")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingPeerError(f"{module} cannot be imported: {error}") from error
    return found


PEERS: dict[str, Callable[[Problem], Peer]] = {
    "materialised": materialised,
    "materialised+broadcast": materialised_broadcast,
    "decomposed": decomposed,
    "decomposed-padded": decomposed_padded,
    "baddbmm": baddbmm,
    "torch-compile": torch_compile,
    "cublas-candidate": cublas_candidate,
    "published-triton": published_triton,
    "published-tlx": published_tlx,
}
