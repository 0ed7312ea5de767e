"""The job as a schedule sees it: thin fronts over role handles that report to a recorder.

They satisfy the protocols of schedules/protocol.py by shape; nothing here knows which schedule calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from harness.driver.checkpoint_files import Cut, PartitionRange, PromptState
from harness.driver.checkpointing import Checkpoints
from harness.driver.evaluation import Evaluated, Evaluation
from harness.driver.finished_rows import Finished, put_finished
from harness.metrics.ledger import DropReason
from harness.protocols import Clock, Span
from harness.runtime.runtime import Handle, ask_all, death_in
from harness.tasks import DataBuffer, Dealer, Problem, Task
from harness.transfer_queue import Column, Ragged, TransferQueue
from harness.transfer_queue.control.reporting import queue_metrics
from harness.weight_sync.coordinator import Coordinator
from harness.weight_sync.membership import Fleet
from harness.workers.actor import ActorRole
from harness.workers.critic import CriticRole
from harness.workers.dataflow import partition_name, text_column
from harness.workers.rollout import RolloutRole
from harness.workers.stages import Stage
from harness.workers.training import TrainReport, one_report_per_group
from schedules.protocol import PauseMode, Rollout

_RECORD_AFTER_S = 0.005  # by then the next batch is asked for, and its workers need nothing of the driver
EngineEvent = Literal["lost", "leaves", "left", "joins", "works"]


class Observer(Protocol):
    """Hears what happens in a job, as it happens. Whatever it hears is progress."""

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None: ...

    def dropped(self, rows: Sequence[int], reason: DropReason) -> None: ...

    def doing(self, role: str, what: str) -> None: ...

    def engine(self, name: str, what: EngineEvent, why: str = "") -> None:
        """A rollout engine is lost, leaves or joins."""

    def spans(self, spans: Iterable[Span]) -> None: ...

    def trained(self, iteration: int, reports: Sequence[TrainReport], of_values: Sequence[TrainReport] = ()) -> None:
        """of_values: the critic's reports, where there is one."""

    def evaluated(self, found: Evaluated) -> None:
        """A version's held-out accuracy."""

    def published(self, version: int) -> Callable[[Mapping[str, float]], None]:
        """Ends an iteration now. What is left to do, which may take milliseconds and is called with the metrics of the
        queue, as `queue_metrics` names them."""


@dataclass
class Replay:
    """A schedule that goes on from version `done` begins at its beginning all the same: so it comes to know what it
    knew. What it asks for that is of iterations before `done` was done, and is answered at once. brought: the newest
    version of these that it has brought to all engines."""

    done: int = 0
    brought: int = 0


class PromptSource:
    """Numbers the groups and brings their prompts into the queue, batch `i` into partition `train_<i>`.

    What is admitted in place of dropped groups gets partitions of its own after those of the batches.
    """

    def __init__(
        self,
        task: Task,
        queue: TransferQueue,
        clock: Clock,
        observer: Observer,
        *,
        seed: int,
        batch: int,
        group_size: int,
        iterations: int,
        buffer: DataBuffer | None = None,
    ) -> None:
        self.dealer = Dealer(task, seed, buffer)
        self.task, self.queue, self.clock, self.observer = task, queue, clock, observer
        self.seed, self.batch, self.group_size = seed, batch, group_size
        self.planned = self.groups = iterations * batch
        self.next = 0
        self._ranges: list[tuple[int, int]] = []  # of each partition: its first group, and the next one's
        self._drops: list[int] = []  # what each call of `drop` returned
        self._replayed: deque[int] = deque()  # of those the ones that are to be returned again

    async def admit(self, below: int) -> None:
        below = min(below, self.groups)
        while self.next < below:
            creating = self._create(below) if self.next == self._end else None
            await asyncio.sleep(0)  # it leaves before the prompts are made
            groups = range(self.next, min(below, self._end))
            try:
                problems = [self._problem(group) for group in groups]
            except BaseException:
                if creating is not None:
                    creating.cancel()
                raise
            if creating is not None:
                await creating
            await self._put(partition_name(len(self._ranges) - 1), groups, problems)
            self.next = groups.stop

    async def drop(self, started_below: int) -> int:
        if self._replayed:
            return self._replayed.popleft()
        n = self.group_size
        rows = await self.queue.drop("actor", started="rollout", below=started_below * n)
        groups = sorted({row // n for row in rows})
        if groups:
            self.observer.dropped([self.first_sample(group) + k for group in groups for k in range(n)], "stale")
            for group in groups:
                self.dealer.forget(self.first_sample(group))
            self._now_stale(groups)
        self.groups += len(groups)
        self._drops.append(len(groups))
        return len(groups)

    async def close(self) -> None:
        await self.queue.close()

    def trained(self, reports: Sequence[TrainReport]) -> None:
        """Whoever deals problems hears of the rewards. A group is trained whole, by one rank."""
        if self.dealer.buffer is None:
            return
        n = self.group_size
        for rows in (rows for report in reports for rows in report.trained):
            for at in range(0, len(rows.rows), n):
                self.dealer.told(int(rows.rows[at]), rows.reward[at : at + n].tolist())

    def state(self, in_flight: Collection[int]) -> PromptState:
        """in_flight: groups that are neither trained nor dropped."""
        live = [
            PartitionRange(number, first, end)
            for number, (first, end) in enumerate(self._ranges)
            if end > self.next or any(group in in_flight for group in range(first, end))
        ]
        return PromptState(self.next, self.groups, list(self._drops), len(self._ranges), self._end, live)

    async def restore(
        self, state: PromptState, admitted: Mapping[int, float], finished: Mapping[str, Finished]
    ) -> None:
        """Into an empty queue the partitions that were not done with, of groups that were in flight or are still to be
        admitted. admitted: those in flight, and when they were; finished: by partition, rows that rollout need not make
        again."""
        self.next, self.groups, self._drops = state.next, state.groups, list(state.drops)
        self._replayed = deque(state.drops)
        self._ranges = [(state.end, state.end)] * state.made  # but for those below
        for part in state.partitions:
            self._ranges[part.number] = (part.first, part.end)
            name = partition_name(part.number)
            groups = [group for group in range(part.first, part.end) if group in admitted or group >= self.next]
            await self.queue.create_partition(name, self._rows(groups), self.group_size)
            there = [group for group in groups if group in admitted]
            if there:
                problems = [self._problem(group) for group in there]
                await self._write(name, there, problems, [admitted[group] for group in there])
            if name in finished:
                await put_finished(self.queue, name, len(there) * self.group_size, finished[name])

    @property
    def _end(self) -> int:
        """Of the newest partition."""
        return self._ranges[-1][1] if self._ranges else 0

    def _create(self, below: int) -> asyncio.Task[None]:
        """A partition from the next group on: its batch, or, past the last batch, only what is admitted right now,
        since more may be dropped later, and a partition has to be filled to come to its end."""
        n, end = self.group_size, self.next + self.batch
        if self.next >= self.planned:
            end = min(end, below)
        name, rows = partition_name(len(self._ranges)), range(self.next * n, end * n)
        self._new_partition(name, end - self.next)
        self._ranges.append((self.next, end))
        return asyncio.create_task(self.queue.create_partition(name, rows, n), name="prompts.create")

    async def _put(self, partition: str, groups: Sequence[int], problems: Sequence[Problem]) -> None:
        now = self.clock.now()
        for group, problem in zip(groups, problems, strict=True):
            first = self.first_sample(group)
            self.observer.admitted(range(first, first + self.group_size), len(problem.prompt), now)
        await self._write(partition, groups, problems, [now] * len(groups))

    async def _write(
        self, partition: str, groups: Sequence[int], problems: Sequence[Problem], at: Sequence[float]
    ) -> None:
        """at: when each was admitted."""
        admitted_at = np.repeat(np.asarray(at, np.float64), self.group_size)
        await self.queue.put(
            partition, self._rows(groups), self._columns(groups, problems) | {"admitted_at": admitted_at}
        )

    def first_sample(self, group: int) -> int:
        """The id of the first of the samples that this group's rows hold now; the others follow."""
        return group * self.group_size

    def _problem(self, group: int) -> Problem:
        return self.dealer.problem(group, self.first_sample(group))

    def _columns(self, groups: Sequence[int], problems: Sequence[Problem]) -> dict[str, Column]:
        """Of the rows of these groups, a problem for each group."""
        n = self.group_size
        return {
            "prompt": Ragged.from_rows([problem.prompt for problem in problems for _ in range(n)]),
            "answer": text_column([problem.answer for problem in problems for _ in range(n)]),
        }

    def _rows(self, groups: Sequence[int]) -> list[int]:
        return [group * self.group_size + k for group in groups for k in range(self.group_size)]

    def _now_stale(self, groups: Sequence[int]) -> None:
        """These will not be trained."""

    def _new_partition(self, name: str, groups: int) -> None:
        """One is made, of so many groups."""


class SpanSource(Protocol):
    async def take_spans(self) -> list[Span]:
        """Spans since the last call."""


Role = TypeVar("Role", bound=SpanSource)
Ask = Callable[[Role], Coroutine[Any, Any, list[Span] | None]]


class Pool(Generic[Role]):
    """Workers of one role. What they did is heard when a call ends; of a long one also meanwhile, whenever asked."""

    def __init__(self, name: str, workers: Sequence[Handle[Role]], observer: Observer) -> None:
        self.name, self.observer = name, observer
        self._workers = list(workers)
        self._asked = asyncio.Event()

    @property
    def workers(self) -> list[Handle[Role]]:
        return self._workers

    def ask_spans(self) -> None:
        """Have a long call that is under way hand in its spans so far. Nobody waits for them: a worker in the middle of
        a computation answers after it."""
        self._asked.set()

    async def _ask_workers(self, ask: Ask[Role]) -> None:
        for spans in await ask_all(self.workers, ask):
            self.observer.spans(spans or ())

    async def _long(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it; meanwhile, take the spans of all workers whenever `ask_spans` is called."""
        self._asked.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(work)
            call.add_done_callback(lambda _: self._asked.set())
            while not call.done():
                await self._asked.wait()
                self._asked.clear()
                if not call.done():
                    await self._ask_workers(lambda role: role.take_spans())


class StagePool(Pool[Stage]):
    """All workers of one role between rollout and training."""

    def __init__(
        self, name: str, workers: Sequence[Handle[Stage]], observer: Observer, replay: Replay | None = None
    ) -> None:
        super().__init__(name, workers, observer)
        self._replay = replay or Replay()

    async def process(self, iteration: int) -> None:
        if iteration < self._replay.done:
            return
        self.observer.doing(self.name, f"batch {iteration}")
        await self._ask_workers(lambda stage: stage.process(iteration))
        self.observer.doing(self.name, "waiting")

    async def stream(self) -> None:
        self.observer.doing(self.name, "streaming")
        await self._long(self._ask_workers(lambda stage: stage.stream()))
        self.observer.doing(self.name, "done")


class RolloutPool(Pool[RolloutRole]):
    """All rollout engines that work, or those of a cohort: the `fleet` knows which.

    Where one dies over a call, the fleet decides whether the run goes on. Then what it had is in the queue again, and
    the others, of whatever cohort, are asked for the same once more.
    """

    def __init__(
        self,
        fleet: Fleet[RolloutRole],
        observer: Observer,
        name: str = "rollout",
        *,
        among: Collection[str] | None = None,
        whole: RolloutPool | None = None,
        replay: Replay | None = None,
    ) -> None:
        super().__init__(name, (), observer)
        self.fleet = fleet
        self.swapped = 0  # the newest version that these were to load in a replay
        self._replay = replay or Replay()
        self._among, self._whole = among, whole or self
        self._cohorts: list[RolloutPool] = []
        self._newest: dict[str, int] = {}  # batch that each engine was asked to generate
        self._streams: asyncio.TaskGroup | None = None  # while engines stream
        self._streaming: set[str] = set()
        self._lost_a_stream = False

    @property
    def workers(self) -> list[Handle[RolloutRole]]:
        return [worker for worker in self.fleet.working if self._among is None or worker.name in self._among]

    def split(self, cohorts: int | None = None) -> Sequence[RolloutPool]:
        names = [worker.name for worker in self.workers]
        count = len(names) if cohorts is None else cohorts
        if not 1 <= count <= len(names):
            raise ValueError(f"{len(names)} rollout engines cannot be split into {count} cohorts")
        made = [
            RolloutPool(
                self.fleet,
                self.observer,
                f"{self.name} {k}",
                among=names[k::count],
                whole=self,
                replay=self._replay,
            )
            for k in range(count)
        ]
        self._cohorts += made
        return made

    def ask_spans(self) -> None:
        super().ask_spans()
        for cohort in self._cohorts:
            cohort.ask_spans()

    @property
    def _replayed(self) -> bool:
        """The engines hold a newer version than the schedule has come to."""
        return max(self.swapped, self._replay.brought) < self._replay.done

    async def generate(self, iteration: int, batches: int = 1) -> None:
        if iteration + batches <= self._replay.done:
            return
        what = f"batch {iteration}" if batches == 1 else f"batches {iteration} to {iteration + batches - 1}"
        self.observer.doing(self.name, what)
        await self._long(self._generate(iteration, batches))
        self.observer.doing(self.name, f"done with {what}")

    async def stream(self) -> None:
        await self._long(self._stream())
        self.observer.doing(self.name, "done")

    async def set_dispatch_limit(self, below: int) -> None:
        if self._replayed:
            return
        self.observer.doing(self.name, f"up to group {below - 1}")
        await self._ask_workers(lambda engine: engine.set_dispatch_limit(below))

    async def pause(self, mode: PauseMode) -> None:
        if self._replayed:
            return
        self.observer.doing(self.name, "draining" if mode == "wait" else "paused for weights")
        await self._ask_workers(lambda engine: engine.pause(mode))

    async def resume(self, below: int) -> None:
        if self._replayed:
            return
        await self._ask_workers(lambda engine: engine.resume(below))
        self._whole.start_streams(self.workers)
        self.observer.doing(self.name, f"up to group {below - 1}")

    def start_streams(self, workers: Sequence[Handle[RolloutRole]]) -> None:
        """While engines stream: these do so, too. They have weights and a dispatch limit."""
        if self._streams is not None and self._streaming:
            for worker in workers:
                self._start_stream(self._streams, worker)

    async def _generate(self, iteration: int, batches: int) -> None:
        """Whoever is not as far as this batch yet takes what a dead one left when it comes to it: not before, for it
        may hold weights that are too old."""
        newest, workers = self._whole._newest, self.workers
        newest |= {worker.name: iteration for worker in workers}
        while not await self._ask_all(workers, lambda engine: engine.generate(iteration, batches)):
            workers = [worker for worker in self._whole.workers if newest.get(worker.name, -1) >= iteration]

    async def _stream(self) -> None:
        """Until all streams ended: also those of engines that came in meanwhile, and of those that took over what
        another one had when it died."""
        self._lost_a_stream = True
        while self._lost_a_stream:
            self._lost_a_stream = False
            async with asyncio.TaskGroup() as streams:
                self._streams = streams
                for worker in self.workers:
                    self._start_stream(streams, worker)
        self._streams = None

    def _start_stream(self, streams: asyncio.TaskGroup, worker: Handle[RolloutRole]) -> None:
        if worker.name not in self._streaming:
            self._streaming.add(worker.name)
            streams.create_task(self._stream_of(worker))

    async def _stream_of(self, worker: Handle[RolloutRole]) -> None:
        try:
            if not await self._ask(worker, lambda engine: engine.stream()):
                self._lost_a_stream = True
        finally:
            self._streaming.discard(worker.name)

    async def _ask_workers(self, ask: Ask[RolloutRole]) -> None:
        await self._ask_all(self.workers, ask)

    async def _ask_all(self, workers: Sequence[Handle[RolloutRole]], ask: Ask[RolloutRole]) -> bool:
        """The same of every one of them; whether all did it."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(worker, ask)) for worker in workers]
        return all(task.result() for task in asked)

    async def _ask(self, worker: Handle[RolloutRole], ask: Ask[RolloutRole]) -> bool:
        """Whether it did what it was asked; False where it died over it, and the run goes on. Then what it had can be
        taken by others. Raises LostEngine where the run is to end."""
        try:
            spans = await ask(worker.role)
        except Exception as error:
            if (death := death_in(error)) is None:
                raise
            message = str(death)
            named = message if message.startswith(worker.name) else f"{worker.name} died: {message}"
            await self.fleet.lose({worker.name: named})
            return False
        self.observer.spans(spans or ())
        return True


class TrainerPool:
    """The training world, and the critic's, which learns from the same batches; `together` neighbouring ranks train on
    the same micro-batches."""

    def __init__(
        self,
        ranks: Sequence[Handle[ActorRole]],
        observer: Observer,
        together: int = 1,
        replay: Replay | None = None,
        trained: Callable[[Sequence[TrainReport]], None] = lambda reports: None,
        critics: Sequence[Handle[CriticRole]] = (),
    ) -> None:
        """trained: is told as well."""
        self.ranks, self.observer, self.together, self.trained = ranks, observer, together, trained
        self.critics = critics
        self._replay = replay or Replay()

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        if iteration < self._replay.done:
            return
        self.observer.doing("actor", f"batch {iteration}")
        async with asyncio.TaskGroup() as asked:
            actors = asked.create_task(ask_all(self.ranks, lambda actor: actor.train(iteration, first)))
            critics = asked.create_task(ask_all(self.critics, lambda critic: critic.train(iteration)))
        each, of_values = (one_report_per_group(asked.result(), self.together) for asked in (actors, critics))
        self.observer.trained(iteration, each, of_values)
        self.trained(each)
        self.observer.doing("actor", "waiting")


class PublishedWeights:
    """The coordinator, made known. While weights travel, the queue forgets the samples that they learnt from, and
    `pools` hand in what they did in the iteration that ends with it. Writing that down keeps nobody waiting."""

    def __init__(
        self,
        coordinator: Coordinator,
        queue: TransferQueue,
        observer: Observer,
        pools: Sequence[Pool[Any]],
        evaluation: Evaluation | None = None,
        replay: Replay | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.coordinator, self.queue, self.observer, self.pools = coordinator, queue, observer, pools
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self._replay = replay or Replay()
        self.cut: Callable[[int], Callable[[], Cut]] = _nothing_to_cut
        """Called as a version was made that is to have a checkpoint; what that returns, when it is written down."""
        self._versions: dict[str, int] = {}  # of engines that swapped
        self._recording: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        if self._brought_before(version):
            return
        await self._close(version, "publishing", self._publish(version))

    async def start_transfer(self, version: int) -> None:
        if version <= self._replay.done:
            return
        await self._close(version, "handing over", self.coordinator.start_transfer(version))

    async def mark_version(self, version: int) -> None:
        """The trained weights are called `version` now, and go to no engine."""
        if self._brought_before(version):
            return
        await self._close(version, "marking")

    def _brought_before(self, version: int) -> bool:
        """Before the run went on from a checkpoint."""
        if version > self._replay.done:
            return False
        self._replay.brought = version
        return True

    async def wait_arrived(self, version: int) -> None:
        if version <= self._replay.done:
            return
        await self.coordinator.wait_arrived(version)
        self.observer.doing("weights", f"version {version} arrived")

    async def swap(self, rollout: Rollout, version: int) -> None:
        assert isinstance(rollout, RolloutPool)
        if version <= self._replay.done:
            rollout.swapped = version
            self._versions |= {worker.name: self._replay.done for worker in rollout.workers}
            return
        self.observer.doing(rollout.name, f"loading version {version}")
        await self.coordinator.wait_arrived(version)  # until then engines may come and go
        await self.coordinator.swap(rollout.workers, version)
        self.observer.doing(rollout.name, f"at version {version}")
        if self.evaluation is not None:
            self._versions |= {worker.name: version for worker in rollout.workers}
            if all(self._versions.get(engine.name) == version for engine in self.evaluation.fleet.working):
                await self._evaluate(version)

    async def _publish(self, version: int) -> None:
        await self.coordinator.publish(version)
        await self._evaluate(version)

    async def evaluate_first(self) -> None:
        """The weights to start with, before the schedule."""
        await self._evaluate(0)

    async def evaluate_last(self, version: int) -> None:
        """The last version, after the schedule: some never bring it to the engines."""
        if self.evaluation is None or not self.evaluation.due(version):
            return
        if self._versions:
            await self.coordinator.swap(self.evaluation.fleet.working, version)
        else:
            await self.coordinator.publish(version)
        await self._evaluate(version)

    async def _evaluate(self, version: int) -> None:
        """Where it is due; all engines have it."""
        if self.evaluation is not None and self.evaluation.due(version):
            self.observer.doing("evaluation", f"version {version}")
            await self.evaluation.evaluate(version)
            self.observer.doing("evaluation", f"evaluated version {version}")

    async def _close(self, version: int, what: str, *transfer: Coroutine[Any, Any, None]) -> None:
        """Ends the iteration that made `version`, when its transfer has got as far as the trainer has to wait."""
        self.observer.doing("actor", f"{what} version {version}")
        for pool in self.pools:
            pool.ask_spans()
        checkpoints = self.checkpoints
        due = checkpoints is not None and bool(transfer) and checkpoints.due(version)
        queue = asyncio.gather(self.queue.describe(), self._forget_finished())
        copying = asyncio.create_task(self._begin_checkpoint(version, queue)) if due else None
        try:
            await asyncio.sleep(0)  # the queue is asked before it gets anything of the next iteration
            for part in transfer:
                await part
            if copying is not None:
                await copying
            await self.recorded()
        except BaseException:
            queue.cancel()
            if copying is not None:
                copying.cancel()
                await asyncio.gather(copying, return_exceptions=True)
            await asyncio.gather(queue, return_exceptions=True)
            raise
        record = self.observer.published(version)
        cut = self.cut(version) if due else None
        self._recording = asyncio.create_task(self._record(record, queue, cut))
        self.observer.doing("actor", "waiting")

    async def recorded(self) -> None:
        """Wait until what ended is written down."""
        if self._recording is not None:
            await self._recording

    async def _forget_finished(self) -> None:
        """Once it is saved, where a checkpoint waits for that."""
        if self.checkpoints is not None:
            await self.checkpoints.save_queue()
        await self.queue.clear_finished()

    async def _begin_checkpoint(self, version: int, queue: Awaitable[Any]) -> None:
        """Where one before waits for the queue, that comes first."""
        assert self.checkpoints is not None
        await self.recorded()
        await queue
        self.checkpoints.complete()
        await self.checkpoints.begin(version)

    async def _record(
        self,
        record: Callable[[Mapping[str, float]], None],
        queue: Awaitable[tuple[Mapping[str, Any], None]],
        cut: Callable[[], Cut] | None,
    ) -> None:
        described = (await queue)[0]
        if cut is None and self.checkpoints is not None:
            self.checkpoints.complete()
        await asyncio.sleep(_RECORD_AFTER_S)
        record(queue_metrics(described))
        if cut is not None:
            assert self.checkpoints is not None
            self.checkpoints.cut(cut())


def _nothing_to_cut(version: int) -> Callable[[], Cut]:
    raise RuntimeError(f"version {version} is to have a checkpoint, and nobody knows of what")


@dataclass(frozen=True)
class RunningJob:
    """`schedules.protocol.Job`."""

    iterations: int
    batch: int
    prompts: PromptSource
    rollout: RolloutPool
    device_stages: Sequence[StagePool]
    host_stages: Sequence[StagePool]
    trainer: TrainerPool
    weights: PublishedWeights
    replay: Replay = field(default_factory=Replay)

    @property
    def stages(self) -> Sequence[StagePool]:
        return (*self.host_stages, *self.device_stages)
