"""Groups are numbered in order, batch i in partition train_<i>, and admitted no further than allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from harness.roles.dataflow import queue_spec
from harness.runner.job import PromptSource
from harness.tasks import TASKS
from harness.transfer_queue import Ragged
from harness.transfer_queue.local import LocalQueue

SEED, BATCH, N = 5, 4, 2


class StandingClock:
    def now(self) -> float:
        return 12.5

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


class Heard:
    """An observer that listens to admissions only."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.prompt_tokens: dict[int, int] = {}

    def admitted(self, rows: Sequence[int], prompt_tokens: int, at: float) -> None:
        assert at == 12.5
        self.rows += rows
        self.prompt_tokens |= dict.fromkeys(rows, prompt_tokens)


def source(*, iterations: int = 3, batches_in_queue: int = 3) -> tuple[PromptSource, LocalQueue, Heard]:
    queue = LocalQueue(queue_spec([], training_ranks=1, capacity_rows=BATCH * N * batches_in_queue))
    heard = Heard()
    prompts = PromptSource(
        TASKS["reverse"](),
        queue,
        StandingClock(),
        heard,  # type: ignore[arg-type]
        seed=SEED,
        batch=BATCH,
        group_size=N,
        iterations=iterations,
        wait_timeout_s=60.0,
    )
    return prompts, queue, heard


async def take(queue: LocalQueue, groups: int, partition: str | None = None) -> tuple[str, list[int], list[np.ndarray]]:
    batch = await queue.get("rollout", groups * N, partition=partition)
    assert batch is not None
    prompts = batch.columns["prompt"]
    assert isinstance(prompts, Ragged)
    return batch.partition, batch.rows.tolist(), list(prompts.rows())


async def test_group_n_holds_the_task_s_nth_problem_in_the_partition_of_its_batch() -> None:
    prompts, queue, _ = source()
    await prompts.admit(below=3 * BATCH)
    for i in range(3):
        partition, rows, found = await take(queue, BATCH)
        assert (partition, rows) == (f"train_{i}", list(range(i * BATCH * N, (i + 1) * BATCH * N)))
        for row, prompt in zip(rows, found, strict=True):
            assert prompt.tolist() == TASKS["reverse"]().problem(row // N, SEED).prompt.tolist()


async def test_admission_by_fractions_of_a_batch_crosses_partitions_without_a_gap() -> None:
    prompts, queue, heard = source()
    for below in (3, 3, 6, 5, 11):
        await prompts.admit(below)
        assert heard.rows == list(range(max(prompts.next, below) * N))
    assert (await take(queue, 4))[1] == list(range(0, 8))
    assert (await take(queue, 4, "train_1"))[1] == list(range(8, 16))
    assert (await take(queue, 3, "train_2"))[1] == list(range(16, 22)), "the last group of the batch is not there yet"


async def test_what_is_admitted_is_heard_with_its_length_and_time() -> None:
    prompts, _, heard = source()
    await prompts.admit(below=5)
    assert heard.prompt_tokens == {row: len(TASKS["reverse"]().problem(row // N, SEED).prompt) for row in range(5 * N)}


async def test_the_last_group_closes_the_queue_and_more_is_never_admitted() -> None:
    prompts, queue, heard = source(iterations=2)
    await prompts.admit(below=7)
    reader = asyncio.create_task(queue.get("rollout", BATCH * N, minimum=BATCH * N, partition="train_2"))
    await asyncio.sleep(0)
    assert not reader.done(), "the queue may still grow"
    reader.cancel()
    await prompts.admit(below=1000)
    assert heard.rows == list(range(2 * BATCH * N))
    for _ in range(2):
        await take(queue, BATCH)
    assert await queue.get("rollout", N) is None, "closed and exhausted"
    await prompts.admit(below=2000)
    assert len(heard.rows) == 2 * BATCH * N


async def test_admission_waits_while_the_queue_is_at_its_cap() -> None:
    prompts, queue, heard = source(batches_in_queue=2)
    admitting = asyncio.create_task(prompts.admit(below=3 * BATCH))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not admitting.done() and heard.rows == list(range(2 * BATCH * N)), "nothing of the third batch is counted"
    await queue.clear("train_0")
    await admitting
    assert heard.rows == list(range(3 * BATCH * N))


async def test_a_queue_that_stays_full_ends_the_wait_with_its_reason() -> None:
    prompts, _, _ = source(batches_in_queue=1)
    prompts.wait_timeout_s = 0.0
    with pytest.raises(TimeoutError, match="no room for the 8 rows of partition 'train_1'"):
        await prompts.admit(below=2 * BATCH)
