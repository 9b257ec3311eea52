"""A model of the Hopper kernel's roles, run in random order: nothing hangs, nothing is overwritten.

Every role is a generator that yields where the hardware may do something else first. What the model
takes from the kernel is the numbering of tiles; order of waits and arrivals is written down again.
"""

import random

import pytest

from ikbo_tree.kernels.linear_compression.gluon_schedule import place

BOTH = (0, 1)


class Barrier:
    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.phase = 0

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.phase, self.missing = self.phase + 1, self.arrivals

    def passes(self, parity):
        return self.phase & 1 != parity


class Stage:
    def __init__(self):
        self.holds, self.used_by = None, set()


class Device:
    """What all programs share: tickets, flags, the tree."""

    def __init__(self, rng, lives, row_blocks, stages, outstanding):
        self.rng, self.lives, self.row_blocks = rng, lives, row_blocks
        self.S, self.outstanding = stages, outstanding
        self.next, self.flags, self.done = 0, {}, set()
        self.parent = [
            [rng.randrange(max(n, 1)) for _ in range(m)]
            for n, m in zip([0, *lives[:-1]], lives, strict=True)
        ]
        self.steps = [rng.randint(2, 6) for _ in lives]

    def take(self):
        padded = [*self.lives, *[0] * (4 - len(self.lives))]
        late, last = 2, len(self.lives) - 1
        tile = place.fn(self.next, *padded, late, last, self.row_blocks, 1)
        self.next += 1
        return tile


class Program:
    """One multiprocessor: a ring, mail, three roles."""

    SLOTS = 8

    def __init__(self, device):
        self.device = device
        self.ring = [Stage() for _ in range(device.S)]
        self.full = [Barrier(1) for _ in self.ring]
        self.empty = [Barrier(2) for _ in self.ring]
        self.mail = [None] * self.SLOTS
        self.sent = [Barrier(1) for _ in self.mail]
        self.loads = []
        self.roles = [self.produce(), self.consume(0), self.consume(1)]

    def send(self, number, tile):
        self.mail[number % self.SLOTS] = number, tile
        self.sent[number % self.SLOTS].arrive()

    def feed(self, tile, step, first, end):
        for k in range(first, end):
            s = step % self.device.S
            while not self.empty[s].passes((step // self.device.S & 1) ^ 1):
                yield
            self.loads.append(self.land(s, (tile, k)))
            step += 1
        return step

    def land(self, s, what):
        for _ in range(self.device.rng.randint(0, 5)):
            yield
        stage = self.ring[s]
        assert not stage.used_by, f"{what} overwrites {stage.holds}"
        stage.holds, stage.used_by = what, set(BOTH)
        self.full[s].arrive()

    def produce(self):
        tile, number = self.device.take(), 0
        fed = 2 if tile[0] >= 0 else 0
        step = yield from self.feed(tile, 0, 0, fed)
        self.send(0, tile)
        while tile[0] >= 0:
            steps = self.device.steps[tile[0]]
            middle = max(steps // 2, fed)
            step = yield from self.feed(tile, step, fed, middle)
            following = self.device.take()
            step = yield from self.feed(tile, step, middle, steps)
            number += 1
            self.send(number, following)
            tile, fed = following, 0

    def receive(self, number):
        slot = number % self.SLOTS
        while not self.sent[slot].passes(number // self.SLOTS & 1):
            yield
        yield
        assert self.mail[slot][0] == number
        return self.mail[slot][1]

    def give(self, c, step):
        s = step % self.device.S
        self.ring[s].used_by.discard(c)
        self.empty[s].arrive()

    def consume(self, c):
        device, step, number, held = self.device, 0, 0, False
        tile = yield from self.receive(0)
        while tile[0] >= 0:
            level, row, _, block, pair = tile
            steps, last = device.steps[level], level == len(device.lives) - 1
            hold = bool(pair and last)
            for k in range(steps):
                s = (step + k) % device.S
                while not self.full[s].passes((step + k) // device.S & 1):
                    yield
                assert self.ring[s].holds == (tile, k)
                yield
                if k == 0 and held:
                    self.give(c, step - 2)
                    self.give(c, step - 1)
                free = k - device.outstanding
                if free >= 0 and k < steps - 1 and not (hold and free >= steps - 2):
                    self.give(c, step + free)
            following = yield from self.receive(number + 1)
            if not hold:
                for k in range(steps - 1 - device.outstanding, steps):
                    self.give(c, step + k)
            block += c if pair else 0
            if level > 0:
                flag = (level - 1, device.parent[level][row], block)
                while device.flags.get(flag, 0) < 2:
                    yield
            if not last:
                key = (level, row, block)
                device.flags[key] = device.flags.get(key, 0) + (2 if pair else 1)
            device.done.add((level, row, block, None if pair else c))
            step, number, held, tile = step + steps, number + 1, hold, following


def run(seed):
    """Programs start when others end, if fewer are resident than launched."""
    rng = random.Random(seed)
    lives = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    device = Device(rng, lives, rng.randint(1, 4), rng.choice([4, 6, 8]), rng.randint(0, 1))
    waiting = [Program(device) for _ in range(rng.randint(1, 5))]
    resident = rng.randint(1, len(waiting))
    running = []
    for _ in range(200_000):
        while waiting and len(running) < resident:
            running.append(waiting.pop())
        if not running:
            return device
        program = rng.choice(running)
        queue = program.roles if rng.random() < 0.7 or not program.loads else program.loads
        role = rng.choice(queue)
        try:
            next(role)
        except StopIteration:
            queue.remove(role)
            if not program.roles:
                running.remove(program)
    raise AssertionError("nothing moves any more")


@pytest.mark.parametrize("seed", range(300))
def test_nothing_hangs_and_nothing_is_overwritten(seed):
    device = run(seed)
    blocks = {
        (level, row, block, half)
        for level, rows in enumerate(device.lives)
        for row in range(rows)
        for block in range(device.row_blocks)
        for half in (BOTH if block == device.row_blocks - 1 and device.row_blocks % 2 else (None,))
    }
    assert device.done == blocks
