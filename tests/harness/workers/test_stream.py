"""A stage over all batches at once: which rows it takes when, what it tells meanwhile, when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from harness.transfer_queue import Batch, Column, LocalQueue, Ragged
from harness.workers.dataflow import iteration_of, partition_name
from harness.workers.stages import Stage
from tests.support.role_setting import GROUP, ROWS, CountingQueue, TickingClock, completion, settle


class NotingStage(Stage):
    """A reference that computes nothing, and keeps the rows of each micro-batch."""

    role = kind = "reference"

    def __init__(self, queue: LocalQueue) -> None:
        super().__init__(queue, TickingClock(), name="0", rows=2 * GROUP, minimum=2 * GROUP, wait_timeout_s=60.0)
        self.seen: list[list[int]] = []

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        self.seen.append(batch.rows.tolist())
        return {
            "ref_log_probs": Ragged.from_rows([np.zeros(len(r), np.float32) for r in batch.ragged("response").rows()])
        }


async def respond(queue: CountingQueue, iteration: int, rows: range) -> None:
    done = [completion(iteration * ROWS + row, version=0) for row in rows]
    await queue.put(
        partition_name(iteration),
        [c.sample_id for c in done],
        {
            "response": Ragged.from_rows([c.tokens for c in done]),
            "log_probs": Ragged.from_rows([c.log_probs for c in done]),
            "versions": Ragged.from_rows([c.versions for c in done]),
            "engine": np.zeros(len(done), np.int32),
            "started_at": np.zeros(len(done)),
            "finished_at": np.zeros(len(done)),
        },
    )


@pytest.mark.parametrize("iteration", [0, 7, 123])
def test_a_partition_s_name_and_its_iteration_are_each_other_s_inverse(iteration: int) -> None:
    assert iteration_of(partition_name(iteration)) == iteration


async def test_a_stream_takes_whatever_is_ready_and_ends_when_the_queue_is_closed_and_done() -> None:
    queue = CountingQueue(order="completion")
    stage = NotingStage(queue)
    running = asyncio.create_task(stage.stream())
    for iteration in (0, 1):
        await queue.admit(iteration)
    await respond(queue, 1, range(ROWS))
    await settle()
    assert [rows[0] // ROWS for rows in stage.seen] == [1] * 3, "a batch is worked on before one that came earlier"
    await respond(queue, 0, range(ROWS))
    await settle()
    assert not running.done()
    await queue.close()
    spans = await running
    assert sorted(row for rows in stage.seen for row in rows) == list(range(2 * ROWS))
    assert [span.iteration for span in spans] == [1] * 3 + [0] * 3
    written = (await queue.describe())["partitions"]
    assert [written[partition_name(i)]["written"]["ref_log_probs"] for i in (0, 1)] == [ROWS, ROWS]


async def test_micro_batches_of_a_stream_are_those_of_batch_by_batch() -> None:
    async def stages(stream: bool) -> list[list[int]]:
        queue = CountingQueue()
        stage = NotingStage(queue)
        for iteration in (0, 1):
            await queue.admit(iteration)
            await respond(queue, iteration, range(ROWS))
        await queue.close()
        if stream:
            await stage.stream()
        else:
            await stage.process(0)
            await stage.process(1)
        return stage.seen

    assert await stages(stream=True) == await stages(stream=False)


async def test_spans_are_handed_out_while_a_stream_goes_on_and_each_once() -> None:
    queue = CountingQueue()
    stage = NotingStage(queue)
    running = asyncio.create_task(stage.stream())
    await queue.admit(0)
    await respond(queue, 0, range(2 * GROUP))
    await settle()
    assert len(await stage.take_spans()) == 1
    assert await stage.take_spans() == []
    await respond(queue, 0, range(2 * GROUP, ROWS))
    await queue.close()
    assert len(await running) == 2


async def test_a_stage_says_what_it_waits_for() -> None:
    queue = CountingQueue()
    stage = NotingStage(queue)
    await queue.admit(0)
    running = asyncio.create_task(stage.process(0))
    await settle()
    assert await stage.waiting() == ["reference[0].work waits for rows of train_0"]
    await respond(queue, 0, range(ROWS))
    await running
    assert await stage.waiting() == []
