"""The parts of a queue (columns, the tasks that read them, how much it may hold), and what a get asks of it."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from harness.transfer_queue.control.policies import POLICIES, SPLITS, policy_of
from harness.transfer_queue.rows.columns import Column, ColumnSpec, Ragged, Rows

_FEW = 4096

Self = TypeVar("Self")
Returned = TypeVar("Returned")
Options = ParamSpec("Options")


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One kind of reader; each row is dispatched to it once.

    columns: what it reads, all of which must be written before a row is ready for it. policy: a key of
    `policies.POLICIES`, or `package.module:Class` of one of your own. ranks: data-parallel ranks that share each
    micro-batch out among them. whole_groups: a group is dispatched whole, to one rank. lease_s: seconds a reader has
    to acknowledge; then its rows go out again. None: a row is consumed when dispatched. weight: a ragged column of
    `columns`, or several; a row weighs the length of its cells, a group the sum of its rows. split: a key of
    `policies.SPLITS`: how a micro-batch is cut into shares for the ranks. writes: columns that its readers write,
    perhaps a row at a time. A row that has them is done, whichever reader wrote them: what goes out again goes out
    without it. settled_by: a column; until a row has it, it may begin again (`TransferQueue.begin_again`), so that
    readers wait for it rather than hear that nothing is left. window: rows are numbered in the order of the partitions,
    and none goes out whose id is by so much, or more, above the first that did not. background: nobody waits for it.
    Rows that only such tasks have still to finish stay where they are, but take no room that others wait for, and count
    in no depth.
    """

    columns: tuple[str, ...]
    policy: str = "fifo"
    ranks: int = 1
    whole_groups: bool = False
    lease_s: float | None = None
    weight: str | tuple[str, ...] = ()
    split: str = "contiguous"
    writes: tuple[str, ...] = ()
    settled_by: str | None = None
    window: int | None = None
    background: bool = False

    @property
    def weighed_by(self) -> tuple[str, ...]:
        """The columns that rows are weighed by."""
        return (self.weight,) if isinstance(self.weight, str) else self.weight


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """Raises ValueError with the offending value for anything that cannot work.

    capacity_rows: rows that may live in the queue at a time, over all partitions but those that only background tasks
    are not done with (None = no cap).
    """

    columns: Mapping[str, ColumnSpec]
    tasks: Mapping[str, TaskSpec]
    capacity_rows: int | None = None

    def __post_init__(self) -> None:
        if self.capacity_rows is not None and self.capacity_rows < 1:
            raise ValueError(f"capacity_rows must be at least 1, not {self.capacity_rows}")
        for name, task in self.tasks.items():
            self._check(name, task)

    def check_columns(self, rows: int, columns: Mapping[str, Column]) -> dict[str, Rows]:
        """Check what is to be written for so many rows: ValueError names what does not fit the schema. Returns the
        lengths that rows are weighed by, of those columns that some task weighs by."""
        for name, column in columns.items():
            if name not in self.columns:
                raise ValueError(f"column {name!r} is unknown; the schema has {sorted(self.columns)}")
            self.columns[name].check(name, rows, column)
        weighed = self.weighed
        return {name: c.lengths for name, c in columns.items() if name in weighed and isinstance(c, Ragged)}

    @property
    def weighed(self) -> frozenset[str]:
        """The columns that some task weighs rows by: a put of one brings its lengths."""
        return frozenset(column for task in self.tasks.values() for column in task.weighed_by)

    @property
    def waited_for(self) -> list[str]:
        """The tasks that are not in the background."""
        return [name for name, task in self.tasks.items() if not task.background]

    def _check(self, name: str, task: TaskSpec) -> None:
        if isinstance(task.columns, str) or not task.columns or len(set(task.columns)) < len(task.columns):
            raise ValueError(f"task {name!r} must read one or more different columns, not {task.columns!r}")
        unknown = sorted(set(task.columns) - set(self.columns))
        if unknown:
            raise ValueError(f"task {name!r} reads unknown columns {unknown}; the schema has {sorted(self.columns)}")
        if task.policy not in POLICIES and ":" not in task.policy:
            raise ValueError(f"task {name!r} has unknown policy {task.policy!r}; there are {sorted(POLICIES)}")
        if task.ranks < 1:
            raise ValueError(f"task {name!r} needs at least one rank, not {task.ranks}")
        if task.lease_s is not None and task.lease_s <= 0:
            raise ValueError(f"task {name!r} needs a lease of more than 0 seconds, not {task.lease_s}")
        if task.window is not None and task.window < 1:
            raise ValueError(f"task {name!r} needs a window of at least 1 row, not {task.window}")
        unknown = sorted(set(task.writes) - set(self.columns))
        if unknown:
            raise ValueError(f"task {name!r} writes unknown columns {unknown}; the schema has {sorted(self.columns)}")
        if task.writes and task.ranks > 1:
            raise ValueError(
                f"task {name!r} has several readers a micro-batch: what they write says nothing of a share"
            )
        if task.settled_by is not None:
            self._check_settled(name, task, task.settled_by)
        self._check_weight(name, task)

    def _check_settled(self, name: str, task: TaskSpec, column: str) -> None:
        if column not in self.columns:
            raise ValueError(f"task {name!r} is settled by unknown column {column!r}; there are {sorted(self.columns)}")
        if task.lease_s is not None or task.ranks > 1:
            raise ValueError(f"task {name!r} is settled by {column!r}: give it one rank, and no lease")

    def _check_weight(self, name: str, task: TaskSpec) -> None:
        if task.split not in SPLITS:
            raise ValueError(f"task {name!r} has unknown split {task.split!r}; there are {sorted(SPLITS)}")
        for what, weighs in ((task.policy, policy_of(task.policy).weighs), (task.split, SPLITS[task.split].weighs)):
            if weighs and not task.weight:
                raise ValueError(f"task {name!r} is {what!r} and needs a weight: a ragged column that it reads")
        for column in task.weighed_by:
            if column not in task.columns:
                raise ValueError(f"task {name!r} is weighed by column {column!r}, which it does not read")
            if not self.columns[column].ragged:
                raise ValueError(f"task {name!r} is weighed by column {column!r}, which is not ragged")


class Bound(NamedTuple):
    """Ids of the rows that a consumer gets: less than `below` (None: any), and `above` or more."""

    below: int | None
    above: int = 0

    def holds(self, rows: Rows) -> bool:
        """Whether all of these are within."""
        above = not self.above or (rows >= self.above).all()
        return bool(above and (self.below is None or (rows < self.below).all()))


First = tuple[str, tuple[tuple[int, int], ...]]
"""(other, ((below, within), ...)): what task `other` was dispatched under a bound of `below` or less is to be among the
next `within` rows of this task."""


class Status(Enum):
    """Why there are no rows."""

    WAIT = "not now"
    CLOSED = "nothing is left, and nothing will come"


@dataclass(frozen=True, slots=True)
class GetRequest:
    """The request of one `get`: `minimum` (`count` unless given) to `count` rows of a task for each rank. What the
    options mean stands at `queue.TransferQueue.get`."""

    task: str
    count: int
    _: KW_ONLY
    minimum: int | None = None
    consumer: str = "0"
    rank: int = 0
    partition: str | None = None
    first: First | None = None
    only: tuple[int, ...] | None = None
    timeout_s: float | None = None

    @property
    def least(self) -> int:
        """The least rows that it takes."""
        return self.count if self.minimum is None else self.minimum

    def check(self, spec: QueueSpec) -> None:
        """ValueError for what can never be served."""
        check_task(spec, self.task)
        task = spec.tasks[self.task]
        if not 0 <= self.rank < task.ranks:
            raise ValueError(f"rank {self.rank} of task {self.task!r} is outside its {task.ranks} ranks")
        if not 1 <= self.least <= self.count:
            raise ValueError(f"a get takes 1 <= minimum <= count, not minimum={self.least}, count={self.count}")
        if self.first is not None:
            check_task(spec, self.first[0])
            check_one_rank(spec, self.task, "get what comes first")
            check_few("pairs that come first", len(self.first[1]))
        if self.only is not None:
            check_one_rank(spec, self.task, "get rows by their ids")
            check_few("rows by their ids", len(self.only))
            if self.first is not None or not self.least == self.count == len(self.only):
                raise ValueError(f"a get of only {len(self.only)} rows takes count={len(self.only)}, and nothing first")


def _options_of(
    make: Callable[Options, GetRequest],
) -> Callable[[Callable[[Self, GetRequest], Returned]], Callable[Concatenate[Self, Options], Returned]]:
    def decorate(method: Callable[[Self, GetRequest], Returned]) -> Callable[Concatenate[Self, Options], Returned]:
        @wraps(method)
        def call(self: Self, *args: Options.args, **kwargs: Options.kwargs) -> Returned:
            return method(self, make(*args, **kwargs))

        return call

    return decorate


with_get_options = _options_of(GetRequest)
"""Decorates a method that takes a GetRequest: it is called with the fields of one, and typed like that."""


def check_task(spec: QueueSpec, task: str) -> None:
    """ValueError unless there is this task."""
    if task not in spec.tasks:
        raise ValueError(f"task {task!r} is unknown; there are {sorted(spec.tasks)}")


def check_few(what: str, count: int) -> None:
    """ValueError for more than can be looked at in a moment."""
    if count > _FEW:
        raise ValueError(f"a get names at most {_FEW} {what}, not {count}")


def check_one_rank(spec: QueueSpec, task: str, what: str) -> None:
    """ValueError where several readers of a task would have to agree on it."""
    if (ranks := spec.tasks[task].ranks) > 1:
        raise ValueError(f"task {task!r} has {ranks} ranks and cannot {what}: give it one")
