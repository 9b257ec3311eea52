"""Which micro-models a run rewrites: all in the nightly profile, else every third."""

import os
import zlib

from ikbo_tree.testing import profiles

ALL = os.environ.get(profiles.ENVIRONMENT) == "nightly"


def chosen(names, of=3):
    """Every third name or so, by its spelling, so that a case keeps its place."""
    return [n for n in names if ALL or zlib.crc32(n.encode()) % of == 0]
