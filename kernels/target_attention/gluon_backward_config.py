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
        consumer_registers: a thread; multiples of 8.
        producer_registers: a thread of the producer and the scheduler. Two consumers and these
            have 504 together.
    """

    stages: int
    keys: int = 64
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
    64: GradientTile(8, consumer_registers=232, producer_registers=40),
    96: GradientTile(3, consumer_registers=232, producer_registers=40),
    128: GradientTile(3, consumer_registers=232, producer_registers=40),
}
"""Of queries. 128: query rows, output gradients, outputs and results take 128 KiB, three stages of
64 keys 96; 128 keys would take 64 registers more. The scheduler of four memories needs 40."""
