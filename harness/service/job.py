"""A job of somebody else's trainer and engines: its rows, who may start which, its weights, and what became of every
sample.

The service decides nothing but what bounds staleness (`schedules.capacity.Capacity`): an engine of version u is given
group N only if N < ceil((u + 1 + max_staleness) batch_groups), batch i is trained at version i, and version i + 1 is
taken once all of batch i was given to the trainer. So no sample lags by more than ceil(max_staleness) versions,
whatever trainer and engines do. When what is admitted, and when weights are sent, is the trainer's to say."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.service.requests import GENERATE, TRAIN, JobRequest, ReceiveRequest
from harness.service.tensors import WeightFiles
from harness.transfer_queue.control.spec import GetRequest
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.rows.columns import Batch, Column, Rows
from schedules.capacity import Capacity


class Conflict(RuntimeError):
    """A request that the present state of the job does not allow; nothing was changed."""


class Unknown(LookupError):
    """Raised for an engine, lease or version that does not exist."""


class Replaced(LookupError):
    """Raised for weights that newer ones have replaced: ask which are the newest, and take those."""


Gone = Callable[[], Awaitable[bool]]  # whether who asked is there no more


async def _never() -> bool:
    return False


@dataclass
class _Given:
    """Rows that a reader got of a task: those of which it sent nothing yet, and until when it may."""

    task: str
    partition: str
    left: set[int]
    version: int
    until: float


class ServedJob:
    """A job that is served. folder: where weights lie, for nobody else. now: seconds, of the clock that leases go by.
    Sixteen attributes: seven are the figures that `describe` tells and Prometheus reads."""

    def __init__(self, request: JobRequest, folder: Path, now: Callable[[], float]) -> None:
        self.request = request
        self.queue = LocalQueue(request.queue_spec(), now=now)
        self.version: int | None = None  # the trainer's; None before the first weights
        self.engines: dict[str, int | None] = dict.fromkeys(request.engines)
        """The version that each has; None before its first."""
        self.admitted = 0  # groups below may be given to engines
        self.lags = Counter[int]()  # rows that were given to the trainer, counted by their lag
        self.loaded = self.generated = self.trained = 0  # rows
        self.weights = WeightFiles(folder)
        self._now = now
        self._capacity = Capacity(request.batch_groups, request.max_staleness)
        self._given: dict[int, _Given] = {}
        self._sampled: dict[int, int] = {}  # by row, the version that sampled it
        self._published = asyncio.Condition()
        self._loading = asyncio.Lock()

    # Rows

    async def load(self, columns: Mapping[str, Column]) -> int:
        """The prompts of the next batch, a row each; its number. They wait to be admitted."""
        if early := sorted(self.request.written & columns.keys()):
            raise ValueError(f"columns {early} are written by tasks: prompts come without them")
        async with self._loading:
            batch, rows = self.loaded // self.request.batch_rows, self.request.batch_rows
            ids = np.arange(self.loaded, self.loaded + rows)
            self.queue.spec.check_columns(rows, columns)
            await self.queue.create_partition(_partition(batch), ids.tolist(), self.request.group_size)
            await self.queue.put(_partition(batch), ids, columns)
            self.loaded += rows
            return batch

    async def admit(self, below: int) -> None:
        """Groups below this one, if it is more than before."""
        self.admitted = max(self.admitted, below)
        for engine in self.engines:
            await self._bound(engine)

    async def receive(self, asked: ReceiveRequest, gone: Gone = _never) -> Batch | None:
        """The rows that a reader asked for; None: there are no more, for the trainer until the next version.
        TimeoutError: not in this time; or, of an engine, there are newer weights than it has; or the reader is gone:
        nothing was given."""
        if asked.task == GENERATE:
            batch = await self._prompts(asked)
        else:
            partition = self._partition_in_training() if asked.task == TRAIN else None
            batch = await self.queue.get_batch(_get(asked, partition=partition))
        if batch is not None:
            await self._hand_over(asked, batch, gone)
        return batch

    async def _prompts(self, asked: ReceiveRequest) -> Batch | None:
        """An engine that waits is told of newer weights at once: its bound may hang on them."""
        had = self._version_of(asked.reader)
        getting = asyncio.ensure_future(self.queue.get_batch(_get(asked)))
        newer = asyncio.ensure_future(self.wait_for_newer(had))
        try:
            await asyncio.wait({getting, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():  # what is ready was given in its first step, also to an engine that is behind
                raise TimeoutError(f"engine {asked.reader!r} has version {had}, and there is {self.version}")
            return getting.result()
        except asyncio.CancelledError:
            if getting.done() and (batch := getting.result()) is not None:
                await self.queue.give_back(batch.lease)
            raise
        finally:
            getting.cancel()
            newer.cancel()

    async def _hand_over(self, asked: ReceiveRequest, batch: Batch, gone: Gone) -> None:
        """Count a batch as given where somebody is there to get it; else give it back to the queue."""
        version = self._version_of(asked.reader) if asked.task == GENERATE else 0
        try:
            if await gone():
                raise TimeoutError(f"reader {asked.reader!r} is gone")
        except BaseException:
            await self.queue.give_back(batch.lease)
            raise
        if asked.task == TRAIN:
            self._train(batch)
        else:
            until = self._now() + (self.request.tasks[asked.task].lease_s or math.inf)
            given = _Given(asked.task, batch.partition, set(batch.rows.tolist()), version, until)
            self._given[batch.lease] = given

    def _partition_in_training(self) -> str:
        if self.version is None:
            raise Conflict("there are no weights yet: sync_actor_model brings version 0 first")
        return _partition(self.version)

    async def send(self, lease: int, rows: Rows, columns: Mapping[str, Column]) -> int:
        """Take what a reader made of rows of this lease, all columns of its task; returns how many of them are left."""
        given = self._given.get(lease)
        if given is None:
            raise Unknown(f"lease {lease} is not open: all of it was sent, or it was never given")
        if self._now() > given.until:
            del self._given[lease]
            raise Conflict(f"lease {lease} of task {given.task} has run out, and its rows went out again")
        if stray := [row for row in rows.tolist() if row not in given.left]:
            raise Conflict(f"row {stray[0]} was not given under lease {lease}, or was sent before")
        if set(columns) != set(writes := self.request.tasks[given.task].writes):
            raise ValueError(f"task {given.task} writes {sorted(writes)}, not {sorted(columns)}")
        await self.queue.put(given.partition, rows, columns)
        given.left.difference_update(rows.tolist())
        if given.task == GENERATE:
            self._sampled |= dict.fromkeys(rows.tolist(), given.version)
            self.generated += len(rows)
        if not given.left:
            del self._given[lease]
            await self.queue.acknowledge(lease)
        return len(given.left)

    def _train(self, batch: Batch) -> None:
        version = int(batch.partition.removeprefix("train_"))  # which its batch is trained at
        self.trained += len(batch)
        self.lags.update(version - self._sampled.pop(row) for row in batch.rows.tolist())

    async def close(self) -> None:
        """Admit no more prompts: engines are told so once all is generated."""
        await self.queue.close()

    # Weights

    async def sync(self, version: int, body: AsyncIterator[bytes]) -> None:
        """New weights from the trainer, a file of safetensors; with version 0 it begins."""
        self._check_next(version)
        with self.weights.writing() as file:
            async for piece in body:
                file.write(piece)
            await asyncio.to_thread(self.weights.check, file)
            self._check_next(version)  # another may have come meanwhile
            self.weights.keep(file, version)
        self.version = version
        await self.queue.clear_finished()
        async with self._published:
            self._published.notify_all()

    def _check_next(self, version: int) -> None:
        following = 0 if self.version is None else self.version + 1
        if version != following:
            raise Conflict(f"version {version} does not follow {self.version}; the next one is {following}")
        if (lacking := version * self.request.batch_rows - self.trained) > 0:
            raise Conflict(f"batch {version - 1} has {lacking} rows that the trainer has not received yet")

    async def wait_for_newer(self, than: int) -> None:
        """Wait until the trainer has a newer version than that."""
        async with self._published:
            await self._published.wait_for(lambda: self.version is not None and self.version > than)

    async def loaded_by(self, engine: str, version: int) -> None:
        """An engine samples with these weights from now on."""
        if engine not in self.engines:
            raise Unknown(f"engine {engine!r} is unknown; there are {sorted(self.engines)}")
        if self.version is None or version > self.version:
            raise Conflict(f"there is no version {version} yet; the newest is {self.version}")
        if version < (self.engines[engine] or 0):
            raise Conflict(f"engine {engine!r} had version {self.engines[engine]} before, which is newer")
        self.engines[engine] = version
        await self._bound(engine)

    async def _bound(self, engine: str) -> None:
        version = self.engines[engine]
        groups = 0 if version is None else min(self.admitted, self._capacity.limit(version))
        await self.queue.set_bound(GENERATE, engine, groups * self.request.group_size)

    def _version_of(self, engine: str) -> int:
        version = self.engines.get(engine)
        if version is None:
            what = "has no weights yet: report its version first" if engine in self.engines else "is unknown"
            raise Conflict(f"engine {engine!r} {what}; there are {sorted(self.engines)}")
        return version

    # What became of the samples

    @property
    def worst_lag(self) -> int:
        """The bound, in versions."""
        return self._capacity.worst_lag

    def ledger(self) -> dict[str, int]:
        """Rows: loaded = trained + generated_untrained + not_generated."""
        untrained = self.generated - self.trained
        return {
            "loaded": self.loaded,
            "trained": self.trained,
            "generated_untrained": untrained,
            "not_generated": self.loaded - self.generated,
        }


def _partition(batch: int) -> str:
    return f"train_{batch}"


def _get(asked: ReceiveRequest, partition: str | None = None) -> GetRequest:
    return GetRequest(
        asked.task,
        asked.count,
        minimum=asked.minimum,
        consumer=asked.reader,
        partition=partition,
        timeout_s=asked.timeout_s,
    )
