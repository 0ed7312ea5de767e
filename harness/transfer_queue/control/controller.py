"""The control plane: who may have which rows now. A pure state machine: no I/O, no waiting, times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from harness.transfer_queue.columns import Rows
from harness.transfer_queue.control import status
from harness.transfer_queue.control.asks import Answer, Ask, check_one_rank, check_task
from harness.transfer_queue.control.balance import SPLITS
from harness.transfer_queue.control.latency import Latency
from harness.transfer_queue.control.leases import Lease, Leases
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.control.partitions import Partitions
from harness.transfer_queue.control.policies import POLICIES
from harness.transfer_queue.control.precedence import Precedence, precedence
from harness.transfer_queue.control.progress import Positions, Progress
from harness.transfer_queue.control.shares import Share, Shares
from harness.transfer_queue.frames import Frame, Handout
from harness.transfer_queue.spec import QueueSpec


class QueueClosed(RuntimeError):
    """No partition can be created any more."""


class Controller:
    """Methods that can make rows available (or exhaust a partition) return the tasks whose readers should ask again."""

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.closed = False
        self._partitions = Partitions(spec)
        self._leases = Leases()
        self._bounds: dict[tuple[str, str], int] = {}
        self._handed = dict.fromkeys(spec.tasks, 0)  # rows handed out and not put back, over all partitions
        self._shares = Shares(spec)
        self._latency = {task: Latency() for task in spec.tasks}
        self._weighed = spec.weighed
        self._tick = 0  # puts, over all partitions
        self._now = 0.0  # the latest time that a caller told

    # -- partitions

    def check_new(self, name: str, rows: Iterable[int], group_size: int) -> Rows:
        """The rows of a partition that can be created once there is room; QueueClosed or ValueError if it never can."""
        if self.closed:
            raise QueueClosed(f"partition {name!r} comes after the queue was closed")
        return self._partitions.check_new(name, rows, group_size)

    def has_room(self, rows: int) -> bool:
        return self.spec.capacity_rows is None or self._partitions.rows + rows <= self.spec.capacity_rows

    def has_bytes(self, size: int) -> bool:
        return self.spec.capacity_bytes is None or self._partitions.nbytes + size <= self.spec.capacity_bytes

    def create(self, name: str, rows: Iterable[int], group_size: int) -> None:
        self._partitions.create(name, self.check_new(name, rows, group_size), group_size)

    def clear(self, name: str) -> list[str]:
        """Forget a partition, finished or not; ValueError while rows of a task with leases are out."""
        self.partition(name)  # or there is none
        for lease in self._leases.of(name):
            if self.spec.tasks[lease.task].lease_s is not None:
                raise ValueError(
                    f"partition {name!r} cannot be cleared: consumer {lease.consumer!r} of task {lease.task!r} holds "
                    f"rows of it (lease {lease.number}); acknowledge or release them first"
                )
        self._leases.forget(name)
        self._shares.forget(name)
        self._partitions.forget(name)
        return list(self.spec.tasks)

    def over(self) -> list[str]:
        """The partitions that all tasks are done with: every row finished, and no share that a rank has to collect."""
        return [p.name for p in self._partitions if p.over and not self._shares.any_of(p.name)]

    def close(self) -> list[str]:
        """No more partitions; what is there can still be written and read to its end."""
        self.closed = True
        return list(self.spec.tasks)

    def partition(self, name: str) -> Partition:
        """ValueError if there is none of this name, which says whether there was."""
        return self._partitions[name]

    # -- handing out

    def check_put(self, partition: str, rows: Rows, frame: Frame, lengths: Mapping[str, Rows]) -> Positions:
        """Where the rows are; ValueError for what the partition can never take."""
        target = self._partitions[partition]
        positions = target.find(rows)
        target.check_unwritten(positions, frame.sizes)
        for column in self._weighed & frame.sizes.keys():
            if column not in lengths or lengths[column].shape != rows.shape or lengths[column].dtype != rows.dtype:
                raise ValueError(f"a put of column {column!r} must bring the lengths of its {rows.size} rows")
        cap = self.spec.capacity_bytes
        if cap is not None and frame.nbytes > cap:
            raise ValueError(
                f"a put of {frame.nbytes} bytes is more than capacity_bytes={cap}: put fewer rows at a time"
            )
        return positions

    def put(self, partition: str, rows: Rows, frame: Frame, lengths: Mapping[str, Rows], now: float) -> list[str]:
        """The frame holds these rows; lengths: for each weighed column of it, int64 [rows]. ValueError, and nothing
        changed, for what the partition cannot take."""
        positions = self.check_put(partition, rows, frame, lengths)
        self._now, self._tick = now, self._tick + 1
        self._partitions.nbytes += frame.nbytes
        return self._partitions[partition].put(positions, frame, lengths, self._tick, now)

    def counted(self, ask: Ask) -> Ask:
        """As of now: the rows that its `first` counts from here on, counted from the queue's beginning."""
        if ask.first is None:
            return ask
        other, pairs = ask.first
        handed = self._handed[ask.task]
        return replace(ask, first=(other, tuple(sorted((below, handed + within) for below, within in pairs))))

    def request(self, ask: Ask, now: float) -> Handout | Answer:
        """Hand rows out, or say that there are none yet, or that there never will be. Asks that differ in nothing but
        a consumer of the same bound get the same answer."""
        self._now = now
        share = self._shares.next(ask) or self._form(ask)
        if share is None:
            return Answer.CLOSED if self._exhausted(ask) else Answer.WAIT
        partition = self._partitions[share.partition]
        progress = partition.tasks[ask.task]
        positions = partition.unfinished(ask.task, share.units)
        rows = partition.rows[positions]
        below = self.bound(ask.task, ask.consumer)
        if below is not None and (rows >= below).any():  # another reader formed it under a wider bound
            return Answer.WAIT
        self._shares.collect(ask, share)
        progress.start(share.units, below)
        self._handed[ask.task] += share.units.size * progress.unit_rows
        self._latency[ask.task].add(progress.waited(share.units, now))
        due = None if progress.spec.lease_s is None else now + progress.spec.lease_s
        lease = self._leases.issue(ask, share, due)
        frames, parts = partition.locate(positions, progress.spec.columns)
        return Handout(lease.number, share.partition, rows, frames, parts)

    def _form(self, ask: Ask) -> Share | None:
        """Take a micro-batch for all ranks, and leave each its share."""
        task = self.spec.tasks[ask.task]
        first = self._precedence(ask)
        for partition, progress, limit in self._in_turn(ask, first):
            least, most = _units(ask, progress, first.room)
            units = progress.take(least * task.ranks, most * task.ranks, limit, first.units.get(partition.name))
            if units is not None:
                parts = SPLITS[task.split](units, task.ranks, progress.weights(units))
                self._shares.form(ask.task, partition.name, parts, ask.count)
                return self._shares.next(ask)
        return None

    def _precedence(self, ask: Ask) -> Precedence:
        if ask.first is None:
            return Precedence(ask.count)
        return precedence(ask, list(self._partitions.asked(ask.partition)), self._handed[ask.task])

    def _in_turn(self, ask: Ask, first: Precedence) -> Iterator[tuple[Partition, Progress, int]]:
        """Where to look for rows, in this order, and the first unit of each that is beyond the consumer's bound."""
        below = self.bound(ask.task, ask.consumer)
        policy = POLICIES[self.spec.tasks[ask.task].policy]
        strict = policy.strict_partitions
        asked = (
            (partition, progress, progress.units if below is None else partition.limit(ask.task, below))
            for partition, progress in self._progress(ask)
            if progress.left and (partition.name in first.units if first.units else strict or len(progress.policy))
        )
        if strict and not first.units:
            return islice(asked, 1)  # nobody passes it over
        if policy.takes_turns:
            return iter(sorted(asked, key=lambda one: one[1].turn(one[2], first.units.get(one[0].name))))
        return asked

    def _exhausted(self, ask: Ask) -> bool:
        """No row is left for this reader, none can come back by itself, and no partition it asks for can come."""
        to_come = not self.closed and (ask.partition is None or ask.partition not in self._partitions)
        if self._partitions.was_cleared(ask.partition):
            return True
        return not to_come and all(progress.finished == progress.units for _, progress in self._progress(ask))

    def _progress(self, ask: Ask) -> Iterator[tuple[Partition, Progress]]:
        for partition in self._partitions.asked(ask.partition):
            yield partition, partition.tasks[ask.task]

    def bound(self, task: str, consumer: str) -> int | None:
        """The consumer gets only rows with ids less than this."""
        return self._bounds.get((task, consumer))

    def set_bound(self, task: str, consumer: str, below: int) -> None:
        """Only this consumer's asks can be answered otherwise by it."""
        check_task(self.spec, task)
        self._bounds[task, consumer] = below

    def drop(self, task: str, started: str, below: int) -> tuple[list[int], list[str]]:
        """Take out of `task` what it was not handed of that which `started` was handed under a bound of `below` or
        less: the rows, and whose readers should ask again."""
        check_task(self.spec, task)
        check_task(self.spec, started)
        check_one_rank(self.spec, task, "drop rows")
        rows: list[int] = []
        for partition in self._partitions:
            units = partition.started(task, started, below)
            progress = partition.tasks[task]
            progress.drop(units)
            rows += partition.rows[progress.positions(units)].tolist()
        return rows, [task]

    # -- leases

    def acknowledge(self, number: int) -> list[str]:
        """The rows of this lease are done with. LeaseExpired if they went back; twice is the same as once."""
        self._leases.check_kept(number)
        lease = self._leases.close(number)
        if lease is None:
            return []
        self._partitions[lease.share.partition].tasks[lease.task].acknowledged += lease.share.units.size
        return [lease.task]

    def give_back(self, number: int) -> list[str]:
        """The rows of this lease were not worked on: they go out again, unless they did so already."""
        lease = self._leases.close(number)
        return [] if lease is None else self._put_back(lease)

    def release(self, consumer: str) -> list[str]:
        """The consumer is dead: all that it has not acknowledged goes out again, whatever the task."""
        return self._lose([lease for lease in self._leases if lease.consumer == consumer])

    def lose(self, numbers: Iterable[int]) -> list[str]:
        """Whoever held these leases has gone: what tasks with leases handed out goes out again."""
        held = [lease for number in numbers if (lease := self._leases.get(number)) is not None]
        return self._lose([lease for lease in held if self.spec.tasks[lease.task].lease_s is not None])

    def expire(self, now: float) -> list[str]:
        """Put back what leases hold that ran out at or before `now`."""
        self._now = now
        return self._lose(self._leases.overdue(now))

    def _lose(self, leases: list[Lease]) -> list[str]:
        for lease in leases:
            self._leases.lose(lease)
        return sorted({task for lease in leases for task in self._put_back(lease)})

    def _put_back(self, lease: Lease) -> list[str]:
        """To whoever asks next; among several ranks, to the same one, so that the others' micro-batches still fit."""
        share = lease.share
        partition = self._partitions[share.partition]
        progress = partition.tasks[lease.task]
        units, untouched = partition.unfinished_units(lease.task, share.units)
        progress.acknowledged += share.units.size - units.size
        progress.stop(untouched)
        progress.wait_again(units, self._now)
        self._handed[lease.task] -= units.size * progress.unit_rows
        if self.spec.tasks[lease.task].ranks > 1:
            self._shares.put_back(lease.task, lease.rank, share)
        else:
            progress.give_back(units)
        return [lease.task]

    def next_due(self) -> float | None:
        """When a lease runs out next."""
        return self._leases.next_due()

    # -- what a person wants to know

    def explain(self, ask: Ask) -> str:
        """Why this ask is not served."""
        asked = list(self._partitions.asked(ask.partition))
        return status.explain(ask, asked, self.bound(ask.task, ask.consumer), self._precedence(ask))

    def slowest_task(self) -> str:
        """Why there is no room."""
        return status.slowest_task(list(self.spec.tasks), list(self._partitions))

    def describe(self) -> dict[str, Any]:
        """Plain numbers, by partition and task; see the folder's README."""
        partitions = list(self._partitions)
        return {
            "closed": self.closed,
            "live_rows": self._partitions.rows,
            "capacity_rows": self.spec.capacity_rows,
            "open_leases": len(self._leases),
            "bytes": self._partitions.nbytes,
            "column_bytes": {c: sum(p.column_bytes[c] for p in partitions) for c in self.spec.columns},
            "depth_samples": sum(p.depth() for p in partitions),
            "partitions": {p.name: p.describe() for p in partitions},
            "tasks": {t: status.describe_task(t, partitions, waited, self._now) for t, waited in self._latency.items()},
        }


def _units(ask: Ask, progress: Progress, room: int) -> tuple[int, int]:
    """(least, most) units a rank takes, of up to `room` rows; ValueError unless the ask's count is of whole groups."""
    if ask.count % progress.unit_rows:
        raise ValueError(
            f"task {ask.task!r} takes whole groups of {progress.unit_rows} rows: count {ask.count} is not a multiple"
        )
    most = min(ask.count, room) // progress.unit_rows
    return min(-(-ask.minimum // progress.unit_rows), most), most
