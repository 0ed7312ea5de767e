"""What a person wants to know of a queue that stands still: who waits for which rows, and what these lack."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from harness.transfer_queue.control.asks import Ask
from harness.transfer_queue.control.latency import Latency
from harness.transfer_queue.control.partition import Partition
from harness.transfer_queue.control.precedence import Precedence

SHOWN_ROWS = 16


def explain(ask: Ask, partitions: Sequence[Partition], below: int | None, first: Precedence) -> str:
    """Why this ask is not served: the rows that are left and the columns that they lack.

    partitions: those it asks for; below: the bound of its consumer; first: what has to go before all else.
    """
    what = f"task {ask.task!r} waits for {min(ask.minimum, first.room)} rows"
    if below is not None:
        what += f" with ids below {below} (the bound of consumer {ask.consumer!r})"
    for partition in partitions:
        progress = partition.tasks[ask.task]
        if partition.name in first.units:
            rows = partition.rows[progress.positions(first.units[partition.name])].tolist()
            assert ask.first is not None
            return (
                f"{what}, first for these {len(rows)} of partition {partition.name!r}, which task {ask.first[0]!r} was "
                f"handed under a bound of {first.below} or less: {shown(rows)}; {_lacking(partition, ask.task)}"
            )
        if not first.units and progress.finished < progress.units:
            ready, left = len(progress.policy) * progress.unit_rows, progress.left * progress.unit_rows
            return (
                f"{what} of partition {partition.name!r}: {ready} of the {left} rows left are ready; "
                f"{_lacking(partition, ask.task)}"
            )
    return f"{what} of {'any partition' if ask.partition is None else repr(ask.partition)}: there is none"


def slowest_task(tasks: Sequence[str], partitions: Sequence[Partition]) -> str:
    """The task with most rows to finish, for the error of a writer that finds no room."""
    to_do = {
        task: sum((p.tasks[task].units - p.tasks[task].finished) * p.tasks[task].unit_rows for p in partitions)
        for task in tasks
    }
    if not any(to_do.values()):
        return "every task is done: clear a partition"
    task = max(to_do, key=lambda name: to_do[name])
    oldest = next(p for p in partitions if p.tasks[task].finished < p.tasks[task].units)
    lacking = oldest.missing(task) or "none"
    return (
        f"the slowest task is {task!r} with {to_do[task]} rows to do, the oldest in {oldest.name!r} "
        f"(rows that lack a column: {lacking})"
    )


def describe_task(task: str, partitions: Sequence[Partition], latency: Latency, now: float) -> dict[str, Any]:
    """A task over all partitions: rows that are `ready` and in its `depth_samples` (neither handed out nor dropped);
    `oldest_s`: how long the row that waits longest was ready, 0 where none waits; `handout`: see `Latency`."""
    progress = [partition.tasks[task] for partition in partitions]
    oldest = min((p.oldest() for p in progress), default=inf)
    return {
        "ready": sum(len(p.policy) * p.unit_rows for p in progress),
        "depth_samples": sum(p.left * p.unit_rows for p in progress),
        "oldest_s": max(0.0, now - oldest),
        "handout": latency.describe(),
    }


def shown(rows: Sequence[int]) -> str:
    """The first rows, and whether there are more."""
    return f"{list(rows[:SHOWN_ROWS])}{' and more' if len(rows) > SHOWN_ROWS else ''}"


def _lacking(partition: Partition, task: str) -> str:
    columns = ", ".join(partition.tasks[task].spec.columns)
    return f"it reads {columns}; rows that lack a column: {partition.missing(task) or 'none'}"
