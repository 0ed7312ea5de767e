"""Versions of the weights as a schedule brings them to engines, and what ends with each: an iteration."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from harness.driver.checkpoint_files import Cut
from harness.driver.checkpointing import Checkpoints
from harness.driver.evaluation import Evaluation
from harness.driver.pools import AlreadyDone, Pool, RolloutPool
from harness.driver.recorder import EndedIteration, Recorder
from harness.runtime.runtime import retrieved
from harness.transfer_queue import TransferQueue
from harness.transfer_queue.control.reporting import queue_metrics
from harness.weight_sync.coordinator import Coordinator
from harness.workers.dataflow import RECORD
from harness.workers.recording import Recorded, TrainedIteration
from schedules.protocol import Rollout

_RECORD_AFTER_S = 0.005  # by then the next batch is asked for, and its workers need nothing of the driver


class PublishedWeights:
    """The coordinator, made known. While weights travel, the queue forgets the samples that they learnt from, and
    `pools` hand in what they did in the iteration that ends with it. Writing that down keeps nobody waiting."""

    def __init__(
        self,
        coordinator: Coordinator,
        queue: TransferQueue,
        observer: Recorder,
        pools: Sequence[Pool[Any]],
        record: Callable[[TrainedIteration], Awaitable[Recorded]],
        evaluation: Evaluation | None = None,
        already: AlreadyDone | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """record: the samples of an iteration, where their rows lie."""
        self.coordinator, self.queue, self.observer, self.pools = coordinator, queue, observer, pools
        self.record = record
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self._already = already or AlreadyDone()
        self.cut: Callable[[int], Callable[[], Cut]] = _nothing_to_cut
        """Called as a version was made that is to have a checkpoint; what that returns, when it is written down."""
        self._evaluating = asyncio.Lock()
        self._recording: asyncio.Task[None] | None = None

    async def publish(self, version: int) -> None:
        if self._brought_before(version):
            return
        async with self._end_of_iteration(version, "publishing"):
            await self.coordinator.distribute(version)
            await self.evaluate(version)

    async def start_transfer(self, version: int) -> None:
        if version <= self._already.done:
            return
        async with self._end_of_iteration(version, "handing over"):
            await self.coordinator.start_transfer(version)

    async def mark_version(self, version: int) -> None:
        if self._brought_before(version):
            return
        async with self._end_of_iteration(version, "marking", travels=False):
            pass

    def _brought_before(self, version: int) -> bool:
        """Whether a version was brought before the run went on from a checkpoint."""
        if version > self._already.done:
            return False
        self._already.brought = version
        return True

    async def wait_arrived(self, version: int) -> None:
        if version <= self._already.done:
            return
        await self.coordinator.wait_arrived(version)
        self.observer.doing("weights", f"version {version} arrived")

    async def swap(self, rollout: Rollout, version: int) -> None:
        if await self._swap(rollout, version):
            versions = self.coordinator.versions
            if all(versions[engine.name] >= version for engine in self.coordinator.fleet.working):
                await self.evaluate(version)

    async def swap_newest(self, rollout: Rollout) -> int:
        """Evaluated, where it is due, by those that have it by now: others may never."""
        version = max(self.coordinator.arrived, self._already.done)
        if await self._swap(rollout, version):
            await self.evaluate(version)
        return version

    async def _swap(self, rollout: Rollout, version: int) -> bool:
        """Whether the job's own engines got it, since the run went on from a checkpoint: it may be evaluated."""
        assert isinstance(rollout, RolloutPool)
        if rollout.fleet is not self.coordinator.fleet:  # lent: they hold it while training devices are theirs
            if version >= self._already.done:
                await self.coordinator.load_beside(rollout.workers, version)
            return False
        if version <= self._already.done:
            rollout.swapped = version
        else:
            self.observer.doing(rollout.name, f"loading version {version}")
            await self.coordinator.wait_arrived(version)  # until then engines may come and go
            await self.coordinator.swap(rollout.workers, version)
            self.observer.doing(rollout.name, f"at version {version}")
        return version >= self._already.done

    async def evaluate_last(self, version: int) -> None:
        """The last version, after the schedule: some never bring it to the engines."""
        if self.evaluation is None or not self.evaluation.due(version):
            return
        await self.coordinator.finish()
        if version <= self.coordinator.arrived:
            await self.coordinator.swap(self.evaluation.fleet.working, version)
        else:
            await self.coordinator.distribute(version)
        await self.evaluate(version)

    async def evaluate(self, version: int) -> None:
        """Evaluate a version, where it is due, by the engines that hold it."""
        async with self._evaluating:  # engines may come to versions side by side
            if self.evaluation is not None and self.evaluation.due(version):
                self.observer.doing("evaluation", f"version {version}")
                await self.evaluation.evaluate(version)
                self.observer.doing("evaluation", f"evaluated version {version}")

    @asynccontextmanager
    async def _end_of_iteration(self, version: int, what: str, *, travels: bool = True) -> AsyncIterator[None]:
        """Ends the iteration that made `version`, around its transfer as far as the trainer has to wait for it. First
        workers hand in their spans, the queue forgets what was trained, and a checkpoint is begun that is due; then the
        iteration is written down beside the next one. travels: to engines, so that a checkpoint may be made of it."""
        self.observer.doing("actor", f"{what} version {version}")
        for pool in self.pools:
            pool.ask_spans()
        checkpoints = self.checkpoints
        leaving = checkpoints is not None and checkpoints.leaving(version)
        due = checkpoints is not None and not leaving and travels and checkpoints.due(version)
        queue = asyncio.gather(self.queue.describe(), self._forget_finished())
        copying = asyncio.create_task(self._begin_checkpoint(version, queue)) if due else None
        try:
            if leaving:
                await self._leave(queue)
            await asyncio.sleep(0)  # the queue is asked before it gets anything of the next iteration
            yield
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
        ended = self.observer.published(version)
        cut = self.cut(version) if due else None
        self._recording = asyncio.create_task(self._record(ended, queue, cut))
        self._recording.add_done_callback(retrieved)  # a run may end before anybody waits for it
        self.observer.doing("actor", "waiting")

    async def _leave(self, queue: Awaitable[Any]) -> None:
        """Leave at the checkpoint that waits for the queue: what was done since is not published. Raises
        LeftAtCheckpoint."""
        assert self.checkpoints is not None
        await self.recorded()
        await queue
        await self.checkpoints.leave()

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
        """Begin a checkpoint, after the one before where that waits for the queue."""
        assert self.checkpoints is not None
        await self.recorded()
        await queue
        self.checkpoints.complete()
        await self.checkpoints.begin(version)

    async def _record(
        self, ended: EndedIteration, queue: Awaitable[tuple[Mapping[str, Any], None]], cut: Callable[[], Cut] | None
    ) -> None:
        """Has the iteration written down; only then its rows are finished. The queue forgets them at once, unless a
        checkpoint waits for it."""
        described = (await queue)[0]
        if cut is None and self.checkpoints is not None:
            self.checkpoints.complete()
        await asyncio.sleep(_RECORD_AFTER_S)
        recorded = await self.record(ended.trained)
        ended.close(recorded, queue_metrics(described))
        if cut is not None:
            assert self.checkpoints is not None
            self.checkpoints.cut(cut())
        rows = ended.trained.rows(self.observer.group_size)
        await self.queue.finish(RECORD, [*rows.tolist(), *recorded.stale])
        if self.checkpoints is None or not self.checkpoints.waits_for_queue:
            await self.queue.clear_finished()


def _nothing_to_cut(version: int) -> Callable[[], Cut]:
    raise RuntimeError(f"version {version} is to have a checkpoint, and nobody knows of what")
