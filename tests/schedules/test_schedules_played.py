"""What each schedule does to lag, played through on a real queue: engines and a trainer that take turns, not time."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.local import LocalQueue
from schedules import Schedule
from schedules.adaptive_staleness import AdaptiveStaleness
from schedules.capacity import Capacity
from schedules.colocate_sync import ColocateSync
from schedules.delayed_update import DelayedUpdate
from schedules.fully_async import FullyAsync
from schedules.half_step import HalfStep
from schedules.k_step_off import KStepOff
from schedules.one_step_off import OneStepOff
from schedules.protocol import PauseMode
from schedules.rolling_update import RollingUpdate
from schedules.separated_sync import SeparatedSync

N = 2  # samples of a group


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class PlayedEngine:
    """Takes a group at a time, some turns per group, and stamps it with the versions that it ran first and last."""

    name: str
    queue: LocalQueue
    version: int = 0
    running: bool = False
    draining: bool = False
    aborting: bool = False
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unpaused.set()

    async def generate(self, partition: str | None) -> None:
        while True:
            await self.unpaused.wait()
            batch = await self.queue.get("rollout", N, consumer=self.name, partition=partition)
            if batch is None:
                return
            await self.unpaused.wait()  # it may have been paused while it waited for rows
            first, self.running = self.version, True
            left = length = 1 + int(batch.rows[0]) * 7 % 11  # groups differ in length
            while left:
                if not self.draining and not self.unpaused.is_set():
                    await self.unpaused.wait()
                    if self.aborting:
                        first, left = self.version, length
                left -= 1
                await asyncio.sleep(0)
                last = self.version
            self.running = False
            self.drained.set()
            versions = {"first": np.full(N, first, np.int32), "last": np.full(N, last, np.int32)}
            await self.queue.put(batch.partition, batch.rows, versions)
            await self.queue.acknowledge(batch.lease)

    async def pause(self, mode: PauseMode) -> None:
        self.draining, self.aborting = mode == "wait", mode == "abort"
        self.unpaused.clear()
        while self.draining and self.running:
            self.drained.clear()
            await self.drained.wait()

    def load(self, version: int) -> None:
        assert not self.running or not self.unpaused.is_set(), "weights arrived while an engine generated"
        assert version > self.version
        self.version = version


@dataclass
class PlayedRollout:
    engines: Sequence[PlayedEngine]

    def split(self, cohorts: int | None = None) -> Sequence["PlayedRollout"]:
        count = cohorts or len(self.engines)
        return [PlayedRollout(self.engines[k::count]) for k in range(count)]

    async def generate(self, iteration: int, batches: int = 1) -> None:
        async def one_after_the_other(engine: PlayedEngine) -> None:
            for i in range(iteration, iteration + batches):
                await engine.generate(f"train_{i}")

        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(one_after_the_other(engine))

    async def stream(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.generate(None))

    async def set_dispatch_limit(self, below: int) -> None:
        for engine in self.engines:
            await engine.queue.set_bound("rollout", engine.name, below * N)

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.gather(*(engine.pause(mode) for engine in self.engines))

    async def resume(self, below: int) -> None:
        await self.set_dispatch_limit(below)
        for engine in self.engines:
            engine.draining = False
            engine.unpaused.set()


class PlayedJob:
    """Prompts, queue and dispatch bound are used as the real roles use them."""

    host_stages: Sequence[None] = ()
    stages: Sequence[None] = ()
    device_stages: Sequence[None] = ()

    def __init__(self, schedule: Schedule, *, iterations: int, batch: int, speed: tuple[int, int, int]) -> None:
        self.iterations, self.batch = iterations, batch
        engines, self.train_turns, self.transfer_turns = speed
        rows = batch * N * (Capacity(batch, schedule.eta).worst_lag + 1)
        columns = {"prompt": ColumnSpec("int64"), "first": ColumnSpec("int32"), "last": ColumnSpec("int32")}
        tasks = {
            "rollout": TaskSpec(("prompt",), whole_groups=True),
            "actor": TaskSpec(("first", "last"), whole_groups=True),
        }
        self.queue = LocalQueue(QueueSpec(columns, tasks, rows))
        self.rollout = PlayedRollout([PlayedEngine(str(k), self.queue) for k in range(engines)])
        self.prompts = self.trainer = self.weights = self
        self.admitted = 0
        self.here: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.trained: list[tuple[int, int, int, int]] = []  # row, iteration, first version, last version
        self.paused_at_once = 0
        self.waited = 1.0

    async def play(self, schedule: Schedule) -> list[tuple[int, int, int, int]]:
        async with asyncio.timeout(120):
            await schedule.run(self)  # type: ignore[arg-type]
        return self.trained

    async def admit(self, below: int) -> None:
        while self.admitted < min(below, self.iterations * self.batch):
            i = self.admitted // self.batch
            if self.admitted % self.batch == 0:
                rows = range(self.admitted * N, (self.admitted + self.batch) * N)
                await self.queue.create_partition(f"train_{i}", rows, N)
            end = min(below, (i + 1) * self.batch)
            rows = range(self.admitted * N, end * N)
            await self.queue.put(f"train_{i}", rows, {"prompt": np.arange(len(rows))})
            self.admitted = end

    async def close(self) -> None:
        await self.queue.close()

    async def train(self, iteration: int) -> None:
        partition = f"train_{iteration}"
        while (batch := await self.queue.get("actor", 2 * N, partition=partition, consumer="0")) is not None:
            firsts, lasts = batch.columns["first"], batch.columns["last"]
            self.trained += [
                (int(row), iteration, int(first), int(last))
                for row, first, last in zip(batch.rows, firsts, lasts, strict=True)  # type: ignore[arg-type]
            ]
            await turns(self.train_turns)
            await self.queue.acknowledge(batch.lease)

    async def publish(self, version: int) -> None:
        await self.mark_version(version)
        await turns(self.transfer_turns)
        for engine in self.rollout.engines:
            engine.load(version)

    async def mark_version(self, version: int) -> None:
        await self.queue.clear(f"train_{version - 1}")

    async def start_transfer(self, version: int) -> None:
        if version > 1:
            await self.here[version - 1].wait()
        await self.mark_version(version)
        asyncio.get_running_loop().call_soon(self._travel, version, self.transfer_turns)

    def _travel(self, version: int, left: int) -> None:
        if left == 0:
            return self.here[version].set()
        asyncio.get_running_loop().call_soon(self._travel, version, left - 1)

    async def wait_arrived(self, version: int) -> None:
        await self.here[version].wait()

    async def swap(self, rollout: PlayedRollout, version: int) -> None:
        paused = sum(not engine.unpaused.is_set() for engine in self.rollout.engines)
        self.paused_at_once = max(self.paused_at_once, paused)
        await turns(3)
        for engine in rollout.engines:
            engine.load(version)

    async def swap_newest(self, rollout: PlayedRollout) -> int:
        version = max(number for number, here in self.here.items() if here.is_set())
        await self.swap(rollout, version)
        return version


ITERATIONS, BATCH = 7, 6
SPEEDS = pytest.mark.parametrize(  # engines, turns per micro-batch, turns of a transfer
    "speed", [(1, 1, 0), (2, 200, 3), (3, 0, 40), (3, 20, 5), (4, 60, 300)], ids=lambda speed: "-".join(map(str, speed))
)


async def played(schedule: Schedule, speed: tuple[int, int, int]) -> tuple[PlayedJob, np.ndarray]:
    """The job; and iteration, first version and last version, by row."""
    job = PlayedJob(schedule, iterations=ITERATIONS, batch=BATCH, speed=speed)
    trained = np.array(await job.play(schedule))
    assert trained[:, 0].tolist() == list(range(ITERATIONS * BATCH * N)), "each row once, in group order"
    assert (trained[:, 1] == trained[:, 0] // N // BATCH).all()
    assert (trained[:, 2] <= trained[:, 3]).all() and (trained[:, 3] <= trained[:, 1]).all()
    return job, trained[:, 1:].T


@SPEEDS
@pytest.mark.parametrize("schedule", [ColocateSync(), SeparatedSync(), SeparatedSync(streaming=False)])
async def test_synchronous_training_never_sees_a_lag(schedule: Schedule, speed: tuple[int, int, int]) -> None:
    _, (iteration, first, last) = await played(schedule, speed)
    assert (iteration == first).all() and (iteration == last).all()


@SPEEDS
@pytest.mark.parametrize("schedule", [OneStepOff(), DelayedUpdate(), KStepOff(k=1)])
async def test_one_step_behind_is_exactly_one_step(schedule: Schedule, speed: tuple[int, int, int]) -> None:
    _, (iteration, first, last) = await played(schedule, speed)
    assert (first == np.maximum(iteration - 1, 0)).all() and (first == last).all()


@SPEEDS
@pytest.mark.parametrize("k", [2, 3, 10])
async def test_k_steps_off_a_batch_lags_by_its_place_in_its_rollout_batch(k: int, speed: tuple[int, int, int]) -> None:
    _, (iteration, first, last) = await played(KStepOff(k=k), speed)
    j, r = iteration // k, iteration % k
    assert (iteration - first == np.where(j == 0, r, k + r)).all() and (first == last).all()
    assert (iteration - first).max() <= KStepOff(k=k).eta


@SPEEDS
@pytest.mark.parametrize("mode", get_args(PauseMode))
@pytest.mark.parametrize("cohorts", [2, 3])
async def test_half_a_step_off_lags_in_first_halves(cohorts: int, mode: PauseMode, speed: tuple[int, int, int]) -> None:
    schedule = HalfStep(cohorts=cohorts, pause=mode)
    engines = max(speed[0], cohorts)
    job, (iteration, first, last) = await played(schedule, (engines, *speed[1:]))
    place = np.arange(ITERATIONS * BATCH * N) // N % BATCH
    lag = iteration - first
    assert set(lag.tolist()) <= {0, 1} and (lag[place >= BATCH / 2] == 0).all() and lag.mean() <= 0.5
    assert 1 <= job.paused_at_once <= -(-engines // cohorts), "one cohort at a time"
    if mode in ("wait", "abort"):
        assert (first == last).all(), "no sample lived through an update"


async def test_half_a_step_off_has_a_mean_lag_of_a_half_where_rollout_runs_ahead() -> None:
    _, (iteration, first, _) = await played(HalfStep(), (4, 300, 2))
    assert (iteration - first)[iteration > 0].mean() == 0.5


@SPEEDS
@pytest.mark.parametrize("mode", get_args(PauseMode))
@pytest.mark.parametrize("eta", [0, 0.5, 1, 1.3, 2])
@pytest.mark.parametrize("streaming", [FullyAsync, RollingUpdate])
async def test_streaming_trains_every_row_once_within_the_bound(
    streaming: type[FullyAsync | RollingUpdate], eta: float, mode: PauseMode, speed: tuple[int, int, int]
) -> None:
    _, (iteration, first, last) = await played(streaming(max_staleness=eta, pause=mode), speed)
    assert (iteration - first).max() <= Capacity(BATCH, eta).worst_lag
    if mode in ("wait", "abort"):
        assert (first == last).all(), "no sample lived through an update"


async def test_staleness_that_adapts_comes_to_its_bound_step_by_step_where_the_trainer_waits() -> None:
    _, (iteration, first, _) = await played(AdaptiveStaleness(max_staleness=2, step=0.5), (3, 50, 5))
    most = [(iteration - first)[iteration == i].max() for i in range(ITERATIONS)]
    assert most[0] == most[1] == 0 and most == sorted(most) and most[-1] == 2


@pytest.mark.parametrize("updating", [0.25, 0.5, 1])
async def test_no_more_engines_roll_at_a_time_than_may_and_several_versions_sample_at_once(updating: float) -> None:
    job, (_, first, _) = await played(RollingUpdate(updating=updating), (4, 3, 5))
    assert 1 <= job.paused_at_once <= 4 * updating
    assert updating == 1 or (np.diff(first) < 0).any(), "an older version began a later row"


async def test_where_rollout_is_faster_the_bound_is_reached() -> None:
    _, (iteration, first, _) = await played(FullyAsync(max_staleness=2), (3, 50, 5))
    assert (iteration - first).max() == 2


async def test_half_a_batch_of_staleness_samples_the_other_half_fresh() -> None:
    _, (iteration, first, _) = await played(FullyAsync(max_staleness=0.5), (3, 200, 5))
    place = np.arange(ITERATIONS * BATCH * N) // N % BATCH
    assert ((iteration - first)[iteration > 0] == (place < 3)[iteration > 0]).all()
