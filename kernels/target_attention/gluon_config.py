"""Tiles of the Hopper attention kernel: frozen, chosen by head dim alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HopperTile:
    """How a block uses its shared memory and registers.

    A tile has 128 query rows in two buffers, so that the next one's land early.

    Attributes:
        keys: keys of a block, BN.
        slots: blocks of keys or values in shared memory, at least 3: a step reads two.
        consumer_registers: a thread; multiples of 8.
        producer_registers: a thread of the producer and the scheduler. Two consumers and these
            have 504 together.
    """

    keys: int
    slots: int
    consumer_registers: int = 232
    producer_registers: int = 40

    def __post_init__(self) -> None:
        if self.slots < 3:
            raise ValueError(f"a step reads two slots while one is filled; got {self.slots}")
        if 2 * self.consumer_registers + self.producer_registers > 504:
            raise ValueError(f"a block of three warpgroups has 504 registers a thread: {self}")


HOPPER = {
    64: HopperTile(128, 8),
    96: HopperTile(128, 5),
    128: HopperTile(128, 5),
    192: HopperTile(64, 3, consumer_registers=240, producer_registers=24),
    256: HopperTile(64, 3, consumer_registers=240, producer_registers=24),
}
"""By head dim. 128: 224 KiB of queries and ring, which fill an SM; V2 of the measured variants. 192
and 256: two buffers of queries leave room for three slots of 64 keys, and their accumulators need
every register. Elsewhere 232 are as good as 240, and the scheduler of four memories needs 40."""
