"""What a schedule's calls become: calls on workers, what the observer hears of them, and when."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.driver.endings import NothingScored
from harness.driver.pools import RolloutPool, StagePool, TrainerPool
from harness.driver.published_weights import PublishedWeights
from harness.driver.recorder import EndedIteration
from harness.protocols import Span
from harness.transfer_queue import QueueSpec
from harness.transfer_queue.local import LocalQueue
from harness.weight_sync.membership import Fleet
from harness.workers.recording import Recorded, TrainedIteration
from harness.workers.training import TrainedRows, TrainReport
from tests.support.proxies import Proxy
from tests.support.role_setting import settle
from tests.support.unnoticed import none_unnoticed


class Worker:
    """Writes down what is asked of it; `work` lasts until it is told to end, and its spans are numbered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[Any, ...]] = []
        self.end = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()
        self.error: Exception | None = None
        self.report = TrainReport()
        self._spans = 0

    @property
    def role(self) -> Any:
        return Proxy(self._call)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        if method in ("stream", "generate", "process"):
            await self.end.wait()
        if method == "take_spans":
            await self.answer.wait()
        if method == "train":
            return self.report
        if self.error is not None:
            raise self.error
        return self._span() if method in ("stream", "generate", "process", "take_spans") else None

    def _span(self) -> list[Span]:
        self._spans += 1
        return [Span("rollout", self.name, "generate", self._spans, self._spans + 1, 0, 0)]


async def recorded(trained: TrainedIteration) -> Recorded:
    return Recorded(0, 0, 0.0, {})


class Heard:
    """An observer."""

    group_size = 2

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.versions: list[tuple[int, int]] = []
        self.reports: list[tuple[int, Sequence[Any]]] = []

    def doing(self, role: str, what: str) -> None:
        self.lines.append(f"{role}: {what}")

    def spans(self, spans: Iterable[Span]) -> None:
        self.lines += [f"span {span.start} of {span.engine}" for span in spans]

    def trained(self, iteration: int, reports: Sequence[Any], of_values: Sequence[Any] = ()) -> None:
        self.reports.append((iteration, reports))

    def published(self, version: int) -> EndedIteration:
        self.lines.append(f"published {version}")
        trained = TrainedIteration(version - 1, [], {}, [], [], refused=0, late=0, into=None)
        depth = "queue/depth_samples"
        return EndedIteration(trained, lambda recorded, queue: self.versions.append((version, int(queue[depth]))))

    @property
    def of_spans(self) -> list[str]:
        return [line for line in self.lines if line.startswith("span")]


class Weights:
    """A coordinator that writes down what is asked of it; a transfer lasts until `moved`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.moved = asyncio.Event()

    async def distribute(self, version: int) -> None:
        self.asked.append(("publish", version))
        await self.moved.wait()

    async def start_transfer(self, version: int) -> None:
        self.asked.append(("start_transfer", version))
        await self.moved.wait()

    async def wait_arrived(self, version: int) -> None:
        self.asked.append(("wait_arrived", version))

    async def swap(self, handles: Sequence[Worker], version: int) -> None:
        self.asked.append(("swap", [handle.name for handle in handles], version))


class Queue:
    def __init__(self) -> None:
        self.cleared = 0
        self.finished: list[str] = []

    async def describe(self) -> Mapping[str, Any]:
        return {**await LocalQueue(QueueSpec({}, {})).describe(), "depth_samples": 7}

    async def clear_finished(self) -> list[str]:
        self.cleared += 1
        return []

    async def finish(self, task: str, rows: Any) -> None:
        self.finished.append(task)


def engines(count: int) -> list[Worker]:
    return [Worker(str(k)) for k in range(count)]


def pool_of(workers: Sequence[Worker], heard: Heard | None = None) -> RolloutPool:
    return RolloutPool(Fleet(workers), heard or Heard())  # type: ignore[arg-type]


@pytest.mark.parametrize("cohorts", [0, 3])
def test_cohorts_without_an_engine_are_refused(cohorts: int) -> None:
    with pytest.raises(ValueError, match=f"2 rollout engines cannot be split into {cohorts} cohorts"):
        pool_of(engines(2)).split(cohorts)


async def test_what_an_engine_was_just_handed_as_it_left_is_asked_of_the_others() -> None:
    workers = engines(2)
    pool = pool_of(workers)
    running = asyncio.create_task(pool.generate(3))
    workers[0].end.set()
    await settle()
    pool.fleet.membership.request("1", "leave")
    pool.fleet.membership.begin_transfer()
    workers[1].end.set()
    await running
    assert [worker.asked for worker in workers] == [[("generate", 3, 1)] * 2, [("generate", 3, 1)]]


async def test_an_engine_that_came_back_generates_once_it_has_loaded_what_it_was_sent() -> None:
    workers = engines(2)
    pool = pool_of(workers)
    membership = pool.fleet.membership
    for worker in workers:
        worker.end.set()
    membership.request("1", "leave")
    membership.begin_transfer()
    membership.mark_away("1")
    membership.request("1", "join")
    membership.begin_transfer()
    pool.fleet.received(workers, 3)  # type: ignore[arg-type]
    await pool.generate(2)
    membership.set_version("1", 3)
    await pool.generate(3)
    assert [worker.asked for worker in workers] == [[("generate", 2, 1), ("generate", 3, 1)], [("generate", 3, 1)]]


async def test_spans_of_a_long_call_are_heard_whenever_asked_for_and_each_once() -> None:
    worker, heard = Worker("0"), Heard()
    pool = StagePool("reward", [worker], heard)  # type: ignore[arg-type,list-item]
    pool.ask_spans()  # nothing is under way: nothing is asked of anyone
    running = asyncio.create_task(pool.stream())
    await settle()
    assert heard.of_spans == []
    for _ in range(2):
        pool.ask_spans()
        await settle()
    assert heard.of_spans == ["span 1 of 0", "span 2 of 0"]
    worker.end.set()
    await running
    assert heard.of_spans == ["span 1 of 0", "span 2 of 0", "span 3 of 0"]
    assert worker.asked == [("stream",), ("take_spans",), ("take_spans",)]


async def test_a_long_call_that_ends_while_its_spans_are_on_their_way_loses_none() -> None:
    worker, heard = Worker("0"), Heard()
    running = asyncio.create_task((pool := pool_of([worker], heard)).stream())
    await settle()
    worker.answer.clear()
    pool.ask_spans()
    await settle()
    worker.end.set()
    await settle()
    assert not running.done()
    worker.answer.set()
    await running
    assert sorted(heard.of_spans) == ["span 1 of 0", "span 2 of 0"]


async def test_a_worker_that_fails_in_a_long_call_ends_it() -> None:
    worker = Worker("0")
    worker.error = FloatingPointError("not finite")
    running = asyncio.create_task(pool_of([worker]).stream())
    await settle()
    worker.end.set()
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert caught.group_contains(FloatingPointError, match="not finite")


@pytest.mark.parametrize("first", [[], [(12, 4), (16, 8)]])
async def test_every_rank_trains_the_batch_and_its_reports_are_heard(first: list[tuple[int, int]]) -> None:
    ranks, heard = engines(2), Heard()
    await TrainerPool(ranks, heard).train(5, first)  # type: ignore[arg-type]
    assert [rank.asked for rank in ranks] == [[("train", 5, first)]] * 2
    assert heard.reports == [(5, [TrainReport(), TrainReport()])]


async def test_a_batch_of_which_nothing_could_be_scored_ends_the_run_before_anybody_hears_of_it() -> None:
    ranks, heard = engines(2), Heard()
    rows = np.arange(2)
    missing = TrainedRows(rows, rows, np.full(2, np.nan, np.float32), 0.0, "the judge is away")
    for rank in ranks:
        rank.report.trained.append(missing)
    with pytest.raises(NothingScored, match="none of the 4 samples of batch 5 could be scored.*the judge is away"):
        await TrainerPool(ranks, heard).train(5)  # type: ignore[arg-type]
    assert not heard.reports
    ranks[1].report.trained.append(replace(missing, rewards=np.array([np.nan, 0.0], np.float32)))
    await TrainerPool(ranks, heard).train(5)  # type: ignore[arg-type]
    assert len(heard.reports) == 1


@pytest.mark.parametrize("how", ["publish", "start_transfer"])
async def test_a_version_closes_its_iteration_when_its_transfer_lets_the_trainer_go_on(how: str) -> None:
    worker, heard, weights, queue = Worker("0"), Heard(), Weights(), Queue()
    pool = pool_of([worker], heard)
    front = PublishedWeights(weights, queue, heard, [pool], recorded)  # type: ignore[arg-type]
    (cohort,) = pool.split()
    running = asyncio.create_task(cohort.stream())
    await settle()
    publishing = asyncio.create_task(getattr(front, how)(1))
    await settle()
    assert weights.asked == [(how, 1)] and not heard.versions and queue.cleared == 1
    weights.moved.set()
    await publishing
    await front.recorded()
    assert heard.versions == [(1, 7)]
    assert heard.lines.index("span 1 of 0") < heard.lines.index("published 1")
    worker.end.set()
    await running


async def test_who_computes_while_a_version_is_published_holds_nobody_up() -> None:
    worker, heard, weights = Worker("0"), Heard(), Weights()
    pool = StagePool("reference", [worker], heard)  # type: ignore[arg-type,list-item]
    front = PublishedWeights(weights, Queue(), heard, [pool], recorded)  # type: ignore[arg-type]
    weights.moved.set()
    running = asyncio.create_task(pool.stream())
    await settle()
    worker.answer.clear()
    await front.publish(1)
    await front.recorded()
    assert heard.versions == [(1, 7)] and heard.of_spans == []
    worker.answer.set()
    await settle()
    assert heard.of_spans == ["span 1 of 0"]
    worker.end.set()
    await running


async def test_a_version_that_is_kept_goes_nowhere() -> None:
    heard, weights, queue = Heard(), Weights(), Queue()
    front = PublishedWeights(weights, queue, heard, [], recorded)  # type: ignore[arg-type]
    await front.mark_version(2)
    await front.recorded()
    assert (weights.asked, heard.versions, queue.cleared) == ([], [(2, 7)], 2) and queue.finished == ["record"]


async def test_a_queue_that_dies_as_an_iteration_is_written_down_is_no_traceback_of_its_own() -> None:
    class Dead(Queue):
        async def describe(self) -> dict[str, Any]:
            raise ConnectionError("the queue died")

    async def close_one() -> None:
        front = PublishedWeights(Weights(), Dead(), Heard(), [], recorded)  # type: ignore[arg-type]
        await front.mark_version(1)
        await settle()  # then the run ends, by who else met this death

    with none_unnoticed():
        await close_one()
