"""FlashAttention-4, CuTe DSL: dense and varlen, query rows folded by hand."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from attention_data import Data
from harness import Contender
from torch import Tensor

from peers import MissingPeerError
from peers.sdpa import copies


def _module() -> Any:
    try:
        return importlib.import_module("flash_attn.cute")
    except ImportError as error:
        raise MissingPeerError(f"flash-attn-4 is not installed ({error})") from None


def _first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def folded(data: Data) -> Contender:
    """One dense call."""
    attend = _module().flash_attn_func
    if not data.workload.uniform:
        raise MissingPeerError("a dense call needs as many items for each user")
    return lambda: _first(attend(*data.folded)).reshape(data.q.shape)


def broadcast(data: Data) -> Contender:
    """Keys and values copied to the items, then one dense call."""
    attend = _module().flash_attn_func
    return lambda: _first(attend(data.q, *copies(data)))


def copied(data: Data) -> Contender:
    """The dense call alone, copies given."""
    attend = _module().flash_attn_func
    q, (k, v) = data.q.detach(), (x.detach() for x in copies(data))
    return lambda: _first(attend(q, k, v))


def varlen(data: Data) -> Contender:
    """A varlen call for each level, and one compiled merge where there are two."""
    attend = _module().flash_attn_varlen_func
    known = inspect.signature(attend).parameters
    several = len(data.levels) > 1
    if len(data.levels) > 2:
        raise MissingPeerError("its results are merged for two levels")

    def call(level: str) -> Any:
        rows, keys, longest = data.borders(level)
        options: dict[str, Any] = {"cu_seqlens_q": rows, "cu_seqlens_k": keys}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": data.workload.keys_of(level)}
        options |= {"return_lse": True} if several else {}
        return attend(
            *data.packed(level), **{name: x for name, x in options.items() if name in known}
        )

    if not several:
        return lambda: _first(call("user")).reshape(data.q.shape)
    if "return_lse" not in known:
        raise MissingPeerError("it returns no log-sum-exp to merge by")
    return lambda: _merge(*call("user"), *call("vendor")).reshape(data.q.shape)


@functools.cache
def _compiled() -> Any:
    return torch.compile(_merged, dynamic=True)


def _merge(*parts: Tensor) -> Tensor:
    found: Tensor = _compiled()(*parts)
    return found


def _merged(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
    """[rows, heads, dim] each, log-sum-exps [heads, rows]."""
    share = torch.sigmoid(lse_a - lse_b).t().unsqueeze(-1)
    return (a * share + b * (1 - share)).to(a.dtype)
