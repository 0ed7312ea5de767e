"""What each schedule asks of a job, in which order; and what that does to lag, played through on a real queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from harness.transfer_queue import ColumnSpec, QueueSpec, TaskSpec
from harness.transfer_queue.local import LocalQueue
from schedules import SCHEDULES, ColocateSync, FullyAsync
from schedules.capacity import Capacity

HOST, DEVICE = ("reward", "advantages"), ("reference", "actor_fwd")


# -- a job that only writes down what is asked of it


class Log:
    """Calls as they begin and end, such as "train 3" and "train 3 done"."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.under_way: set[str] = set()

    @contextmanager
    def call(self, line: str) -> Iterator[set[str]]:
        """Yields what was under way when the call came."""
        before = set(self.under_way)
        self.lines.append(line)
        self.under_way.add(line)
        yield before
        self.under_way.discard(line)
        self.lines.append(f"{line} done")

    def at(self, line: str) -> int:
        assert self.lines.count(line) == 1, f"{line}: {self.lines.count(line)} times in {self.lines}"
        return self.lines.index(line)

    def of(self, *verbs: str) -> list[str]:
        return [line for line in self.lines if line.startswith(verbs) and not line.endswith("done")]


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class FakePrompts:
    log: Log

    async def admit(self, below: int) -> None:
        with self.log.call(f"admit {below}"):
            await turns()


@dataclass
class FakeRollout:
    log: Log
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, iteration: int) -> None:
        with self.log.call(f"generate {iteration}"):
            await turns(7)

    async def stream(self) -> None:
        with self.log.call("stream"):
            await self.ended.wait()

    async def allow(self, below: int) -> None:
        with self.log.call(f"allow {below}"):
            await turns()

    async def pause(self, *, drain: bool) -> None:
        with self.log.call(f"pause drain={drain}"):
            await turns()

    async def resume(self, below: int) -> None:
        with self.log.call(f"resume {below}"):
            await turns()


@dataclass
class FakeStage:
    log: Log
    name: str

    async def process(self, iteration: int) -> None:
        with self.log.call(f"{self.name} {iteration}"):
            await turns(5)


@dataclass
class FakeTrainer:
    log: Log
    fail_at: int | None = None

    async def train(self, iteration: int) -> None:
        with self.log.call(f"train {iteration}"):
            await turns(5)
            if iteration == self.fail_at:
                raise ArithmeticError(f"the loss of iteration {iteration} is not finite")


@dataclass
class FakeWeights:
    log: Log
    rollout: FakeRollout
    last: int

    async def publish(self, version: int) -> None:
        with self.log.call(f"publish {version}"):
            await turns()
        if version == self.last:
            self.rollout.ended.set()


class FakeJob:
    """`schedules.protocol.Job`."""

    def __init__(self, *, iterations: int = 4, batch: int = 8, fail_at: int | None = None) -> None:
        self.log = Log()
        self.iterations, self.batch = iterations, batch
        self.prompts, self.rollout = FakePrompts(self.log), FakeRollout(self.log)
        self.host_stages: Sequence[FakeStage] = [FakeStage(self.log, name) for name in HOST]
        self.device_stages: Sequence[FakeStage] = [FakeStage(self.log, name) for name in DEVICE]
        self.trainer = FakeTrainer(self.log, fail_at)
        self.weights = FakeWeights(self.log, self.rollout, iterations)


# -- colocate_sync


async def test_colocated_roles_take_the_devices_one_after_the_other() -> None:
    job = FakeJob()
    await ColocateSync().run(job)
    on_device = ("admit", "generate", *DEVICE, "train", "publish")
    expected: list[str] = []
    for i in range(4):
        asked = [f"admit {8 * (i + 1)}", f"generate {i}", f"reference {i}", f"actor_fwd {i}", f"train {i}"]
        for line in [*asked, f"publish {i + 1}"]:
            expected += [line, f"{line} done"]
    assert [line for line in job.log.lines if line.startswith(on_device)] == expected


async def test_colocated_rewards_and_advantages_run_beside_the_device_stages_and_end_before_training() -> None:
    job = FakeJob()
    await ColocateSync().run(job)
    log = job.log
    for i in range(4):
        for name in HOST:
            assert log.at(f"generate {i} done") < log.at(f"{name} {i}")
            assert log.at(f"{name} {i}") < log.at(f"reference {i} done"), "host stages wait for no device stage"
            assert log.at(f"{name} {i} done") < log.at(f"train {i}")
        assert log.at(f"advantages {i}") < log.at(f"reward {i} done"), "they wait for rows, not for each other"


async def test_a_failing_stage_ends_a_colocated_run_before_training() -> None:
    job = FakeJob()

    async def fail(iteration: int) -> None:
        raise OSError("no reward model")

    job.host_stages[0].process = fail  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as caught:
        await ColocateSync().run(job)
    assert caught.group_contains(OSError, match="no reward model") and not job.log.of("train")


# -- fully_async


@pytest.mark.parametrize("eta", [0, 0.5, 1, 2, 2.5])
async def test_streaming_admits_and_dispatches_up_to_the_limit_of_the_published_version(eta: float) -> None:
    job = FakeJob()
    await FullyAsync(max_staleness=eta).run(job)
    capacity = Capacity(8, eta)
    limits = [capacity.limit(version) for version in range(5)]
    log = job.log
    assert log.of("admit") == [f"admit {limit}" for limit in limits]
    assert log.of("allow", "resume") == [f"allow {limits[0]}", *[f"resume {limit}" for limit in limits[1:]]]
    for version in range(1, 5):
        published = log.at(f"publish {version} done")
        assert published < log.at(f"resume {limits[version]}") and published < log.at(f"admit {limits[version]}")


async def test_streaming_publishes_only_while_engines_are_paused() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    log, expected = job.log, []
    for version in range(1, 5):
        for line in (f"train {version - 1}", "pause drain=False", f"publish {version}", f"resume {8 * (version + 3)}"):
            expected += [line, f"{line} done"]
    assert [line for line in log.lines if line.startswith(("train", "pause", "publish", "resume"))] == expected


@pytest.mark.parametrize(("partial", "drain"), [(True, False), (False, True)])
async def test_streaming_drains_engines_where_samples_may_not_go_on_under_new_weights(
    partial: bool, drain: bool
) -> None:
    job = FakeJob()
    await FullyAsync(partial=partial).run(job)
    assert job.log.of("pause") == [f"pause drain={drain}"] * 4


async def test_every_stage_streams_through_every_iteration_once_and_in_order() -> None:
    job = FakeJob()
    await FullyAsync().run(job)
    for name in (*HOST, *DEVICE):
        assert job.log.of(name + " ") == [f"{name} {i}" for i in range(4)]
    assert job.log.at("actor_fwd 0") < job.log.at("reference 0 done"), "stages run side by side"


async def test_the_first_failure_ends_a_streaming_run_with_all_its_loops() -> None:
    job = FakeJob(fail_at=2)
    with pytest.raises(ExceptionGroup) as caught:
        await FullyAsync().run(job)
    assert [str(error) for error in caught.value.exceptions] == ["the loss of iteration 2 is not finite"]
    assert job.log.of("publish") == ["publish 1", "publish 2"]
    assert "stream done" not in job.log.lines, "engines that waited were cancelled"


@pytest.mark.parametrize("staleness", [-1, -0.001, float("nan"), float("inf"), 1e7])
def test_a_staleness_that_is_no_bound_is_refused(staleness: float) -> None:
    with pytest.raises(ValueError, match=f"^schedule.max_staleness={staleness} is no bound; use 0 or more"):
        FullyAsync(max_staleness=staleness)


def test_every_schedule_says_how_weights_travel_and_how_stale_it_is() -> None:
    told = {name: (schedule().transport, schedule().eta) for name, schedule in SCHEDULES.items()}
    assert told == {"colocate_sync": ("ipc", 0.0), "fully_async": ("collective", 2.0)}


# -- both, played through: a real queue, engines and a trainer that compute nothing

N = 2  # samples of a group


class PlayedJob:
    """Engines that take `steps` turns of the event loop per token and stamp each token with the version they run.

    Prompts, queue and dispatch bound are used as the real roles use them. Takes turns instead of time.
    """

    def __init__(self, *, eta: float, iterations: int, batch: int, engines: int, train_turns: int) -> None:
        self.iterations, self.batch, self.engines, self.train_turns = iterations, batch, engines, train_turns
        rows = batch * N * (Capacity(batch, eta).worst_lag + 1)
        columns = {"prompt": ColumnSpec("int64"), "first": ColumnSpec("int32"), "last": ColumnSpec("int32")}
        tasks = {
            "rollout": TaskSpec(("prompt",), whole_groups=True),
            "actor": TaskSpec(("first", "last"), whole_groups=True),
        }
        self.queue = LocalQueue(QueueSpec(columns, tasks, rows))
        self.prompts = self.rollout = self.trainer = self.weights = self
        self.host_stages: Sequence[FakeStage] = ()
        self.device_stages: Sequence[FakeStage] = ()
        self.admitted, self.version, self.running = 0, 0, 0
        self.unpaused, self.drained = asyncio.Event(), asyncio.Event()
        self.unpaused.set()
        self.draining = False
        self.trained: list[tuple[int, int, int, int]] = []  # row, iteration, first version, last version

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
            if end == self.iterations * self.batch:
                await self.queue.close()

    async def allow(self, below: int) -> None:
        for engine in range(self.engines):
            await self.queue.set_bound("rollout", str(engine), below * N)

    async def stream(self, partition: str | None = None) -> None:
        async with asyncio.TaskGroup() as engines:
            for engine in range(self.engines):
                engines.create_task(self._engine(str(engine), partition))

    async def generate(self, iteration: int) -> None:
        await self.stream(f"train_{iteration}")

    async def _engine(self, name: str, partition: str | None) -> None:
        while True:
            await self.unpaused.wait()
            batch = await self.queue.get("rollout", N, consumer=name, partition=partition)
            if batch is None:
                return
            await self.unpaused.wait()  # it may have been paused while it waited for rows
            self.running += 1
            first = self.version
            for _ in range(1 + int(batch.rows[0]) % 5):  # groups differ in length
                if not self.draining:
                    await self.unpaused.wait()
                await asyncio.sleep(0)
                last = self.version
            self.running -= 1
            if not self.running:
                self.drained.set()
            versions = {"first": np.full(N, first, np.int32), "last": np.full(N, last, np.int32)}
            await self.queue.put(batch.partition, batch.rows, versions)
            await self.queue.acknowledge(batch.lease)

    async def pause(self, *, drain: bool) -> None:
        self.draining = drain
        self.unpaused.clear()
        if drain and self.running:
            self.drained.clear()
            await self.drained.wait()

    async def resume(self, below: int) -> None:
        await self.allow(below)
        self.unpaused.set()

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
        await self.queue.clear(partition)

    async def publish(self, version: int) -> None:
        assert not self.running or not self.unpaused.is_set(), "weights arrived while an engine generated"
        await turns()
        self.version = version


SPEEDS = pytest.mark.parametrize(("engines", "train_turns"), [(1, 1), (1, 200), (3, 0), (3, 20)])


@SPEEDS
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("eta", [0, 0.5, 1, 1.3, 2])
async def test_streaming_trains_every_row_once_within_the_bound(
    eta: float, partial: bool, engines: int, train_turns: int
) -> None:
    job = PlayedJob(eta=eta, iterations=7, batch=6, engines=engines, train_turns=train_turns)
    async with asyncio.timeout(60):
        await FullyAsync(max_staleness=eta, partial=partial).run(job)
    rows = [row for row, *_ in job.trained]
    assert rows == list(range(7 * 6 * N)), "each once, in group order"
    assert all(iteration == row // N // 6 for row, iteration, *_ in job.trained)
    lags = [iteration - first for _, iteration, first, _ in job.trained]
    assert 0 <= min(lags) and max(lags) <= Capacity(6, eta).worst_lag
    if not partial:
        assert all(first == last for *_, first, last in job.trained), "no sample lived through an update"


async def test_where_rollout_is_faster_the_bound_is_reached_and_samples_live_through_updates() -> None:
    job = PlayedJob(eta=2, iterations=7, batch=6, engines=3, train_turns=50)
    await FullyAsync(max_staleness=2).run(job)
    assert max(iteration - first for _, iteration, first, _ in job.trained) == 2


async def test_half_a_batch_of_staleness_samples_the_other_half_fresh() -> None:
    job = PlayedJob(eta=0.5, iterations=5, batch=6, engines=3, train_turns=200)
    await FullyAsync(max_staleness=0.5).run(job)
    for row, iteration, first, _ in job.trained:
        if iteration:
            assert iteration - first == (1 if row // N % 6 < 3 else 0)


@SPEEDS
async def test_colocated_training_never_sees_a_lag(engines: int, train_turns: int) -> None:
    job = PlayedJob(eta=0, iterations=5, batch=6, engines=engines, train_turns=train_turns)
    await ColocateSync().run(job)
    assert [row for row, *_ in job.trained] == list(range(5 * 6 * N))
    assert all(iteration == first == last for _, iteration, first, last in job.trained)
