"""The published in-kernel broadcast attention: Triton and TLX (which needs Meta's Triton)."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from attention_data import Data
from harness import Contender
from torch import Tensor

from peers import MissingPeerError


def _function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"ikbo.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise MissingPeerError(f"the published kernels are not installed ({error})") from None


def _arguments(data: Data) -> tuple[Any, ...]:
    if len(data.levels) > 1:
        raise MissingPeerError("it has two levels")
    index = data.tree.ancestors("item", of="user")
    q, k, v = (x.detach() for x in data.packed("user"))
    return q, k, v, index, data.workload.n, data.workload.keys


def triton(data: Data) -> Contender:
    """Flash attention 2 with TMA."""
    attend = _function("triton_ikbo_fa", "triton_flash_attn_ikbo_tma")
    if data.tree.rows("item") > 65535:
        raise MissingPeerError("items lie along grid.y, which ends at 65,535")
    arguments = _arguments(data)
    return lambda: _shaped(attend(*arguments), data)


def tlx(data: Data) -> Contender:
    """Flash attention 3, persistent: pairs of candidates of one user."""
    attend = _function("tlx_ikbo_fa_ws", "tlx_flash_attn_ikbo_tma_persistent")
    if data.workload.n % 64:
        raise MissingPeerError("its tiles are 64 query rows of one item")
    arguments = _arguments(data)
    offsets = data.tree.offsets("item", of="user").tolist()
    pairs = [at for low, high in itertools.pairwise(offsets) for at in range(low, high, 2)]
    grid = torch.tensor(pairs, dtype=torch.int32, device="cuda")
    return lambda: _shaped(attend(*arguments, grid), data)


def _shaped(o: Any, data: Data) -> Tensor:
    found: Tensor = (o[0] if isinstance(o, tuple) else o).reshape(data.q.shape)
    return found
