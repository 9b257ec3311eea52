"""What the Hopper kernel of `linear_compression` is compiled for."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Plain numbers, so that Triton tells one from another.

    Attributes:
        levels: of the launch.
        result: number of the tree's last level among them, or -1.
        edges: for each producer its consumer's number, and how many of the consumer's come before.
        join: most producers of a level.
        row_blocks: row blocks of 64 rows of M.
        column_blocks: column blocks of BN columns of N.
        k_tail: columns of W in the last step over K that are not padding, in 16s, at any level.
        BN: see `gluon_config.Tile`; so for all that follow.
        stages: steps loaded ahead.
        prefetch: halves of the partial fetched before the product.
        outstanding: products that run on.
        keep: output in operand slots.
        ahead: flags are looked at ahead of time.
        behind: partials are fetched behind the first product.
        branch: a branch before the wait for the output's copy.
        consumer_registers: a thread.
        producer_registers: a thread.
    """

    levels: int
    result: int
    edges: tuple[tuple[int, int], ...]
    join: int
    row_blocks: int
    column_blocks: int
    k_tail: int
    BN: int
    stages: int
    prefetch: int
    outstanding: int
    keep: bool
    ahead: bool
    behind: bool
    branch: bool
    consumer_registers: int
    producer_registers: int
