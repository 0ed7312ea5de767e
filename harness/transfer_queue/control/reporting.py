"""The queue described for people: who waits for which rows and what these lack; counts, latencies and metrics."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.transfer_queue.control.partition import Partition, Precedence
from harness.transfer_queue.control.spec import Bound, GetRequest, TaskSpec

SHOWN_ROWS = 16
KEPT = 1024


class Latency:
    """The latest KEPT waits, in seconds, and how many there were in all."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: deque[float] = deque(maxlen=KEPT)

    def add(self, waited: NDArray[np.float64]) -> None:
        """float64 [any], seconds."""
        self._latest.extend(waited.tolist())
        self._count += waited.size

    def describe(self) -> dict[str, float]:
        """`count` of all; p50_s, p99_s and max_s of the latest. 0 where there were none."""
        p50, p99, most = np.quantile(self._latest or [0.0], (0.5, 0.99, 1)).tolist()
        return {"count": self._count, "p50_s": p50, "p99_s": p99, "max_s": most}


def explain(
    request: GetRequest, spec: TaskSpec, partitions: Sequence[Partition], reach: Bound, first: Precedence
) -> str:
    """Why this request is not served: the rows that are left and the columns that they lack.

    spec: of its task; partitions: those it asks for; reach: ids that it may get; first: what has to go before all else.
    """
    what = f"task {request.task!r} waits for {min(request.least, first.at_most)} rows"
    if reach.below is not None:
        of = f"the bound of consumer {request.consumer!r}" if spec.window is None else f"a window of {spec.window} rows"
        least = f"from {reach.above} to" if reach.above else "below"
        what += f" with ids {least} {reach.below} ({of})"
    for partition in partitions:
        progress = partition.tasks[request.task]
        if partition.name in first.units:
            rows = partition.rows[progress.positions(first.units[partition.name])].tolist()
            assert request.first is not None
            return (
                f"{what}, first for these {len(rows)} of partition {partition.name!r}, which task {request.first[0]!r} "
                f"was handed under a bound of {first.below} or less: {shown(rows)}; {_lacking(partition, request.task)}"
            )
        if not first.units and progress.finished < progress.units:
            ready, left = len(progress.policy) * progress.unit_rows, progress.left * progress.unit_rows
            return (
                f"{what} of partition {partition.name!r}: {ready} of the {left} rows left are ready; "
                f"{_lacking(partition, request.task)}"
            )
    return f"{what} of {'any partition' if request.partition is None else repr(request.partition)}: there is none"


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
    """A task over all partitions: rows that are `ready` and in its `depth_samples` (neither dispatched nor dropped);
    `oldest_s`: how long the row that waits longest was ready, 0 where none waits; `assignment`: see `Latency`."""
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


def queue_metrics(described: Mapping[str, Any]) -> dict[str, float]:
    """`queue/<what>` of the whole queue, `queue/bytes/<column>` and `queue/<task>/<what>`, over all live partitions."""
    flat: dict[str, float] = {f"queue/{name}": described[name] for name in ("depth_samples", "live_rows", "bytes")}
    flat["queue/open_leases"] = described["open_leases"]
    flat["queue/partitions"] = len(described["partitions"])
    for column, size in described["column_bytes"].items():
        flat[f"queue/bytes/{column}"] = size
    for task, values in described["tasks"].items():
        flat |= {f"queue/{task}/{name}": values[name] for name in ("depth_samples", "ready", "oldest_s")}
        flat |= {
            f"queue/{task}/handout_{name}_ms": 1e3 * values["handout"][f"{name}_s"] for name in ("p50", "p99", "max")
        }
        flat[f"queue/{task}/waiting_gets"] = described.get("waiting_gets", {}).get(task, 0)
    return {name: float(value) for name, value in flat.items()}
