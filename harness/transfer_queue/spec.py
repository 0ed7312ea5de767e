"""What a queue is told once, when it is made: its columns, the tasks that read them, and how much it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.transfer_queue.columns import Column, ColumnSpec, Ragged, Rows
from harness.transfer_queue.control.balance import SPLITS
from harness.transfer_queue.control.policies import POLICIES


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One kind of reader; each row is handed out to it once.

    columns: what it reads, all of which must be written before a row is ready for it.
    policy: a key of `policies.POLICIES`.
    ranks: data-parallel ranks that share each micro-batch out among them.
    whole_groups: a group is handed out whole, to one rank.
    lease_s: seconds a reader has to acknowledge; then its rows go out again. None: a row is consumed when handed out.
    weight: a ragged column of `columns`; a row weighs the length of its cell, a group the sum of its rows.
    split: a key of `balance.SPLITS`: how a micro-batch is cut into shares for the ranks.
    writes: columns that its readers write, perhaps a row at a time. A row that has them is done with, whoever had it:
        what goes out again goes out without it.
    """

    columns: tuple[str, ...]
    policy: str = "fifo"
    ranks: int = 1
    whole_groups: bool = False
    lease_s: float | None = None
    weight: str | None = None
    split: str = "contiguous"
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """Raises ValueError with the offending value for anything that cannot work.

    capacity_rows: rows that may live in the queue at a time, over all partitions (None = no cap). DESIGN section 5:
    B * n * (ceil(eta) + 1).
    capacity_bytes: payload that may live in it at a time (None = no cap): a put beyond it waits for a partition to be
    cleared.
    """

    columns: Mapping[str, ColumnSpec]
    tasks: Mapping[str, TaskSpec]
    capacity_rows: int | None = None
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, cap in (("capacity_rows", self.capacity_rows), ("capacity_bytes", self.capacity_bytes)):
            if cap is not None and cap < 1:
                raise ValueError(f"{name} must be at least 1, not {cap}")
        for name, task in self.tasks.items():
            self._check(name, task)

    def check_columns(self, rows: int, columns: Mapping[str, Column]) -> dict[str, Rows]:
        """What is to be written for so many rows: ValueError that names what does not fit the schema. Returns the
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
        return frozenset(task.weight for task in self.tasks.values() if task.weight is not None)

    def _check(self, name: str, task: TaskSpec) -> None:
        if isinstance(task.columns, str) or not task.columns or len(set(task.columns)) < len(task.columns):
            raise ValueError(f"task {name!r} must read one or more different columns, not {task.columns!r}")
        unknown = sorted(set(task.columns) - set(self.columns))
        if unknown:
            raise ValueError(f"task {name!r} reads unknown columns {unknown}; the schema has {sorted(self.columns)}")
        if task.policy not in POLICIES:
            raise ValueError(f"task {name!r} has unknown policy {task.policy!r}; there are {sorted(POLICIES)}")
        if task.ranks < 1:
            raise ValueError(f"task {name!r} needs at least one rank, not {task.ranks}")
        if task.lease_s is not None and task.lease_s <= 0:
            raise ValueError(f"task {name!r} needs a lease of more than 0 seconds, not {task.lease_s}")
        unknown = sorted(set(task.writes) - set(self.columns))
        if unknown:
            raise ValueError(f"task {name!r} writes unknown columns {unknown}; the schema has {sorted(self.columns)}")
        if task.writes and task.ranks > 1:
            raise ValueError(
                f"task {name!r} has several readers a micro-batch: what they write says nothing of a share"
            )
        self._check_weight(name, task)

    def _check_weight(self, name: str, task: TaskSpec) -> None:
        if task.split not in SPLITS:
            raise ValueError(f"task {name!r} has unknown split {task.split!r}; there are {sorted(SPLITS)}")
        if task.weight is None:
            for what, weighs in ((task.policy, POLICIES[task.policy].weighs), (task.split, SPLITS[task.split].weighs)):
                if weighs:
                    raise ValueError(f"task {name!r} is {what!r} and needs a weight: a ragged column that it reads")
        elif task.weight not in task.columns:
            raise ValueError(f"task {name!r} is weighed by column {task.weight!r}, which it does not read")
        elif not self.columns[task.weight].ragged:
            raise ValueError(f"task {name!r} is weighed by column {task.weight!r}, which is not ragged")
