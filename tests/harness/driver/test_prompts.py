"""Groups are numbered in order, batch i in partition train_<i>, and admitted no further than allowed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from harness.config.registries import find
from harness.driver.prompts import PromptSource
from harness.protocols import Completion
from harness.tasks import Dealer, Problem
from harness.transfer_queue import Ragged
from harness.transfer_queue.local import LocalQueue
from harness.workers.dataflow import RECORD, JobShape, Numbering, queue_spec, rollout_columns, text_column
from harness.workers.recording import RecordingSettings, RecordRole, TokenDecoder, TrainedIteration, Untrained
from tests.support.unnoticed import none_unnoticed

SEED, BATCH, N = 5, 4, 2


class StandingClock:
    def now(self) -> float:
        return 12.5

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


class Heard:
    """An observer that listens to admissions and drops only."""

    def __init__(self) -> None:
        self.dropped_rows: list[int] = []
        self.reasons: list[str] = []
        self.rows: list[int] = []
        self.prompt_tokens: dict[int, int] = {}

    def admitted(self, rows: Sequence[int], problem: Problem, at: float) -> None:
        assert at == 12.5
        self.rows += rows
        self.prompt_tokens |= dict.fromkeys(rows, len(problem.prompt))

    def dropped(self, rows: Sequence[int], reason: str, rewards: Sequence[float | None] = ()) -> None:
        self.dropped_rows += sorted(rows)
        self.reasons.append(reason)


def source(
    *, iterations: int = 3, batches_in_queue: int = 3, keep: Callable[[str, list[int]], Awaitable[None]] | None = None
) -> tuple[PromptSource, LocalQueue, Heard]:
    queue = LocalQueue(queue_spec(JobShape([], training_ranks=1, capacity_rows=BATCH * N * batches_in_queue)))
    heard = Heard()
    prompts = PromptSource(
        Dealer(find("task", "reverse")(), SEED),
        queue,
        StandingClock(),
        heard,  # type: ignore[arg-type]
        numbering=Numbering(BATCH),
        group_size=N,
        iterations=iterations,
        keep=keep,
    )
    return prompts, queue, heard


async def take(queue: LocalQueue, groups: int, partition: str | None = None) -> tuple[str, list[int], list[np.ndarray]]:
    batch = await queue.get("rollout", groups * N, partition=partition)
    assert batch is not None
    prompts = batch.columns["prompt"]
    assert isinstance(prompts, Ragged)
    return batch.partition, batch.rows.tolist(), list(prompts.rows())


async def test_groups_are_numbered_and_admitted_without_a_gap() -> None:
    prompts, queue, _ = source()
    await prompts.admit(below=3 * BATCH)
    for i in range(3):
        partition, rows, found = await take(queue, BATCH)
        assert (partition, rows) == (f"train_{i}", list(range(i * BATCH * N, (i + 1) * BATCH * N)))
        for row, prompt in zip(rows, found, strict=True):
            assert prompt.tolist() == find("task", "reverse")().problem(row // N, SEED).prompt.tolist()
    prompts, queue, heard = source()
    for below in (3, 3, 6, 5, 11):
        await prompts.admit(below)
        assert heard.rows == list(range(max(prompts.next, below) * N))
    assert (await take(queue, 4))[1] == list(range(0, 8))
    assert (await take(queue, 4, "train_1"))[1] == list(range(8, 16))
    assert (await take(queue, 3, "train_2"))[1] == list(range(16, 22)), "the last group of the batch is not there yet"


async def test_more_than_the_last_group_is_never_admitted_and_the_queue_stays_open_until_told() -> None:
    prompts, queue, heard = source(iterations=2)
    await prompts.admit(below=1000)
    assert heard.rows == list(range(2 * BATCH * N))
    for _ in range(2):
        await take(queue, BATCH)
    reader = asyncio.create_task(queue.get("rollout", N))
    await asyncio.sleep(0)
    assert not reader.done(), "the queue may still grow"
    await prompts.close()
    assert await reader is None, "closed and exhausted"
    await prompts.admit(below=2000)
    assert len(heard.rows) == 2 * BATCH * N


async def start(queue: LocalQueue, groups: int, below: int) -> None:
    """An engine takes these groups while its dispatch limit is `below`."""
    await queue.set_bound("rollout", "0", below * N)
    await take(queue, groups)


async def test_dropped_groups_are_heard_and_as_many_more_are_admitted() -> None:
    prompts, queue, heard = source(iterations=2, batches_in_queue=4)
    await prompts.admit(below=2 * BATCH)
    await start(queue, groups=3, below=BATCH)
    await start(queue, groups=1, below=2 * BATCH)
    assert await prompts.drop(started_below=BATCH) == 3
    assert (heard.dropped_rows, heard.reasons) == (list(range(3 * N)), ["stale"])
    assert await prompts.drop(started_below=BATCH) == 0
    assert heard.reasons == ["stale"], "nothing was dropped, and nothing is told"
    resumed, _, _ = source(iterations=2)
    resumed.recall(prompts.state(range(3, 2 * BATCH)), {}, [])
    assert [await resumed.drop(started_below=BATCH) for _ in range(2)] == [3, 0], "as before, of an empty queue"
    await prompts.admit(below=2 * BATCH + 1)
    await prompts.admit(below=1000)
    assert heard.rows == list(range((2 * BATCH + 3) * N))


async def test_what_a_dropped_group_says_is_recorded_once_all_of_it_is_scored_and_nobody_waits_for_it() -> None:
    prompts, queue, heard = source(batches_in_queue=4)
    recorder = RecordRole(queue, StandingClock(), RecordingSettings(TokenDecoder(), N))
    await prompts.admit(below=2 * BATCH)
    await start(queue, groups=2, below=BATCH)

    async def say(rows: list[int]) -> None:
        of_each = np.zeros(2, np.float32)
        said = [Completion(row, np.array([7, 8]), of_each, of_each.astype(np.int32), "stop", 0.0, 1.0) for row in rows]
        scores = {"reward": np.full(len(rows), 0.5), "exact_match": np.ones(len(rows), np.bool_)}
        judged = scores | {"reward_failure": text_column([""] * len(rows))}
        await queue.put("train_0", rows, rollout_columns(said, engine=0) | judged)

    await say(list(range(2 * N - 1)))  # the first group, and half of the second
    assert await prompts.drop(started_below=BATCH) == 2
    told = [Untrained(row, "dropped_stale", row // N, 0.5, 4, 3) for row in heard.dropped_rows]
    for first, unread in ((0, list(range(N, 2 * N))), (N, [])):
        recorded = await recorder.record(TrainedIteration(0, [], {}, told[first:], [], 0, 0, None))
        assert recorded.unread == unread and recorded.stale == list(range(first, first + N))
        found = [(one.fate, one.response_tokens, one.reward, one.lag_worst) for one in recorded.records]
        assert found == [("dropped_stale", 2, 0.5, 3)] * N
        assert recorded.sampled == {"dropped_stale": 2 * N} and recorded.metrics == {"token_ledger/discarded_lag": 3.0}
        await queue.finish(RECORD, recorded.stale)
        if unread:
            await say([2 * N - 1])


async def test_what_replaces_dropped_groups_comes_to_an_end_however_few_they_are() -> None:
    prompts, queue, _ = source(iterations=1, batches_in_queue=4)
    await prompts.admit(below=BATCH)
    await start(queue, groups=BATCH, below=BATCH)
    assert await prompts.drop(started_below=BATCH) == BATCH
    await prompts.admit(below=BATCH + 1)
    await prompts.admit(below=BATCH + 3)
    await queue.set_bound("rollout", "0", 1000)
    assert (await take(queue, 1))[:2] == ("train_1", list(range(BATCH * N, (BATCH + 1) * N)))
    await start(queue, groups=2, below=BATCH + 3)
    assert await prompts.drop(started_below=BATCH + 3) == 2, "the one under a wider limit stays"
    await prompts.admit(below=1000)
    await queue.set_bound("rollout", "0", 1000)
    await prompts.close()
    taken = 0
    while (batch := await queue.get("rollout", BATCH * N, minimum=N)) is not None:
        taken += len(batch.rows) // N
    assert taken == 3, "one not admitted before, and two in place of the last that were dropped"


async def test_a_partition_whose_queue_died_while_nobody_needed_it_any_more_is_no_traceback() -> None:
    async def dead(*arguments: object) -> None:
        raise ConnectionError("the queue died")

    async def admit() -> None:
        prompts, queue, _ = source()
        queue.create_partition = dead  # type: ignore[method-assign,assignment]
        admitting = asyncio.create_task(prompts.admit(below=BATCH))
        await asyncio.sleep(0)
        admitting.cancel()
        await asyncio.wait([admitting])

    with none_unnoticed():
        await admit()
