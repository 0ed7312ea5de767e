"""Tensors in, tensors out: the service verbs of AsyncFlow's user interface, on top of a queue's blocking client.

`put_experience` and `get_experience` are named after AsyncFlow (arXiv 2507.01663, the service-oriented user interface).
Where it addresses a table of samples, these address a partition of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from harness.transfer_queue.control.spec import GetRequest, QueueSpec, with_get_options
from harness.transfer_queue.rows.columns import Batch, Column, Ragged

Values = torch.Tensor | np.ndarray | Sequence[torch.Tensor] | Sequence[float]
"""One value a row: a tensor [rows, ...], a jagged nested tensor, a list of 1-D tensors, or a list of numbers."""


class BlockingQueue(Protocol):
    """The part of the queue that is used: `remote.sync_client.SyncQueue` has it."""

    @property
    def spec(self) -> QueueSpec:
        """The queue's columns and tasks."""

    def put(
        self, partition: str, rows: Iterable[int], columns: Mapping[str, Column], *, timeout_s: float | None = None
    ) -> None:
        """Write, as `TransferQueue.put` says."""

    def get_batch(self, request: GetRequest) -> Batch | None:
        """Take rows, as `TransferQueue.get_batch` says."""

    def acknowledge(self, lease: int) -> None:
        """Acknowledge a lease, as `TransferQueue.acknowledge` says."""


@dataclass(frozen=True, slots=True)
class Experience:
    """One micro-batch. rows: int64 [k]; data: by column, a tensor [k, *shape], or a jagged nested tensor of k rows
    where the column is ragged; both share memory with what was read."""

    partition: str
    rows: torch.Tensor
    data: dict[str, torch.Tensor] = field(repr=False)
    lease: int

    def __len__(self) -> int:
        return len(self.rows)


class ExperienceQueue:
    """The queue for code of an algorithm. Errors are those of `queue.py`."""

    def __init__(self, queue: BlockingQueue) -> None:
        self._queue = queue

    def put_experience(
        self, partition: str, rows: Iterable[int], data: Mapping[str, Values], *, timeout_s: float | None = None
    ) -> None:
        """Write some columns of some rows."""
        spec = self._queue.spec
        columns = {name: to_column(values, ragged=_is_ragged(spec, name)) for name, values in data.items()}
        self._queue.put(partition, rows, columns, timeout_s=timeout_s)

    @with_get_options
    def get_experience(self, request: GetRequest) -> Experience | None:
        """The next rows of a task, or None when there will be no more; called with the fields of a request."""
        batch = self._queue.get_batch(request)
        if batch is None:
            return None
        data = {name: to_tensor(column) for name, column in batch.columns.items()}
        return Experience(batch.partition, torch.from_numpy(batch.rows), data, batch.lease)

    def acknowledge(self, experience: Experience) -> None:
        """Acknowledge that it was worked on: it will not be dispatched again."""
        self._queue.acknowledge(experience.lease)


def to_column(values: Values, *, ragged: bool) -> Column:
    """The column that holds these values; a ragged one is packed. Shares memory where it can."""
    if not ragged:
        return _array(values)
    if isinstance(values, torch.Tensor) and values.is_nested:
        return Ragged(_array(values.values()), np.diff(_array(values.offsets())))  # type: ignore[attr-defined]
    return Ragged.from_rows([_array(row) for row in values])


def to_tensor(column: Column) -> torch.Tensor:
    """A tensor that shares the column's memory."""
    if isinstance(column, Ragged):
        values, offsets = torch.from_numpy(column.values), torch.from_numpy(column.offsets)
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    return torch.from_numpy(column)


def _array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if len(values) and isinstance(values[0], torch.Tensor):
        return torch.stack(tuple(values)).detach().cpu().numpy()
    return np.asarray(values)


def _is_ragged(spec: QueueSpec, name: str) -> bool:
    """An unknown column is the queue's to refuse."""
    return name in spec.columns and spec.columns[name].ragged
