"""Tiles of the Hopper gradient kernels: frozen, chosen by head dim alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientTile:
    """How a block uses its shared memory and registers.

    Attributes:
        stages: blocks in flight: 64 query rows for gradients of keys, `keys` keys for those of
            queries.
        keys: keys of a block of the latter.
        shared: how many of its left operands, of query rows and output gradients, stay in shared
            memory; the others are held in registers.
        consumer_registers: a thread; multiples of 8.
        producer_registers: a thread of the producer and the scheduler. Two consumers and these
            have 504 together.
    """

    stages: int
    keys: int = 64
    shared: int = 0
    consumer_registers: int = 240
    producer_registers: int = 24

    def __post_init__(self) -> None:
        if 2 * self.consumer_registers + self.producer_registers > 504:
            raise ValueError(f"a block of three warpgroups has 504 registers a thread: {self}")


KEYS = {64: GradientTile(6), 96: GradientTile(3), 128: GradientTile(3)}
"""Of keys and values, by head dim. 128: keys and values of two works, whose gradients leave through
the same buffers, take 128 KiB, and three stages of query rows 96. A consumer has 128 registers of
sums, 64 of S and dP and 32 of P and dS in 16 bits, and needs all 240 that there can be."""
QUERIES = {
    64: GradientTile(8, shared=2, consumer_registers=232, producer_registers=40),
    96: GradientTile(3, consumer_registers=232, producer_registers=40),
    128: GradientTile(3, consumer_registers=232, producer_registers=40),
}
"""Of queries. 128: query rows, output gradients, outputs and results take 128 KiB, three stages of
64 keys 96; 128 keys would take 64 registers more. 64: held in registers, one of the left operands
gets those of dS from ptxas 12.8 and the next block's products are wrong (tests/offline/operands.py
finds it), so both stay in shared memory. Blocks of 128 keys would be 6 % faster, but ptxas injects
waits between their products. The scheduler of four memories needs 40."""
