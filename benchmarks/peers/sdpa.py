"""torch's scaled_dot_product_attention: on copied keys, and with query rows folded."""

from __future__ import annotations

import torch
from attention_data import Data
from harness import Contender
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from peers import MissingPeerError

MOST_COPIED = 20 * 2**30
"""Bytes of one contender's copies: several hold theirs at a time."""


def _attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, rows, heads, dim] of each."""
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def copies(data: Data) -> list[Tensor]:
    """Keys and values of all levels at the items: two of [items, S, heads, dim]."""
    size = sum(x.nbytes for x in data.leaves[1:]) / data.memories["user"][0].shape[0]
    if size * data.q.shape[0] > MOST_COPIED:
        raise MissingPeerError("copies of the keys would take more than 20 GiB")
    found = []
    for i in range(2):
        parts = [
            pair[i].index_select(0, data.tree.ancestors("item", of=level))
            for level, pair in data.memories.items()
        ]
        found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
    return found


def broadcast(data: Data) -> Contender:
    """What an unmodified model runs: keys and values copied to the items, then attention."""
    return lambda: _attend(SDPBackend.CUDNN_ATTENTION, data.q, *copies(data))


def copied(data: Data) -> Contender:
    """The attention alone, copies given."""
    q, (k, v) = data.q.detach(), (x.detach() for x in copies(data))
    return lambda: _attend(SDPBackend.CUDNN_ATTENTION, q, k, v)


def cudnn_folded(data: Data) -> Contender:
    """All query rows of a user as one sequence: cuDNN."""
    return _folded(data, SDPBackend.CUDNN_ATTENTION)


def flash_folded(data: Data) -> Contender:
    """The same with torch's flash attention 2."""
    return _folded(data, SDPBackend.FLASH_ATTENTION)


def _folded(data: Data, backend: SDPBackend) -> Contender:
    if not data.workload.uniform:
        raise MissingPeerError("a dense call needs as many items for each user")
    return lambda: _attend(backend, *data.folded).reshape(data.q.shape)
