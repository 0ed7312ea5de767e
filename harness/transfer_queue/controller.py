"""The control plane: who may have which rows now. A pure state machine: no I/O, no waiting, times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from harness.transfer_queue.columns import Rows, as_integers
from harness.transfer_queue.leases import Lease, Leases, Share
from harness.transfer_queue.partition import Partition, Positions, Progress
from harness.transfer_queue.policies import split
from harness.transfer_queue.spec import QueueSpec


class QueueClosed(RuntimeError):
    """No partition can be created any more."""


class Answer(Enum):
    WAIT = "not now"
    CLOSED = "nothing is left, and nothing will come"


@dataclass(frozen=True, slots=True)
class Ask:
    """What one `get` wants: `minimum` to `count` rows for each rank."""

    task: str
    count: int
    minimum: int
    consumer: str
    rank: int
    partition: str | None


@dataclass(frozen=True, slots=True)
class Grant:
    """Rows handed out, by id and by position in their partition, under a lease."""

    lease: int
    task: str
    partition: str
    rows: Rows
    positions: Positions


class Controller:
    """Methods that can make rows available (or exhaust a partition) return the tasks whose readers should ask again."""

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.closed = False
        self._partitions: dict[str, Partition] = {}  # in creation order
        self._cleared: set[str] = set()
        self._leases = Leases()
        self._bounds: dict[tuple[str, str], int] = {}
        self._shares: dict[str, list[list[Share]]] = {  # formed and not collected, by task and rank
            task: [[] for _ in range(s.ranks)] for task, s in spec.tasks.items()
        }
        self._formed = 0

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

    # -- handing out

    def check(self, ask: Ask) -> None:
        """ValueError for what can never be served."""
        if ask.task not in self.spec.tasks:
            raise ValueError(f"task {ask.task!r} is unknown; there are {sorted(self.spec.tasks)}")
        ranks = self.spec.tasks[ask.task].ranks
        if not 0 <= ask.rank < ranks:
            raise ValueError(f"rank {ask.rank} of task {ask.task!r} is outside its {ranks} ranks")
        if not 1 <= ask.minimum <= ask.count:
            raise ValueError(f"a get takes 1 <= minimum <= count, not minimum={ask.minimum}, count={ask.count}")

    def request(self, ask: Ask, now: float) -> Grant | Answer:
        """Hand rows out, or say that there are none yet, or that there never will be."""
        share = self._waiting_share(ask) or self._form(ask)
        if share is None:
            return Answer.CLOSED if self._exhausted(ask) else Answer.WAIT
        partition = self._partitions[share.partition]
        positions = partition.tasks[ask.task].positions(share.units)
        rows = partition.rows[positions]
        below = self._bounds.get((ask.task, ask.consumer))
        if below is not None and (rows >= below).any():  # another rank formed it under a wider bound
            return Answer.WAIT
        self._shares[ask.task][ask.rank].remove(share)
        lease_s = self.spec.tasks[ask.task].lease_s
        due = None if lease_s is None else now + lease_s
        lease = self._leases.issue(ask.task, ask.rank, ask.consumer, share, due)
        return Grant(lease.number, ask.task, share.partition, rows, positions)

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
        below = self._bounds.get((ask.task, ask.consumer))
        for partition, progress in self._progress(ask):
            least, most = _units(ask, progress)
            units = progress.take(least * len(ranks), most * len(ranks), partition.limit_row(below))
            if units is not None:
                for shares, part in zip(ranks, split(units, len(ranks)), strict=True):
                    shares.append(Share(self._formed, partition.name, part, ask.count))
                self._formed += 1
                return ranks[ask.rank][-1]
            if progress.left and progress.policy.strict_partitions:
                return None
        return None

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

    def set_bound(self, task: str, consumer: str, below: int) -> list[str]:
        if task not in self.spec.tasks:
            raise ValueError(f"task {task!r} is unknown; there are {sorted(self.spec.tasks)}")
        self._bounds[task, consumer] = below
        return [task]

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

    def expire(self, now: float) -> list[str]:
        """Put back what leases hold that ran out at or before `now`."""
        return self._lose(self._leases.overdue(now))

    def _lose(self, leases: list[Lease]) -> list[str]:
        for lease in leases:
            self._leases.lose(lease)
        return sorted({task for lease in leases for task in self._put_back(lease)})

    def _put_back(self, lease: Lease) -> list[str]:
        """To whoever asks next; among several ranks, to the same rank, so that the others' micro-batches still fit."""
        if self.spec.tasks[lease.task].ranks > 1:
            shares = self._shares[lease.task][lease.rank]
            shares.append(lease.share)
            shares.sort(key=lambda share: share.number)
        else:
            self._partitions[lease.share.partition].tasks[lease.task].give_back(lease.share.units)
        return [lease.task]

    def next_due(self) -> float | None:
        """When a lease runs out next."""
        return self._leases.next_due()

    # -- what a person wants to know

    def explain(self, ask: Ask) -> str:
        """Why this ask is not served: the rows that are left and the columns that they lack."""
        what = f"task {ask.task!r} waits for {ask.minimum} rows"
        below = self._bounds.get((ask.task, ask.consumer))
        if below is not None:
            what += f" with ids below {below} (the bound of consumer {ask.consumer!r})"
        for partition, progress in self._progress(ask):
            if progress.finished < progress.units:
                ready, left = len(progress.policy) * progress.unit_rows, progress.left * progress.unit_rows
                columns = ", ".join(progress.spec.columns)
                return (
                    f"{what} of partition {partition.name!r}: {ready} of the {left} rows left are ready; it reads "
                    f"{columns}; rows that lack a column: {partition.missing(ask.task) or 'none'}"
                )
        return f"{what} of {'any partition' if ask.partition is None else repr(ask.partition)}: there is none"

    def slowest_task(self) -> str:
        """The task with most rows to finish, for the error of a writer that finds no room."""
        to_do = {
            task: sum((p.tasks[task].units - p.tasks[task].finished) * p.tasks[task].unit_rows for p in self._live())
            for task in self.spec.tasks
        }
        if not any(to_do.values()):
            return "every task is done: clear a partition"
        task = max(to_do, key=lambda name: to_do[name])
        oldest = next(p for p in self._live() if p.tasks[task].finished < p.tasks[task].units)
        lacking = oldest.missing(task) or "none"
        return (
            f"the slowest task is {task!r} with {to_do[task]} rows to do, the oldest in {oldest.name!r} "
            f"(rows that lack a column: {lacking})"
        )

    def describe(self) -> dict[str, Any]:
        """Plain numbers, by partition and task; see the folder's README."""
        return {
            "closed": self.closed,
            "live_rows": self.live_rows,
            "capacity_rows": self.spec.capacity_rows,
            "open_leases": len(self._leases),
            "depth_samples": sum(p.depth() for p in self._live()),
            "partitions": {p.name: p.describe() for p in self._live()},
        }

    def _live(self) -> list[Partition]:
        return list(self._partitions.values())


def _units(ask: Ask, progress: Progress) -> tuple[int, int]:
    """(least, most) units a rank of this ask takes; ValueError unless count is of whole groups."""
    if ask.count % progress.unit_rows:
        raise ValueError(
            f"task {ask.task!r} takes whole groups of {progress.unit_rows} rows: count {ask.count} is not a multiple"
        )
    return -(-ask.minimum // progress.unit_rows), ask.count // progress.unit_rows
