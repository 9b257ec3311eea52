"""Capture of a case by torch.export, as the rewrite's own front end would see it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ikbo_tree import BroadcastTree
from rewrite_cases.case import Case


def capture(case: Case, inputs: dict[str, Tensor], tree: BroadcastTree) -> ExportedProgram:
    """The original model with one named dimension a level, from its flat inputs."""
    dims = {level: Dim(level) for level in tree.levels}
    shapes = {name: {0: dims[case.row_level(name)]} for name in inputs}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(
            case.module(), (), kwargs=inputs, dynamic_shapes=shapes, strict=False
        )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
