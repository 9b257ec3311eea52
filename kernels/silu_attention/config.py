"""Tiles of the kernels of `silu_attention`: frozen, chosen by dtype, widths and architecture."""

from __future__ import annotations

import functools

from ikbo_tree.kernels.target_attention.config import Tile

Tiles = tuple[Tile, Tile]
"""Of the kernel of query rows (forward, and their gradient), and of that of keys."""

_INTERPRETED = Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)
"""As small as can be, so that small tests reach every path."""

# By padded width (the larger of D and Dv); each serves the widths up to it. The largest that
# spill no register on sm_90 (16 bits: wgmma); at 256 all do.
_HOPPER_16 = {
    64: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    128: (Tile(64, 64, 8, 2), Tile(16, 64, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
}
_AMPERE_16 = {
    64: (Tile(64, 32, 4, 2), Tile(32, 64, 8, 2)),
    128: (Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
    256: (Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
}
_AMD_16 = {
    64: (Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)),
    128: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
_FLOAT32 = {
    64: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    128: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    256: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
}


@functools.cache
def silu_tiles(arch: str, itemsize: int, width: int) -> Tiles:
    """The tiles for one kind of call.

    Args:
        arch: `"interpreter"`, `"gfx..."`, or `"sm_80"`, ...
        itemsize: bytes of an element of the operands, 2 or 4.
        width: the larger of D and Dv, padded to a power of two, at most 256.
    """
    if arch == "interpreter":
        return _INTERPRETED
    if itemsize == 4:
        table = _FLOAT32
    elif arch.startswith("gfx"):
        table = _AMD_16
    else:
        table = _HOPPER_16 if int(arch.removeprefix("sm_")) >= 90 else _AMPERE_16
    return table[max(width, 64)]
