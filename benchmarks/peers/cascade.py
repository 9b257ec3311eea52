"""FlashInfer: a ragged prefill for each level, merged by its own kernel."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from attention_data import Data
from harness import Contender

from peers import MissingPeerError


def flashinfer(data: Data) -> Contender:
    """Planned outside the timed region."""
    try:
        library: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        raise MissingPeerError(f"flashinfer is not installed ({error})") from None
    if len(data.levels) > 2:
        raise MissingPeerError("its results are merged for two levels")
    heads, dim = data.workload.heads, data.workload.dim
    wrappers = {}
    for level in data.levels:
        space = torch.empty(2**27, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD")
        rows, keys, _ = data.borders(level)
        wrapper.plan(rows, keys, heads, heads, dim, causal=False, q_data_type=data.q.dtype)
        wrappers[level] = wrapper
    packed = {level: [x.detach() for x in data.packed(level)] for level in data.levels}
    if len(wrappers) == 1:
        return lambda: wrappers["user"].run(*packed["user"]).view(data.q.shape)

    def run() -> object:
        parts = [wrappers[level].run(*packed[level], return_lse=True) for level in data.levels]
        o, _ = library.merge_state(*parts[0], *parts[1])
        return o.view(data.q.shape)

    return run
