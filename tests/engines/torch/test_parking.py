"""Who has which slot while samples come and go between their turns."""

from __future__ import annotations

import random

from engines.torch.rollout import Parking


class Named:
    """Slots that hold names."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: list[int | None] = [None] * slots

    def move(self, source: int, target: int) -> None:
        self.held[target] = self.held[source]

    def swap(self, one: int, other: int) -> None:
        self.held[one], self.held[other] = self.held[other], self.held[one]


def test_whoever_is_said_to_be_there_is_there_and_running_samples_keep_their_slots() -> None:
    rng, slots = random.Random(0), Named(6)
    parking, running, found = Parking(slots), list[int](), 0
    tokens = {sample: [sample, 7] for sample in range(12)}
    for _ in range(3000):
        idle = [sample for sample in tokens if sample not in running]
        if len(running) < slots.slots and idle and rng.random() < 0.5:
            sample = rng.choice(idle)
            if rng.random() < 0.1:
                tokens[sample] = [sample, rng.randrange(100)]  # it begins again, by other tokens
            kept = parking.bring(sample, [*tokens[sample], 1, 2], len(running))
            assert kept in (0, len(tokens[sample]) - 1)
            assert not kept or slots.held[len(running)] == hash(tuple(tokens[sample]))
            found += bool(kept)
            running.append(sample)
            tokens[sample] = [*tokens[sample], 1, 2][:20]
            slots.held[len(running) - 1] = hash(tuple(tokens[sample]))
        elif running:
            row = rng.randrange(len(running))
            sample, last = running[row], running.pop()
            if row < len(running):
                slots.swap(len(running), row)
                running[row] = last
            parking.park(sample, tokens[sample], len(running))
        assert [slots.held[row] for row in range(len(running))] == [hash(tuple(tokens[sample])) for sample in running]
    assert found > 300
    parking.clear()
    assert parking.bring(99, [1, 2], 0) == 0
