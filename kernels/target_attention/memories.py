"""The memories of a call: keys and values of one level each, and the way there from the queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Keys and values that the rows of one level (or table) own.

    Padded (`k` has 4 dims): row c owns `k[c, :extent[c]]`. Packed (`k` has 3 dims): it owns
    `k[extent[c]:extent[c + 1]]`. Entries of `extent` out of range are clamped, a decreasing pair
    owns nothing. Query rows `order[offsets[c]:offsets[c + 1]]` attend to what row c owns; where
    `index` and `offsets` are None the memory lies at the query level and row c attends to its own.

    Attributes:
        k: [rows, S, Hkv, D] or [total, Hkv, D].
        v: [rows, S, Hkv, Dv] or [total, Hkv, Dv].
        bias: [rows, S], [rows, S, H], [total] or [total, H], added to the scaled scores, or None.
        extent: lengths [rows] (or None: S each) if padded, offsets [rows + 1] if packed; int32 or
            int64.
        mask: bool [rows, S] or [total], true where a key takes part, or None.
        index: [query rows] int32, the row that each query row attends to.
        offsets: [rows + 1] int32.
        order: [query rows] int32; None: 0, 1, 2, ...
    """

    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    extent: Tensor | None = None
    mask: Tensor | None = None
    index: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether rows lie one after another instead of padded to one length."""
        return self.k.dim() == 3

    @property
    def bias_has_heads(self) -> bool:
        """Whether each query head has a bias of its own."""
        return self.bias is not None and self.bias.dim() == self.k.dim() - 1


def collect(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    bias: Sequence[Tensor],
    bias_of: Sequence[int],
    *rest: Sequence[Tensor | None],
) -> list[Memory]:
    """The op's lists as one `Memory` each.

    Args:
        k: one a memory.
        v: one a memory.
        bias: one for each memory that has one.
        bias_of: which memory each bias belongs to.
        rest: extent, mask, index, offsets, order; one entry a memory each.
    """
    biases = dict(zip(bias_of, bias, strict=True))
    columns = zip(k, v, *rest, strict=True)
    return [Memory(ki, vi, biases.get(i), *rest) for i, (ki, vi, *rest) in enumerate(columns)]
