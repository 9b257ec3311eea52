"""What the library raises."""

from ikbo_tree.kernels.common.errors import UnsupportedError
from ikbo_tree.mapping.errors import TreeError

__all__ = ["TreeError", "UnsupportedError"]
