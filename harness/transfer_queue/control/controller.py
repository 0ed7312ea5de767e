"""The control plane: who may have which rows now. A pure state machine: no I/O, no waiting, times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from harness.transfer_queue.columns import Rows, as_integers
from harness.transfer_queue.control import status
from harness.transfer_queue.control.asks import Answer, Ask, check_one_rank, check_task
from harness.transfer_queue.control.leases import Lease, Leases, Share
from harness.transfer_queue.control.partition import Partition, Progress
from harness.transfer_queue.control.policies import split
from harness.transfer_queue.control.precedence import Precedence, precedence
from harness.transfer_queue.frames import Frame, Handout
from harness.transfer_queue.spec import QueueSpec


class QueueClosed(RuntimeError):
    """No partition can be created any more."""


class Controller:
    """Methods that can make rows available (or exhaust a partition) return the tasks whose readers should ask again."""

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.closed = False
        self._partitions: dict[str, Partition] = {}  # in creation order
        self._cleared: set[str] = set()
        self._leases = Leases()
        self._bounds: dict[tuple[str, str], int] = {}
        self._handed = dict.fromkeys(spec.tasks, 0)  # rows handed out and not put back, over all partitions
        self._shares: dict[str, list[list[Share]]] = {  # formed and not collected, by task and rank
            task: [[] for _ in range(s.ranks)] for task, s in spec.tasks.items()
        }
        self._formed = 0
        self._tick = 0  # puts, over all partitions

    # -- partitions

    def check_new(self, name: str, rows: Iterable[int], group_size: int) -> Rows:
        """The rows of a partition that can be created once there is room; QueueClosed or ValueError if it never can."""
        ids = as_integers(rows, "rows").copy()
        cap = self.spec.capacity_rows
        if self.closed:
            raise QueueClosed(f"partition {name!r} comes after the queue was closed")
        if name in self._partitions or name in self._cleared:
            raise ValueError(f"partition {name!r} exists or was cleared: a name is used once")
        if not ids.size or np.unique(ids).size < ids.size:
            raise ValueError(f"partition {name!r} needs one or more different rows, not {ids.tolist()[:20]}")
        if group_size < 1 or ids.size % group_size:
            raise ValueError(f"partition {name!r} has {ids.size} rows, which are not whole groups of {group_size}")
        if cap is not None and ids.size > cap:
            raise ValueError(f"partition {name!r} has {ids.size} rows, more than capacity_rows={cap}")
        return ids

    def has_room(self, rows: int) -> bool:
        return self.spec.capacity_rows is None or self.live_rows + rows <= self.spec.capacity_rows

    def has_bytes(self, size: int) -> bool:
        return self.spec.capacity_bytes is None or self.live_bytes + size <= self.spec.capacity_bytes

    def create(self, name: str, rows: Iterable[int], group_size: int) -> None:
        self._partitions[name] = Partition(name, self.check_new(name, rows, group_size), group_size, self.spec)

    def clear(self, name: str) -> list[str]:
        """Forget a partition, finished or not; ValueError while rows of a task with leases are out."""
        self.partition(name)
        held = [lease for lease in self._leases if lease.share.partition == name]
        for lease in held:
            if self.spec.tasks[lease.task].lease_s is not None:
                raise ValueError(
                    f"partition {name!r} cannot be cleared: consumer {lease.consumer!r} of task {lease.task!r} holds "
                    f"rows of it (lease {lease.number}); acknowledge or release them first"
                )
        for lease in held:
            self._leases.close(lease.number)
        for ranks in self._shares.values():
            for shares in ranks:
                shares[:] = [share for share in shares if share.partition != name]
        del self._partitions[name]
        self._cleared.add(name)
        return list(self.spec.tasks)

    def over(self) -> list[str]:
        """The partitions that all tasks are done with: every row finished, and no share that a rank has to collect."""
        to_collect = {share.partition for ranks in self._shares.values() for shares in ranks for share in shares}
        return [p.name for p in self._live() if p.over and p.name not in to_collect]

    def close(self) -> list[str]:
        """No more partitions; what is there can still be written and read to its end."""
        self.closed = True
        return list(self.spec.tasks)

    def partition(self, name: str) -> Partition:
        """ValueError if there is none of this name, which says whether there was."""
        if name not in self._partitions:
            why = "was cleared" if name in self._cleared else f"is unknown; there are {list(self._partitions)}"
            raise ValueError(f"partition {name!r} {why}")
        return self._partitions[name]

    @property
    def live_rows(self) -> int:
        return sum(partition.rows.size for partition in self._partitions.values())

    @property
    def live_bytes(self) -> int:
        return sum(partition.nbytes for partition in self._partitions.values())

    # -- handing out

    def check_put(self, partition: str, rows: Rows, frame: Frame) -> None:
        """ValueError for what the partition can never take."""
        target = self.partition(partition)
        target.check_unwritten(target.find(rows), frame.sizes)
        cap = self.spec.capacity_bytes
        if cap is not None and frame.nbytes > cap:
            raise ValueError(
                f"a put of {frame.nbytes} bytes is more than capacity_bytes={cap}: put fewer rows at a time"
            )

    def put(self, partition: str, rows: Rows, frame: Frame) -> list[str]:
        """The frame holds these rows. ValueError, and nothing changed, for what the partition cannot take."""
        target = self.partition(partition)
        positions = target.find(rows)
        target.check_unwritten(positions, frame.sizes)
        self._tick += 1
        return target.put(positions, frame, self._tick)

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
        share = self._waiting_share(ask) or self._form(ask)
        if share is None:
            return Answer.CLOSED if self._exhausted(ask) else Answer.WAIT
        partition = self._partitions[share.partition]
        progress = partition.tasks[ask.task]
        positions = progress.positions(share.units)
        rows = partition.rows[positions]
        below = self.bound(ask.task, ask.consumer)
        if below is not None and (rows >= below).any():  # another rank formed it under a wider bound
            return Answer.WAIT
        self._shares[ask.task][ask.rank].remove(share)
        progress.start(share.units, below)
        self._handed[ask.task] += rows.size
        lease_s = self.spec.tasks[ask.task].lease_s
        due = None if lease_s is None else now + lease_s
        lease = self._leases.issue(ask.task, ask.rank, ask.consumer, share, due)
        frames, parts = partition.locate(positions, progress.spec.columns)
        return Handout(lease.number, share.partition, rows, frames, parts)

    def _waiting_share(self, ask: Ask) -> Share | None:
        for share in self._shares[ask.task][ask.rank]:
            if ask.partition in (None, share.partition):
                if share.count != ask.count:
                    raise ValueError(
                        f"rank {ask.rank} of task {ask.task!r} asks for {ask.count} rows where another rank asked for "
                        f"{share.count}: ranks must ask for the same"
                    )
                return share
        return None

    def _form(self, ask: Ask) -> Share | None:
        """Take a micro-batch for all ranks, and leave each its share."""
        ranks = self._shares[ask.task]
        first = self._precedence(ask)
        for partition, progress, limit in self._in_turn(ask, first):
            least, most = _units(ask, progress, first.room)
            units = progress.take(least * len(ranks), most * len(ranks), limit, first.units.get(partition.name))
            if units is not None:
                for shares, part in zip(ranks, split(units, len(ranks)), strict=True):
                    shares.append(Share(self._formed, partition.name, part, ask.count))
                self._formed += 1
                return ranks[ask.rank][-1]
            if progress.left and progress.policy.strict_partitions and not first.units:
                return None
        return None

    def _precedence(self, ask: Ask) -> Precedence:
        return precedence(ask, [partition for partition, _ in self._progress(ask)], self._handed[ask.task])

    def _in_turn(self, ask: Ask, first: Precedence) -> list[tuple[Partition, Progress, int]]:
        """Where to look for rows, in this order, and the first unit of each that is beyond the consumer's bound."""
        below = self.bound(ask.task, ask.consumer)
        asked = [
            (partition, progress, partition.limit(ask.task, below))
            for partition, progress in self._progress(ask)
            if progress.left and (not first.units or partition.name in first.units)
        ]
        if len(asked) > 1:
            asked.sort(key=lambda one: one[1].turn(one[2], first.units.get(one[0].name)))
        return asked

    def _exhausted(self, ask: Ask) -> bool:
        """No row is left for this reader, none can come back by itself, and no partition it asks for can come."""
        to_come = not self.closed and (ask.partition is None or ask.partition not in self._partitions)
        if ask.partition in self._cleared:
            return True
        return not to_come and all(progress.finished == progress.units for _, progress in self._progress(ask))

    def _progress(self, ask: Ask) -> Iterator[tuple[Partition, Progress]]:
        for name in self._partitions if ask.partition is None else [ask.partition]:
            if name in self._partitions:
                yield self._partitions[name], self._partitions[name].tasks[ask.task]

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
        for partition in self._live():
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
        held = set(numbers)
        return self._lose([x for x in self._leases if x.number in held and self.spec.tasks[x.task].lease_s is not None])

    def expire(self, now: float) -> list[str]:
        """Put back what leases hold that ran out at or before `now`."""
        return self._lose(self._leases.overdue(now))

    def _lose(self, leases: list[Lease]) -> list[str]:
        for lease in leases:
            self._leases.lose(lease)
        return sorted({task for lease in leases for task in self._put_back(lease)})

    def _put_back(self, lease: Lease) -> list[str]:
        """To whoever asks next; among several ranks, to the same rank, so that the others' micro-batches still fit."""
        progress = self._partitions[lease.share.partition].tasks[lease.task]
        progress.start(lease.share.units, None)
        self._handed[lease.task] -= lease.share.units.size * progress.unit_rows
        if self.spec.tasks[lease.task].ranks > 1:
            shares = self._shares[lease.task][lease.rank]
            shares.append(lease.share)
            shares.sort(key=lambda share: share.number)
        else:
            progress.give_back(lease.share.units)
        return [lease.task]

    def next_due(self) -> float | None:
        """When a lease runs out next."""
        return self._leases.next_due()

    # -- what a person wants to know

    def explain(self, ask: Ask) -> str:
        """Why this ask is not served."""
        asked = [partition for partition, _ in self._progress(ask)]
        return status.explain(ask, asked, self.bound(ask.task, ask.consumer), self._precedence(ask))

    def slowest_task(self) -> str:
        """Why there is no room."""
        return status.slowest_task(list(self.spec.tasks), self._live())

    def describe(self) -> dict[str, Any]:
        """Plain numbers, by partition and task; see the folder's README."""
        return {
            "closed": self.closed,
            "live_rows": self.live_rows,
            "capacity_rows": self.spec.capacity_rows,
            "open_leases": len(self._leases),
            "bytes": self.live_bytes,
            "depth_samples": sum(p.depth() for p in self._live()),
            "partitions": {p.name: p.describe() for p in self._live()},
        }

    def _live(self) -> list[Partition]:
        return list(self._partitions.values())


def _units(ask: Ask, progress: Progress, room: int) -> tuple[int, int]:
    """(least, most) units a rank takes, of up to `room` rows; ValueError unless the ask's count is of whole groups."""
    if ask.count % progress.unit_rows:
        raise ValueError(
            f"task {ask.task!r} takes whole groups of {progress.unit_rows} rows: count {ask.count} is not a multiple"
        )
    most = min(ask.count, room) // progress.unit_rows
    return min(-(-ask.minimum // progress.unit_rows), most), most
