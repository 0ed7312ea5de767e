"""What the processes of `transfer_queue_stress` do, and the ledger on what they said to have done."""

import asyncio
import math
import multiprocessing
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from harness.transfer_queue import Batch, ColumnSpec, LeaseExpired, QueueSpec, Ragged, TaskSpec
from harness.transfer_queue.remote.calls import Endpoint
from harness.transfer_queue.remote.client import RemoteQueue
from harness.transfer_queue.remote.sync_client import SyncQueue

ROWS, GROUP, LIVE = 256, 4, 4  # of a partition; of a prompt; partitions at a time
FINISH_S = 120.0
RAGGED = {"tokens": "int64", "loss_mask": "uint8", "log_probs": "float32"}
TASKS = {
    "rollout": TaskSpec(("prompt",), whole_groups=True, lease_s=math.inf),
    "old_log_prob": TaskSpec(("tokens", "loss_mask"), policy="ready", lease_s=math.inf),
    "ref_log_prob": TaskSpec(("tokens", "loss_mask"), lease_s=60),
    "advantages": TaskSpec(("reward", "loss_mask"), policy="ready", whole_groups=True, lease_s=math.inf),
    "actor_train": TaskSpec(
        (*RAGGED, "old_log_probs", "ref_log_probs", "advantages"), policy="completion", whole_groups=True, lease_s=60
    ),
}
WRITTEN = {"old_log_prob": "old_log_probs", "ref_log_prob": "ref_log_probs", "advantages": "advantages"}
PRODUCING = ("rollout",) * 4
CONSUMING = tuple(task for task in TASKS if task != "rollout") * 2
PLACES = [PRODUCING] * 4 + [CONSUMING] * 8
"""What the readers of each process do: 16 produce, 64 consume."""
SPEC = QueueSpec(
    {
        "prompt": ColumnSpec("int64"),
        "reward": ColumnSpec("float32"),
        **{name: ColumnSpec(dtype, ragged=True) for name, dtype in RAGGED.items()},
        **{name: ColumnSpec("float32", ragged=True) for name in WRITTEN.values()},
    },
    TASKS,
    capacity_rows=LIVE * ROWS,
)


# -- what a reader does


def ragged(name: str, rows: np.ndarray) -> Ragged:
    """64 to 1023 items a row, all of them the row's id, as far as the type holds it."""
    values = [np.full(64 + row * 7919 % 960, row % 251, SPEC.columns[name].dtype) for row in rows.tolist()]
    return Ragged.from_rows(values, SPEC.columns[name].dtype)


def made_of(task: str, rows: np.ndarray) -> dict[str, Any]:
    if task == "rollout":
        return {name: ragged(name, rows) for name in RAGGED} | {"reward": rows.astype(np.float32)}
    return {WRITTEN[task]: ragged(WRITTEN[task], rows)} if task in WRITTEN else {}


def check(batch: Batch) -> None:
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            expected = ragged(name, batch.rows)
            if not np.array_equal(column.values, expected.values):
                raise AssertionError(f"rows {batch.rows.tolist()} came with {name} of others")


async def write(queue: Any, partition: str, rows: np.ndarray, task: str) -> None:
    """What a killed predecessor wrote of it already stays as it is."""
    made = made_of(task, rows)
    if not made:
        return
    try:
        await queue.put(partition, rows, made)
    except ValueError as error:
        if "already written" not in str(error):
            raise
        if rows.size > 1:
            for i in range(rows.size):
                await write(queue, partition, rows[i : i + 1], task)


Report = Callable[[str, str, int, list[int]], None]
"""(what, task, lease, rows): that a lease is about to be acknowledged (meant), was (done), or had run out (late)."""


async def work(queue: Any, task: str, consumer: str, report: Report) -> None:
    """Until the queue is closed and empty."""
    while (batch := await queue.get(task, 4 * GROUP, minimum=1, consumer=consumer)) is not None:
        check(batch)
        await write(queue, batch.partition, batch.rows, task)
        report("meant", task, batch.lease, batch.rows.tolist())
        try:
            await queue.acknowledge(batch.lease)
        except LeaseExpired:
            report("late", task, batch.lease, [])
        else:
            report("done", task, batch.lease, [])


class Blocking:
    """A SyncQueue with the face of the other client: what is awaited blocks its thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._queue = SyncQueue(endpoint)

    def __getattr__(self, verb: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self._queue, verb)(*arguments, **options)

        return call


def member(endpoint: Endpoint, name: str, tasks: tuple[str, ...], threads: bool, pipe: Connection) -> None:
    """A process with several readers: coroutines that share a connection, or threads that have one each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    telling = threading.Lock()

    def report(*record: Any) -> None:
        with telling:
            pipe.send(record)

    async def work_all() -> None:
        queue = RemoteQueue(endpoint)
        async with asyncio.TaskGroup() as group:
            for i, task in enumerate(tasks):
                group.create_task(work(queue, task, f"{name}.{i}", report))

    def work_alone(i: int, task: str) -> None:
        try:
            asyncio.run(work(Blocking(endpoint), task, f"{name}.{i}", report))
        except Exception as error:
            report("failed", task, -1, [repr(error)])

    try:
        if threads:
            readers = [threading.Thread(target=work_alone, args=(i, task)) for i, task in enumerate(tasks)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        else:
            asyncio.run(work_all())
    except BaseExceptionGroup as errors:
        for error in errors.exceptions:
            report("failed", "", -1, [repr(error)])


# -- the workers, and what it says


@dataclass
class Ledger:
    """What was said to be done."""

    rows: dict[int, tuple[str, list[int]]] = field(default_factory=dict)  # by lease that was to be acknowledged
    done: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)

    def note(self, what: str, task: str, lease: int, rows: list[Any]) -> None:
        if what == "meant":
            self.rows[lease] = (task, rows)
        elif what == "failed":
            self.failed += rows
        else:
            (self.done if what == "done" else self.late).add(lease)

    def faults(self, rows: int) -> list[str]:
        """Whether each of rows 0, 1, ... was done once for each task. Of a process that was killed between having its
        work acknowledged and saying so, only that it meant to is known."""
        times = {task: Counter[int]() for task in TASKS}
        unsaid = {task: set[int]() for task in TASKS}
        for lease, (task, its) in self.rows.items():
            if lease in self.done:
                times[task].update(its)
            elif lease not in self.late:
                unsaid[task].update(its)
        faults = []
        for task in TASKS:
            twice = [row for row, n in times[task].items() if n > 1]
            never = [row for row in range(rows) if not times[task][row] and row not in unsaid[task]]
            faults += [f"{task}: rows {twice[:9]} were acknowledged more than once"] if twice else []
            faults += [f"{task}: rows {never[:9]} were never acknowledged"] if never else []
        return faults


class Workers:
    """Processes of PLACES; forked, so that a killed one is replaced at once."""

    def __init__(self, endpoint: Endpoint, ledger: Ledger) -> None:
        self._endpoint, self._ledger = endpoint, ledger
        self._context = multiprocessing.get_context("fork")
        self._members: dict[int, tuple[Any, Connection]] = {}
        self._started = 0
        for place in range(len(PLACES)):
            self._start(place)

    def _start(self, place: int) -> None:
        mine, other_end = self._context.Pipe(duplex=False)
        self._started += 1
        arguments = (self._endpoint, f"{place}.{self._started}", PLACES[place], place % 2 == 1, other_end)
        process = self._context.Process(target=member, args=arguments)
        process.start()
        other_end.close()
        self._members[place] = (process, mine)

    def kill(self, place: int) -> None:
        """And hear what it had to say, and start another."""
        process, pipe = self._members.pop(place)
        process.kill()
        process.join()
        self._drain(pipe)
        pipe.close()
        self._start(place)

    def listen(self, timeout_s: float) -> None:
        pipes = {pipe for _, pipe in self._members.values()}
        for pipe in wait(pipes, timeout_s):
            self._hear(pipe)

    def _hear(self, pipe: Connection) -> bool:
        try:
            self._ledger.note(*pipe.recv())
        except EOFError:
            return False
        return True

    def _drain(self, pipe: Connection) -> None:
        while self._hear(pipe):
            pass

    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._members.values()]

    def join(self) -> None:
        """They end by themselves."""
        for process, pipe in self._members.values():
            self._drain(pipe)
            process.join(FINISH_S)
            if process.exitcode != 0:
                self._ledger.failed.append(f"{process.name} ended with {process.exitcode}")
                process.kill()
            process.join()
            pipe.close()
        self._members.clear()
