"""The control plane: who may have which rows now. A pure state machine: no I/O, no waiting, times are passed in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from harness.transfer_queue.control import reporting
from harness.transfer_queue.control.leases import Lease, Leases, Share, Shares
from harness.transfer_queue.control.partition import Partition, Partitions, Precedence, precedence
from harness.transfer_queue.control.policies import SPLITS, Units, policy_of
from harness.transfer_queue.control.progress import TaskProgress
from harness.transfer_queue.control.reporting import Latency
from harness.transfer_queue.control.spec import Bound, GetRequest, QueueSpec, Status, check_one_rank, check_task
from harness.transfer_queue.rows.columns import Rows, as_integers
from harness.transfer_queue.rows.frames import BatchAssignment, Frame


class QueueClosed(RuntimeError):
    """No partition can be created any more."""


class Controller:
    """Methods that can make rows available (or exhaust a partition) return the tasks whose readers should be tried
    again."""

    def __init__(self, spec: QueueSpec) -> None:
        self.spec = spec
        self.closed = False
        self._partitions = Partitions(spec)
        self._leases = Leases()
        self._bounds: dict[tuple[str, str], Bound] = {}
        self._dispatched = dict.fromkeys(spec.tasks, 0)  # rows dispatched and not put back, over all partitions
        self._shares = Shares(spec)
        self._latency = {task: Latency() for task in spec.tasks}
        self._weighed = spec.weighed
        self._tick = 0  # puts, over all partitions
        self._now = 0.0  # the latest time that a caller passed

    # -- partitions

    def check_new(self, name: str, rows: Iterable[int], group_size: int) -> Rows:
        """The rows of a partition that can be created once there is room; QueueClosed or ValueError if it never can."""
        if self.closed:
            raise QueueClosed(f"partition {name!r} comes after the queue was closed")
        return self._partitions.check_new(name, rows, group_size)

    def has_room(self, rows: int) -> bool:
        """Whether the queue may hold so many more rows."""
        return self.spec.capacity_rows is None or self._partitions.rows + rows <= self.spec.capacity_rows

    def create(self, name: str, rows: Iterable[int], group_size: int) -> None:
        """Create a partition. Raises ValueError for rows that it cannot have."""
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

    def in_the_way(self) -> list[str]:
        """The partitions that only background tasks are not done with."""
        return [p.name for p in self._partitions if p.gives_way and not self._shares.any_of(p.name)]

    def give_way(self, name: str) -> None:
        """The rows of this partition, which live on, take no room any more."""
        self._partitions.give_way(name)

    def close(self) -> list[str]:
        """No more partitions; what is there can still be written and read to its end."""
        self.closed = True
        return list(self.spec.tasks)

    def partition(self, name: str) -> Partition:
        """ValueError if there is none of this name, which says whether there was."""
        return self._partitions[name]

    # -- writing and dispatching

    def put(self, partition: str, rows: Rows, frame: Frame, lengths: Mapping[str, Rows], now: float) -> list[str]:
        """The frame holds these rows; lengths: for each weighed column of it, int64 [rows]. ValueError, and nothing
        changed, for what the partition cannot take."""
        target = self._partitions[partition]
        positions = target.find(rows)
        target.check_unwritten(positions, frame.sizes)
        for column in self._weighed & frame.sizes.keys():
            if column not in lengths or lengths[column].shape != rows.shape or lengths[column].dtype != rows.dtype:
                raise ValueError(f"a put of column {column!r} must bring the lengths of its {rows.size} rows")
        self._now, self._tick = now, self._tick + 1
        self._partitions.nbytes += frame.nbytes
        return target.put(positions, frame, lengths, self._tick, now)

    def anchored(self, request: GetRequest) -> GetRequest:
        """The request as of now: rows that its `first` counts from here on are counted from the queue's beginning."""
        if request.first is None:
            return request
        other, pairs = request.first
        so_far = self._dispatched[request.task]
        return replace(request, first=(other, tuple(sorted((below, so_far + within) for below, within in pairs))))

    def dispatch(self, request: GetRequest, now: float) -> BatchAssignment | Status:
        """Rows, or that there are none yet, or that there never will be. `request` is `anchored`; requests that differ
        in nothing but a consumer of the same bound (or a timeout) get the same answer."""
        self._now = now
        share = self._shares.next(request) or self._form(request)
        if share is None:
            return Status.CLOSED if self._exhausted(request) else Status.WAIT
        partition = self._partitions[share.partition]
        progress = partition.tasks[request.task]
        positions = partition.unfinished(request.task, share.units)
        rows = partition.rows[positions]
        bound = self.bound(request.task, request.consumer)
        if not bound.holds(rows):  # another reader formed it under a wider bound
            return Status.WAIT
        self._shares.collect(request, share)
        progress.start(share.units, bound.below)
        self._dispatched[request.task] += share.units.size * progress.unit_rows
        self._latency[request.task].add(progress.waited(share.units, now))
        due = None if progress.spec.lease_s is None else now + progress.spec.lease_s
        lease = self._leases.issue(request, share, due)
        frames, parts = partition.locate(positions, progress.spec.columns)
        return BatchAssignment(lease.number, share.partition, rows, frames, parts)

    def _form(self, request: GetRequest) -> Share | None:
        """Take a micro-batch for all ranks, and leave each its share."""
        if request.only is not None:
            return self._form_named(request, request.only)
        task = self.spec.tasks[request.task]
        first = self._precedence(request)
        for partition, progress, limit, among in self._in_turn(request, first):
            least, most = _units(request, progress, first.at_most)
            before = progress.taken
            units = progress.take(least * task.ranks, most * task.ranks, limit, among)
            if units is not None:
                parts = SPLITS[task.split](units, task.ranks, progress.weights(units), before)
                self._shares.form(request.task, partition.name, parts, request.count)
                return self._shares.next(request)
        return None

    def _form_named(self, request: GetRequest, rows: Sequence[int]) -> Share | None:
        """A share for the one reader that the task has: those of these rows that are in the partition of the first one,
        if they are ready."""
        partition = self._partitions.holding(rows[0])
        if partition is None or request.partition not in (None, partition.name):
            return None
        named = partition.among(as_integers(rows, "rows"))
        units = partition.tasks[request.task].units_of(partition.find(named))
        limit = partition.limit(request.task, self.bound(request.task, request.consumer).below)
        taken = partition.tasks[request.task].take_named(units, limit)
        if taken is None:
            return None
        self._shares.form(request.task, partition.name, [taken], request.count)
        return self._shares.next(request)

    def _precedence(self, request: GetRequest) -> Precedence:
        if request.first is None:
            return Precedence(request.count)
        return precedence(request, list(self._partitions.asked(request.partition)), self._dispatched[request.task])

    def _in_turn(
        self, request: GetRequest, first: Precedence
    ) -> Iterator[tuple[Partition, TaskProgress, int, Units | None]]:
        """Places to look for rows, in this order; the first unit of each that is beyond the reader's reach; and units
        that alone may go, where not all that are open may."""
        below, above = self._reach(request)
        policy = policy_of(self.spec.tasks[request.task].policy)
        strict = policy.strict_partitions
        asked = (
            (partition, progress, partition.limit(request.task, below), among)
            for partition, progress in self._progress(request)
            if progress.left and (partition.name in first.units if first.units else strict or len(progress.policy))
            if (among := partition.from_id(request.task, first.units.get(partition.name), above)) is None or among.size
        )
        if strict and not first.units:
            return islice(asked, 1)  # no reader passes it over
        if policy.takes_turns:
            return iter(sorted(asked, key=lambda one: one[1].turn(one[2], one[3])))
        return asked

    def _reach(self, request: GetRequest) -> Bound:
        """The consumer's bound, narrowed by the task's window."""
        bound, window = self.bound(request.task, request.consumer), self.spec.tasks[request.task].window
        oldest = None if window is None else next((p for p in self._partitions if p.tasks[request.task].left), None)
        if oldest is None or window is None:
            return bound
        end = oldest.first_open(request.task) + window
        return Bound(end if bound.below is None else min(bound.below, end), bound.above)

    def _exhausted(self, request: GetRequest) -> bool:
        """No row is left for this reader, none can come back by itself, and no partition it asks for can come."""
        to_come = not self.closed and (request.partition is None or request.partition not in self._partitions)
        if self._partitions.was_cleared(request.partition):
            return True
        return not to_come and all(progress.finished == progress.units for _, progress in self._progress(request))

    def _progress(self, request: GetRequest) -> Iterator[tuple[Partition, TaskProgress]]:
        for partition in self._partitions.asked(request.partition):
            yield partition, partition.tasks[request.task]

    def bound(self, task: str, consumer: str) -> Bound:
        """The consumer gets only rows within this."""
        return self._bounds.get((task, consumer), Bound(None))

    def set_bound(self, task: str, consumer: str, bound: Bound) -> None:
        """Only this consumer's requests can be answered otherwise by it."""
        check_task(self.spec, task)
        self._bounds[task, consumer] = bound

    def drop(self, task: str, started: str, below: int) -> tuple[list[int], list[str]]:
        """Take out of `task` what it was not handed yet of that which `started` was handed under a bound of `below` or
        less: the rows, and the tasks whose readers should be tried again."""
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

    def begin_again(self, partition: str, rows: Sequence[int]) -> list[str]:
        """Forget all that was written of these rows, and who was handed them."""
        target = self._partitions[partition]
        positions = target.find(as_integers(rows, "rows"))
        target.check_unsettled(positions)
        begun = {task: set(progress.units_of(positions).tolist()) for task, progress in target.tasks.items()}
        for lease in self._leases.of(partition):
            self._leases.without(lease, begun[lease.task])
        target.begin_again(positions)
        return list(self.spec.tasks)

    def give_up(self, partition: str, rows: Sequence[int]) -> list[str]:
        """Take these rows out of all tasks that are settled by no column."""
        target = self._partitions[partition]
        target.give_up(target.find(as_integers(rows, "rows")))
        return list(self.spec.tasks)

    def finish(self, task: str, rows: Iterable[int]) -> list[str]:
        """The task is done with these rows, of any partitions, which nobody was handed."""
        check_task(self.spec, task)
        check_one_rank(self.spec, task, "be told which rows are finished")
        ids = as_integers(rows, "rows")
        there = [(partition, here) for partition in self._partitions if (here := partition.among(ids)).size]
        if sum(here.size for _, here in there) < ids.size:
            raise ValueError(
                f"some of the rows {ids.tolist()[:20]} are in no partition: task {task!r} cannot finish them"
            )
        for partition, here in there:
            partition.finish(task, partition.find(here))
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

    def reassign(self, task: str, rows: Iterable[int], consumer: str) -> None:
        """Put what others hold of these rows into the hands of this consumer."""
        check_task(self.spec, task)
        ids = as_integers(rows, "rows")
        for partition, here in ((one, here) for one in self._partitions if (here := one.among(ids)).size):
            units = set(partition.tasks[task].units_of(partition.find(here)).tolist())
            for lease in self._leases.of(partition.name):
                if lease.task == task:
                    self._leases.reassign(lease, units, consumer)

    def lose(self, numbers: Iterable[int]) -> list[str]:
        """The holders of these leases have gone: of tasks with `lease_s`, what they held goes out again."""
        held = [lease for number in numbers if (lease := self._leases.get(number)) is not None]
        return self._lose([lease for lease in held if self.spec.tasks[lease.task].lease_s is not None])

    def expire(self, now: float) -> list[str]:
        """Put back what leases hold that ran out at or before `now`."""
        self._now = now
        late = self._leases.overdue(now)
        return self._lose(late) if late else []

    def _lose(self, leases: list[Lease]) -> list[str]:
        for lease in leases:
            self._leases.lose(lease)
        return sorted({task for lease in leases for task in self._put_back(lease)})

    def _put_back(self, lease: Lease) -> list[str]:
        """Give a lease's rows to the next reader; among several ranks, to the same one, so that the others'
        micro-batches still fit."""
        share = lease.share
        partition = self._partitions[share.partition]
        progress = partition.tasks[lease.task]
        units, untouched = partition.unfinished_units(lease.task, share.units)
        progress.acknowledged += share.units.size - units.size
        progress.stop(untouched)
        progress.wait_again(units, self._now)
        self._dispatched[lease.task] -= units.size * progress.unit_rows
        if self.spec.tasks[lease.task].ranks > 1:
            self._shares.put_back(lease.task, lease.rank, share)
        else:
            progress.give_back(units)
        return [lease.task]

    def next_due(self) -> float | None:
        """Time at which a lease runs out next."""
        return self._leases.next_due()

    # -- to files and back

    def open_leases(self) -> list[Lease]:
        """Leases that were dispatched and not acknowledged: of tasks without leases, all those of live partitions."""
        return list(self._leases)

    def frames(self) -> list[tuple[str, Frame]]:
        """The frames of all puts, with their partition, in order."""
        return [(partition.name, frame) for partition in self._partitions for frame in partition.frames]

    def state(self) -> dict[str, Any]:
        """All but the frames and what was measured, as plain data and arrays, shared with the controller: to be
        encoded at once."""
        return {
            "partitions": self._partitions.state(),
            "leases": self._leases.state(),
            "shares": self._shares.state(),
            "bounds": [(task, consumer, *bound) for (task, consumer), bound in self._bounds.items()],
            "dispatched": self._dispatched,
            "closed": self.closed,
            "tick": self._tick,
            "now": self._now,
        }

    def restore(self, state: dict[str, Any], frames: Mapping[str, Sequence[Frame]]) -> None:
        """A new one of the same spec goes on as that one was. frames: by partition, in the order of `frames`."""
        self._partitions.restore(state["partitions"], frames)
        self._leases.restore(state["leases"])
        self._shares.restore(state["shares"])
        self._bounds = {(task, consumer): Bound(*bound) for task, consumer, *bound in state["bounds"]}
        self._dispatched = state["dispatched"]
        self.closed = state["closed"]
        self._tick = state["tick"]
        self._now = state["now"]

    def shift(self, seconds: float) -> None:
        """The clock of the times that callers pass was put forward by so much: leases keep what they had left."""
        self._now += seconds
        self._leases.shift(seconds)
        self._partitions.shift(seconds)

    # -- reporting

    def explain(self, request: GetRequest) -> str:
        """Why this request is not served."""
        asked = list(self._partitions.asked(request.partition))
        return reporting.explain(
            request, self.spec.tasks[request.task], asked, self._reach(request), self._precedence(request)
        )

    def slowest_task(self) -> str:
        """Why there is no room."""
        return reporting.slowest_task(self.spec.waited_for, list(self._partitions))

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
            "tasks": {
                t: reporting.describe_task(t, partitions, self._latency[t], self._now) for t in self.spec.waited_for
            },
        }


def _units(request: GetRequest, progress: TaskProgress, rows: int) -> tuple[int, int]:
    """(least, most) units a rank takes, of up to `rows`; ValueError unless the request's count is of whole groups."""
    if request.count % progress.unit_rows:
        raise ValueError(
            f"task {request.task!r} takes whole groups of {progress.unit_rows} rows: count {request.count} is not a "
            "multiple"
        )
    most = min(request.count, rows) // progress.unit_rows
    return min(-(-request.least // progress.unit_rows), most), most
