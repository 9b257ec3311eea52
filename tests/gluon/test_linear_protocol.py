"""A model of the roles in `linear`'s Hopper kernel, run in random order: nothing hangs, nothing is
overwritten, nothing is read before it is there.

Every role is a generator that yields where the hardware may do something else first. What the model
takes from the kernel is the numbering of tiles; order of waits and arrivals is written down again.
"""

import random

import pytest
from gluon.test_protocol import BOTH, Barrier, Stage

from ikbo_tree.kernels.linear.gluon_schedule import place


class Device:
    """What all programs share: tickets, counters, the tree."""

    def __init__(self, rng):
        self.rng = rng
        self.lives = [rng.choice([0, 1, 64, 65, 128, 200]) for _ in range(rng.randint(1, 4))]
        self.columns = rng.randint(1, 3)
        self.S, self.outstanding = rng.choice([4, 6, 8]), rng.randint(0, 1)
        self.keep = rng.random() < 0.5
        self.steps = [rng.randint(2, 6) for _ in self.lives]
        last = len(self.lives) - 1
        self.producers = {
            level: rng.sample(range(level), rng.randint(0, min(3, level))) for level in range(last)
        }
        self.producers[last] = rng.sample(range(last), min(3, last))
        self.reset()

    def reset(self):
        self.tickets, self.left = 0, 0
        self.counters = [0] * len(self.lives)
        self.done = set()

    def take(self):
        padded = [*self.lives, *[0] * (4 - len(self.lives))]
        tile = place.fn(self.tickets, *padded, self.columns)
        self.tickets += 1
        return tile

    def target(self, level):
        return -(-self.lives[level] // 64) * self.columns

    def blocks(self, level):
        """Row blocks and column blocks with live rows."""
        rows = range(0, self.lives[level], 64)
        return {(level, row, column) for row in rows for column in range(self.columns)}


class Program:
    """One multiprocessor: a ring, mail, three roles."""

    SLOTS = 8

    def __init__(self, device, programs):
        self.device, self.programs = device, programs
        self.ring = [Stage() for _ in range(device.S)]
        self.full = [Barrier(1) for _ in self.ring]
        self.empty = [Barrier(2) for _ in self.ring]
        self.mail = [None] * self.SLOTS
        self.sent = [Barrier(1) for _ in self.mail]
        self.loads = []
        self.sure = -1
        self.roles = [self.produce(), self.consume(0), self.consume(1)]

    def tell(self, number, tile):
        device = self.device
        producers = device.producers.get(tile[0], [])
        ready = self.sure == tile[0] or all(
            device.counters[p] >= device.target(p) for p in producers
        )
        self.sure = tile[0] if ready else self.sure
        self.mail[number % self.SLOTS] = number, tile, ready
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
        self.tell(0, tile)
        while tile[0] >= 0:
            steps = self.device.steps[tile[0]]
            middle = max(steps // 2, fed)
            step = yield from self.feed(tile, step, fed, middle)
            following = self.device.take()
            step = yield from self.feed(tile, step, middle, steps)
            number += 1
            self.tell(number, following)
            tile, fed = following, 0

    def read(self, number):
        found, tile, ready = self.mail[number % self.SLOTS]
        assert found == number, "a message was overwritten"
        return tile, ready

    def await_message(self, number):
        while not self.sent[number % self.SLOTS].passes(number // self.SLOTS & 1):
            yield

    def give(self, c, step):
        s = step % self.device.S
        self.ring[s].used_by.discard(c)
        self.empty[s].arrive()

    def await_full(self, step, what):
        s = step % self.device.S
        while not self.full[s].passes(step // self.device.S & 1):
            yield
        assert self.ring[s].holds == what
        yield

    def consume(self, c):
        device, step, number, held = self.device, 0, 0, False
        yield from self.await_message(0)
        while self.read(number)[0][0] >= 0:
            (level, row, column), _ = self.read(number)
            steps, row = device.steps[level], row + 64 * c
            if row < device.lives[level]:
                held = yield from self.multiply(c, step, number, held, (level, row, column))
            else:
                if held:
                    self.give(c, step - 2)
                    self.give(c, step - 1)
                for k in range(steps):
                    yield from self.await_full(step + k, (self.read(number)[0], k))
                    self.give(c, step + k)
                yield from self.await_message(number + 1)
                held = False
            step, number = step + steps, number + 1
        device.left += 1
        if device.left == 2 * self.programs:
            device.at_the_end = (set(device.done), list(device.counters))
            device.tickets, device.left = 0, 0
            device.counters = [0] * len(device.lives)

    def multiply(self, c, step, number, held, block):
        device, level = self.device, block[0]
        steps, last = device.steps[level], level == len(device.lives) - 1
        hold = device.keep and last
        for k in range(steps):
            yield from self.await_full(step + k, (self.read(number)[0], k))
            if k == 0 and held:
                self.give(c, step - 2)
                self.give(c, step - 1)
            free = k - device.outstanding
            if free >= 0 and k < steps - 1 and not (hold and free >= steps - 2):
                self.give(c, step + free)
        yield from self.await_message(number + 1)
        if not hold:
            for k in range(steps - 1 - device.outstanding, steps):
                self.give(c, step + k)
        for producer in device.producers[level]:
            yield
            if not self.read(number)[1]:
                while device.counters[producer] < device.target(producer):
                    yield
            assert device.blocks(producer) <= device.done, "read before it was written"
        yield
        self.read(number)
        assert block not in device.done
        device.done.add(block)
        if not last:
            device.counters[level] += 1
        return hold


def launch(device):
    """Programs start when others end, if fewer are resident than launched."""
    rng, count = device.rng, device.rng.randint(1, 5)
    waiting = [Program(device, count) for _ in range(count)]
    resident = rng.randint(1, count)
    running = []
    for _ in range(400_000):
        while waiting and len(running) < resident:
            running.append(waiting.pop())
        if not running:
            return
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


@pytest.mark.parametrize("seed", range(200))
def test_nothing_hangs_and_nothing_is_overwritten(seed):
    device = Device(random.Random(seed))
    for _ in range(2):  # the second begins as the first has left tickets and counters
        launch(device)
        done, counters = device.at_the_end
        assert done == set().union(*(device.blocks(level) for level in range(len(device.lives))))
        assert counters[:-1] == [device.target(level) for level in range(len(device.lives) - 1)]
        assert (device.tickets, device.left) == (0, 0)
        device.done = set()
