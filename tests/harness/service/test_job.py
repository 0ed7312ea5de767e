"""A job of somebody else: whatever its trainer and engines do, no sample lags by more than promised."""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from harness.service.job import Conflict, ServedJob
from harness.service.requests import JobRequest, ReceiveRequest
from harness.transfer_queue.rows.columns import Ragged
from tests.support.served_jobs import COLUMNS, TASKS


def request(**changes: object) -> JobRequest:
    fields = {"columns": COLUMNS, "tasks": TASKS, "engines": ["a", "b"], "batch_groups": 2, "group_size": 2}
    return JobRequest.model_validate(fields | changes)


async def weights() -> AsyncIterator[bytes]:
    yield save({"w": np.zeros(3, np.float32)})


class Time:
    def __init__(self) -> None:
        self.now = 0.0


def ask(task: str, reader: str, count: int, minimum: int = 1) -> ReceiveRequest:
    return ReceiveRequest(task=task, reader=reader, count=count, minimum=minimum, timeout_s=0.0)


async def respond(job: ServedJob, engine: str, count: int) -> int:
    """The engine samples what it is given, if anything; how many rows."""
    try:
        batch = await job.receive(ask("rollout", engine, count))
    except TimeoutError:
        return 0
    assert batch is not None
    lengths = np.ones(len(batch), np.int64)
    await job.send(batch.lease, batch.rows, {"response": Ragged(batch.rows, lengths)})
    return len(batch)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.just(0)),
        st.tuples(st.just("admit"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 6)),
        st.tuples(st.sampled_from(["newest a", "newest b"]), st.just(0)),
        st.tuples(st.just("train"), st.integers(1, 3)),
        st.tuples(st.just("sync"), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS, max_staleness=st.sampled_from([0.0, 0.5, 1.0, 2.5]))
def test_whatever_they_do_no_sample_lags_by_more_than_promised_and_each_is_trained_once(
    steps: list[tuple[str, int]], max_staleness: float
) -> None:
    async def play() -> None:
        with TemporaryDirectory() as folder:
            job = ServedJob(request(max_staleness=max_staleness), Path(folder), lambda: 0.0)
            trained: list[int] = []
            for verb, number in steps:
                try:
                    if verb == "load":
                        await job.load({"prompt": np.arange(4)})
                    elif verb == "admit":
                        await job.admit(number)
                    elif verb == "train":
                        batch = await job.receive(ask("train", "trainer", 2 * number, minimum=2))
                        if batch is not None:
                            assert {row // 4 for row in batch.rows.tolist()} == {job.version}
                            assert batch.ragged("response").values.tolist() == batch.rows.tolist()
                            trained += batch.rows.tolist()
                    elif verb == "sync":
                        await job.sync(0 if job.version is None else job.version + 1, weights())
                    elif verb.startswith("newest"):
                        await job.loaded_by(verb[-1], job.version or 0)
                    else:
                        await respond(job, verb, number)
                except (Conflict, TimeoutError):
                    pass
                ledger = job.ledger()
                assert ledger["loaded"] == ledger["trained"] + ledger["generated_untrained"] + ledger["not_generated"]
            assert len(set(trained)) == len(trained) == job.trained
            assert sum(job.lags.values()) == job.trained
            assert all(0 <= lag <= math.ceil(max_staleness) for lag in job.lags)
            assert len(os.listdir(folder)) <= 2

    asyncio.run(play())


async def test_rows_of_a_silent_engine_go_to_another_and_come_too_late(tmp_path: Path) -> None:
    time = Time()
    job = ServedJob(request(), tmp_path, lambda: time.now)
    await job.load({"prompt": np.arange(4)})
    await job.sync(0, weights())
    await job.admit(2)
    for engine in ("a", "b"):
        await job.loaded_by(engine, 0)
    lost = await job.receive(ask("rollout", "a", 4))
    assert lost is not None and len(lost) == 4
    time.now = 10.5
    assert await respond(job, "b", 4) == 4
    late = {"response": Ragged(lost.rows, np.ones(4, np.int64))}
    with pytest.raises(Conflict, match=f"lease {lost.lease} of task rollout has run out, and its rows went out again"):
        await job.send(lost.lease, lost.rows, late)
    batch = await job.receive(ask("train", "trainer", 4))
    assert batch is not None and sorted(batch.rows.tolist()) == [0, 1, 2, 3]


async def test_a_version_is_taken_in_turn_and_once_its_batch_was_received(tmp_path: Path) -> None:
    job = ServedJob(request(), tmp_path, lambda: 0.0)
    with pytest.raises(Conflict, match="version 3 does not follow None; the next one is 0"):
        await job.sync(3, weights())
    await job.sync(0, weights())
    with pytest.raises(Conflict, match="batch 0 has 4 rows that the trainer has not received yet"):
        await job.sync(1, weights())

    async def torn() -> AsyncIterator[bytes]:
        yield b"\x07"

    job.trained = 4
    with pytest.raises(ValueError, match="the weights are no safetensors"):
        await job.sync(1, torn())
    assert job.version == 0 and os.listdir(tmp_path) == ["version_0.safetensors"]


async def test_an_engine_that_waits_is_told_of_newer_weights_at_once(tmp_path: Path) -> None:
    job = ServedJob(request(), tmp_path, lambda: 0.0)
    await job.sync(0, weights())
    await job.loaded_by("a", 0)
    waiting = asyncio.ensure_future(job.receive(ReceiveRequest(task="rollout", reader="a", count=1, timeout_s=60.0)))
    await asyncio.sleep(0)
    job.trained = 4
    await job.sync(1, weights())
    with pytest.raises(TimeoutError, match="engine 'a' has version 0, and there is 1"):
        await waiting


@pytest.mark.parametrize("turns", range(4))
async def test_what_an_engine_was_given_as_it_went_is_given_to_another(tmp_path: Path, turns: int) -> None:
    tasks = TASKS | {"rollout": {"reads": ["prompt"], "writes": ["response"]}}  # for good: there is no lease to run out
    job = ServedJob(request(tasks=tasks), tmp_path, lambda: 0.0)
    await job.load({"prompt": np.arange(4)})
    await job.sync(0, weights())
    for engine in ("a", "b"):
        await job.loaded_by(engine, 0)
    asked = ReceiveRequest(task="rollout", reader="a", count=4, timeout_s=60.0)
    waiting = asyncio.ensure_future(job.receive(asked, left))
    while not job.queue.waiting_now():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await job.admit(2)
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await waiting
    assert await respond(job, "b", 4) == 4


async def left() -> bool:
    return True
