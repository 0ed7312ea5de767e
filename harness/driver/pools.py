"""The workers of each role as a schedule sees them: thin fronts over role handles that report to an observer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from harness.driver.endings import NothingScored
from harness.driver.recorder import Recorder
from harness.driver.restarts import CarryOut, once
from harness.protocols import CarriedSample, Span
from harness.runtime.runtime import Handle, ask_all, death_in
from harness.transfer_queue import TransferQueue
from harness.weight_sync.membership import Fleet
from harness.workers.actor import ActorRole, CriticRole
from harness.workers.dataflow import COMPLETE
from harness.workers.readers import CompletionReader
from harness.workers.rollout import RolloutRole
from harness.workers.stages import StageRole
from harness.workers.training import TrainReport
from schedules.base import gather
from schedules.protocol import PauseMode, Rollout


@dataclass
class AlreadyDone:
    """The part of a job that was done before it went on from a checkpoint.

    A schedule that goes on from version `done` begins at its beginning all the same: so it comes to know what it
    knew. What it asks for that is of iterations before `done` was done, and is answered at once. brought: the newest
    version of these that it has brought to all engines.
    """

    done: int = 0
    brought: int = 0


Role = TypeVar("Role", StageRole, RolloutRole)
Ask = Callable[[Role], Coroutine[Any, Any, list[Span] | None]]


class Pool(Generic[Role]):
    """Workers of one role. What they did is heard when a call ends; of a long one also meanwhile, whenever asked."""

    def __init__(self, name: str, workers: Sequence[Handle[Role]], observer: Recorder) -> None:
        self.name, self.observer = name, observer
        self._workers: list[Handle[Role]] = list(workers)
        self._asked = asyncio.Event()

    @property
    def workers(self) -> list[Handle[Role]]:
        """All workers."""
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


class StagePool(Pool[StageRole]):
    """All workers of one role between rollout and training."""

    def __init__(
        self,
        name: str,
        workers: Sequence[Handle[StageRole]],
        observer: Recorder,
        already: AlreadyDone | None = None,
        carry_out: CarryOut = once,
    ) -> None:
        """carry_out: calls of its workers."""
        super().__init__(name, workers, observer)
        self._already = already or AlreadyDone()
        self._carry_out = carry_out

    async def process(self, iteration: int) -> None:
        if iteration < self._already.done:
            return
        self.observer.doing(self.name, f"batch {iteration}")
        await self._ask_workers(lambda stage: stage.process(iteration))
        self.observer.doing(self.name, "waiting")

    async def stream(self) -> None:
        self.observer.doing(self.name, "streaming")
        await self._long(self._ask_workers(lambda stage: stage.stream()))
        self.observer.doing(self.name, "done")

    async def _ask_workers(self, ask: Ask[StageRole]) -> None:
        await super()._ask_workers(lambda role: self._carry_out(lambda: ask(role)))


class CompletedGroups:
    """A count of the groups that are complete. It reads them as they come: the queue keeps nothing for it. done:
    groups that were trained before a run went on from a checkpoint."""

    def __init__(self, queue: TransferQueue, *, rows: int, group_size: int, done: int) -> None:
        self.queue, self.group_size = queue, group_size
        self._rows, self._groups, self._more = rows, done, asyncio.Event()

    async def count(self) -> None:
        """Count until no more will come."""
        while (batch := await self.queue.get(COMPLETE, self._rows, minimum=self.group_size)) is not None:
            self._groups += len(batch.rows) // self.group_size
            self._more.set()

    async def reached(self, groups: int) -> None:
        """Wait until there are so many."""
        while self._groups < groups:
            self._more.clear()
            await self._more.wait()


class RolloutPool(Pool[RolloutRole]):
    """All rollout engines that work, or those of a cohort: the `fleet` knows which.

    Where one dies over a call, the fleet decides whether the run goes on. Then what it had is in the queue again, and
    the others, of whatever cohort, are asked for the same once more. Many attributes: for what an engine that comes
    back has to be told is kept here.
    """

    def __init__(
        self,
        fleet: Fleet[RolloutRole],
        observer: Recorder,
        name: str = "rollout",
        *,
        among: Collection[str] | None = None,
        whole: RolloutPool | None = None,
        already: AlreadyDone | None = None,
        complete: CompletionReader | None = None,
        filled: CompletedGroups | None = None,
        devices_in_order: bool = False,
    ) -> None:
        """complete: reads what is complete, where a schedule waits for that; filled: counts it. devices_in_order:
        before engines go on they take their devices one after the other, as roles that compute on several of them
        do."""
        super().__init__(name, (), observer)
        self.fleet, self._complete, self._devices_in_order = fleet, complete, devices_in_order
        self._filled = filled
        self.swapped = 0  # the newest version that these were to load of what was done already
        self._already = already or AlreadyDone()
        self._among, self._whole = among, whole or self
        self._cohorts: list[RolloutPool] = []
        self._newest: dict[str, int] = {}  # batch that each engine was asked to generate
        self._streams: asyncio.TaskGroup | None = None  # while engines stream
        self._streaming: set[str] = set()
        self._lost_a_stream = False
        self._limits: dict[str, tuple[int, int]] = {}  # of dispatch, of each engine, those too that are started again
        self._paused: set[str] = set()
        if whole is None:
            fleet.welcome = self._welcome

    @property
    def workers(self) -> list[Handle[RolloutRole]]:
        return [worker for worker in self.fleet.working if self._among is None or worker.name in self._among]

    @property
    def ready(self) -> list[Handle[RolloutRole]]:
        """Engines whose weights are current, also after a restart."""
        behind = self.fleet.membership.behind
        return [worker for worker in self.workers if worker.name not in behind]

    @property
    def _names(self) -> set[str]:
        """Names of its engines, of those that do not work, too."""
        names = {member.name for member in self.fleet.membership.members if member.kind == "engine"}
        return names if self._among is None else names & set(self._among)

    async def _welcome(self, worker: Handle[RolloutRole]) -> None:
        """Bring an engine that was started again to where the others are. What it had to do it is asked once more by
        whoever asked for it."""
        if (limit := self._limits.get(worker.name)) is not None:
            await self._ask(worker, lambda engine: engine.set_dispatch_limit(*limit))
        if worker.name in self._paused:
            await self._ask(worker, lambda engine: engine.pause("keep"))

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
                already=self._already,
                complete=self._complete,
                devices_in_order=self._devices_in_order,
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
    def _ahead(self) -> bool:
        """The engines hold a newer version than the schedule has come to."""
        return max(self.swapped, self._already.brought) < self._already.done

    async def generate(self, iteration: int, batches: int = 1) -> None:
        if iteration + batches <= self._already.done:
            return
        what = f"batch {iteration}" if batches == 1 else f"batches {iteration} to {iteration + batches - 1}"
        self.observer.doing(self.name, what)
        await self._long(self._generate(iteration, batches))
        self.observer.doing(self.name, f"done with {what}")

    async def stream(self) -> None:
        await self._long(self._stream() if self._filled is None else gather(self._stream(), self._filled.count()))
        self.observer.doing(self.name, "done")

    async def completed(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        assert self._complete is not None, "for schedules that declare awaits_completion"
        if iteration < self._already.done:
            return
        async for _ in self._complete.read(iteration, first):
            pass

    async def filled(self, groups: int) -> None:
        assert self._filled is not None, "for schedules that declare lends"
        await self._filled.reached(groups)

    async def set_dispatch_limit(self, below: int) -> None:
        if self._ahead:
            return
        self._whole._limits |= dict.fromkeys(self._names, (below, 0))
        self.observer.doing(self.name, f"up to group {below - 1}")
        await self._ask_workers(lambda engine: engine.set_dispatch_limit(below))

    async def pause(self, mode: PauseMode) -> None:
        await self._stop("draining" if mode == "wait" else "paused for weights", lambda engine: engine.pause(mode))

    async def hand_over(self, to: Rollout) -> None:
        """Deal out what these engines have in whole groups, in turn: each other one gets some of the oldest."""
        assert isinstance(to, RolloutPool) and to._filled is not None
        self.observer.doing(self.name, "handing over")
        queue, n = to._filled.queue, to._filled.group_size
        of_group: dict[int, list[CarriedSample]] = {}
        for carried in await ask_all(self.workers, lambda engine: engine.hand_over()):
            for one in carried:
                of_group.setdefault(one.row // n, []).append(one)
        groups, receivers = [of_group[group] for group in sorted(of_group)], to.workers

        async def take_over(worker: Handle[RolloutRole], samples: list[CarriedSample]) -> None:
            await queue.reassign("rollout", [one.row for one in samples], worker.name)
            if not await to._ask(worker, lambda engine: engine.take_over(samples)):
                await queue.release(worker.name)

        async with asyncio.TaskGroup() as tasks:
            for place, worker in enumerate(receivers):
                if samples := [one for group in groups[place :: len(receivers)] for one in group]:
                    tasks.create_task(take_over(worker, samples))
        self.observer.doing(self.name, "training")

    async def put_off(self) -> None:
        if not self._ahead:  # nobody takes what another one gives back
            await self._ask_workers(lambda engine: engine.set_dispatch_limit(0))
        await self._stop("paused for weights", lambda engine: engine.put_off())

    async def _stop(self, how: str, ask: Ask[RolloutRole]) -> None:
        if self._ahead:
            return
        self.observer.doing(self.name, how)
        self._whole._paused |= self._names
        await self._ask_workers(ask)

    async def resume(self, below: int, above: int = 0) -> None:
        if self._ahead:
            return
        self._whole._limits |= dict.fromkeys(self._names, (below, above))
        self._whole._paused -= self._names
        if self._devices_in_order:
            for worker in self.workers:
                await self._ask(worker, lambda engine: engine.take_device())
        await self._ask_workers(lambda engine: engine.resume(below, above))
        self._whole.start_streams(self.workers)
        self.observer.doing(self.name, f"up to group {below - 1}")

    async def tokens(self) -> tuple[int, int]:
        """Tokens that engines which work have sampled, and those of them thrown away, as their samples began again."""
        told = [(0, 0)]

        async def ask(engine: RolloutRole) -> None:
            told.append(await engine.tokens())

        await self._ask_workers(ask)
        generated, begun_again = map(sum, zip(*told, strict=True))
        return generated, begun_again

    def start_streams(self, workers: Sequence[Handle[RolloutRole]]) -> None:
        """Let these workers stream, too, while engines do. They have weights and a dispatch limit."""
        if self._streams is not None and self._streaming:
            for worker in workers:
                self._start_stream(self._streams, worker)

    async def _generate(self, iteration: int, batches: int) -> None:
        """Generate what a dead engine left, at once, by those that are free: the trainer may need it before it has
        weights to give, and the dead one comes back with weights only. Whoever is not as far as this batch yet takes it
        when it comes to it: not before, for it may hold weights that are too old."""
        await self.fleet.any_back(self._among)
        newest, workers = self._whole._newest, self.ready
        newest |= {worker.name: iteration for worker in workers}

        async def generate(worker: Handle[RolloutRole]) -> None:
            died = not await self._ask(worker, lambda engine: engine.generate(iteration, batches))
            if died or worker.name not in self.fleet.membership.working:  # left, and gave back what it was handed
                for other in self._whole.workers:
                    if newest.get(other.name, -1) >= iteration:
                        asked.create_task(generate(other))
            if died and await self.fleet.back(worker.name):
                await generate(worker)

        async with asyncio.TaskGroup() as asked:
            for worker in workers:
                asked.create_task(generate(worker))

    async def _stream(self) -> None:
        """Stream until all streams ended: also those of engines that came in meanwhile, and of those that took over
        what another one had when it died."""
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
            stream = self._stream_of(worker)
            try:
                streams.create_task(stream)
            except RuntimeError:  # the run ends with another stream
                stream.close()
                raise
            self._streaming.add(worker.name)

    async def _stream_of(self, worker: Handle[RolloutRole]) -> None:
        try:
            if not await self._ask_until_done(worker, lambda engine: engine.stream()):
                self._lost_a_stream = True
        finally:
            self._streaming.discard(worker.name)

    async def _ask_workers(self, ask: Ask[RolloutRole]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(self._ask(worker, ask))

    async def _ask_until_done(self, worker: Handle[RolloutRole], ask: Ask[RolloutRole]) -> bool:
        """Ask as `_ask`; a worker that died over it and is started again is asked once more. False for one that left,
        too: it has given back what the queue was just handing it."""
        while not await self._ask(worker, ask):
            if not await self.fleet.back(worker.name):
                return False
        return worker.name in self.fleet.membership.working

    async def _ask(self, worker: Handle[RolloutRole], ask: Ask[RolloutRole]) -> bool:
        """Whether it did what it was asked; False where it died over it, and the run goes on. Then what it had can be
        taken by others. Raises LostEngine where the run is to end."""
        number = self.fleet.number(worker.name)
        try:
            spans = await ask(worker.role)
        except Exception as error:
            if (death := death_in(error)) is None:
                raise
            message = str(death)
            named = message if message.startswith(worker.name) else f"{worker.name} died: {message}"
            await self.fleet.lose({worker.name: named}, {worker.name: number})
            return False
        self.observer.spans(spans or ())
        return True


class TrainerPool:
    """The training world, and the critic's, which learns from the same batches."""

    def __init__(
        self,
        ranks: Sequence[Handle[ActorRole]],
        observer: Recorder,
        already: AlreadyDone | None = None,
        trained: Callable[[Sequence[TrainReport]], None] = lambda reports: None,
        critics: Sequence[Handle[CriticRole]] = (),
    ) -> None:
        """trained: is told as well."""
        self.ranks, self.observer, self.trained = ranks, observer, trained
        self.critics = critics
        self.waited = 0.0
        self._already = already or AlreadyDone()

    async def train(self, iteration: int, first: Sequence[tuple[int, int]] = ()) -> None:
        if iteration < self._already.done:
            return
        self.observer.doing("actor", f"batch {iteration}")
        async with asyncio.TaskGroup() as asked:
            actors = asked.create_task(ask_all(self.ranks, lambda actor: actor.train(iteration, first)))
            critics = asked.create_task(ask_all(self.critics, lambda critic: critic.train(iteration)))
        _refuse_unscored(iteration, actors.result())
        self.waited = sum(map(_waited, actors.result())) / len(self.ranks)
        self.observer.trained(iteration, actors.result(), critics.result())
        self.trained(actors.result())
        self.observer.doing("actor", "waiting")


def _waited(report: TrainReport) -> float:
    """Share of a rank's batch that it waited for rows."""
    spans = [(span.start, span.end, span.kind == "wait_for_samples") for span in report.spans]
    began = min((start for start, *_ in spans), default=0.0)
    ended = max((end for _, end, _ in spans), default=0.0)
    return sum(end - start for start, end, waits in spans if waits) / (ended - began) if ended > began else 0.0


def _refuse_unscored(iteration: int, reports: Sequence[TrainReport]) -> None:
    """Raise NothingScored where no sample of the batch has a score. What was made of none is not published."""
    rows = [rows for report in reports for rows in report.trained]
    if rows and all(np.isnan(part.rewards).all() for part in rows):
        raise NothingScored(
            f"the {sum(len(part.rewards) for part in rows)} samples of batch {iteration}", rows[0].failure
        )
