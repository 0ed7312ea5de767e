"""Cadence, by backend: a queue process for each flow, and the synchronous client in the processes that write and
read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import numpy as np

from harness.transfer_queue.control.spec import QueueSpec, TaskSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.process import QueueProcess
from harness.transfer_queue.remote.sync_client import SyncQueue
from harness.transfer_queue.rows.columns import Batch, Column, ColumnSpec, Ragged
from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.protocol import QueueBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.benchmarks.transfer_queue.contract import Taken
from tests.benchmarks.transfer_queue.workload import DENSE, RAGGED, WRITTEN, Tasks
from tests.support.redis_servers import redis_server

Started = tuple[QueueBackend, list[int]]
"""A backend, and the processes that it needs besides the queue's."""


class CadenceSide:
    def __init__(self, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is unknown; there are {sorted(BACKENDS)}")
        self._backend = backend
        self._running = ExitStack()
        self._services: list[int] = []

    def start(self, flows: Mapping[str, Tasks]) -> dict[str, Endpoint]:
        backend, self._services = self._running.enter_context(BACKENDS[self._backend]())
        found = {}
        for flow, tasks in flows.items():
            process = self._running.enter_context(QueueProcess.start(spec_of(tasks), backend))
            self._services.append(process.process.pid)
            found[flow] = process.queue.endpoint
        return found

    def connect(self, address: Mapping[str, Endpoint], flow: str) -> "CadenceClient":
        return CadenceClient(SyncQueue(address[flow]))

    def services(self) -> list[int]:
        return self._services

    def stop(self) -> None:
        self._running.close()


class CadenceClient:
    def __init__(self, queue: SyncQueue) -> None:
        self._queue = queue

    def native(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(rows)

    def create(self, partition: str, rows: int) -> None:
        self._queue.create_partition(partition, np.arange(rows))

    def put(
        self,
        partition: str,
        rows: np.ndarray,
        ragged: Mapping[str, Sequence[np.ndarray]],
        dense: Mapping[str, np.ndarray],
    ) -> None:
        columns: dict[str, Column] = {name: Ragged.from_rows(column) for name, column in ragged.items()}
        self._queue.put(partition, rows, {**columns, **dense})

    def get(self, partition: str, task: str, columns: Sequence[str], count: int) -> Taken:
        batch = self._queue.get(task, count, partition=partition)
        assert batch is not None, f"{partition!r} had fewer rows for task {task!r} than were put"
        ragged = {name: batch.ragged(name) for name in columns if name not in DENSE}
        dense = {name: batch.dense(name) for name in columns if name in DENSE}
        return Taken({name: (column.values, column.offsets) for name, column in ragged.items()}, dense, batch)

    def put_back(self, taken: Taken, column: str, values: np.ndarray, offsets: np.ndarray) -> None:
        batch: Batch = taken.handle
        self._queue.put(batch.partition, batch.rows, {column: Ragged(values, offsets[1:] - offsets[:-1])})

    def clear(self, partition: str) -> None:
        self._queue.clear(partition)

    def close(self) -> None:
        self._queue.disconnect()


def spec_of(tasks: Tasks) -> QueueSpec:
    """The columns that these tasks read, and those that they write; readers as fast as the peer's: without leases."""
    ragged = RAGGED | dict.fromkeys(WRITTEN.values(), "float32")
    columns = {name: ColumnSpec(dtype, ragged=True) for name, dtype in ragged.items()}
    columns |= {name: ColumnSpec(dtype) for name, dtype in DENSE.items()}
    return QueueSpec(columns, {task: TaskSpec(read) for task, read in tasks.items()})


@contextmanager
def _redis() -> Iterator[Started]:
    from harness.transfer_queue.storage.redis_storage import RedisBackend

    with redis_server() as server:
        yield RedisBackend((server.url,)), [server.process.pid]


BACKENDS: Mapping[str, Callable[[], AbstractContextManager[Started]]] = {
    "shm": lambda: nullcontext((ShmBackend(), [])),
    "inline": lambda: nullcontext((InlineBackend(), [])),
    "redis": _redis,
}
