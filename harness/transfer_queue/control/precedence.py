"""What a request wants first, and how much else may go before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.transfer_queue.control.asks import Ask
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.control.policies import Units


@dataclass(frozen=True, slots=True)
class Precedence:
    """At most `room` rows a rank, and where `units` (by partition) are named, none but these: all that is left of what
    was started under a bound of `below` or less."""

    room: int
    below: int | None = None
    units: Mapping[str, Units] = field(default_factory=dict)


def precedence(ask: Ask, asked: Sequence[Partition], handed: int) -> Precedence:
    """asked: the partitions that rows may come from; handed: rows that the task was handed so far.

    The slack of a pair (below, by) is how many other rows may still go before all that was started under `below`. What
    a lower bound started, a higher one includes: so units of the first pair without slack cost nothing but the slack
    of the pairs before it, which limits how many go at once.
    """
    room = ask.count
    if ask.first is None:
        return Precedence(room)
    other, pairs = ask.first
    progress = [p.tasks[ask.task] for p in asked]
    unit = max((p.unit_rows for p in progress if p.left), default=1)
    for below, by in pairs:
        counts = [partition.count_started(ask.task, other, below) for partition in asked]
        rows = sum(count * p.unit_rows for count, p in zip(counts, progress, strict=True))
        if not rows:
            continue
        slack = by - handed - rows
        if slack < unit:
            started = {p.name: p.started(ask.task, other, below) for p in asked}
            return Precedence(room, below, {name: units for name, units in started.items() if units.size})
        room = min(room, slack)
    return Precedence(room)
