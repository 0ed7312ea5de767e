"""Rewards in processes of their own: the same scores, clear errors, and an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from harness.config.compose import compose_job
from harness.tasks import Sample, make_task, score_of
from harness.workers.reward_pool import RewardPool

SAMPLES = 24
ASKED = [Sample("ab=", "b" * i, "b" * (i % 3), True, i + 1) for i in range(SAMPLES)]


@contextmanager
def scoring(reward: str, *, timeout_s: float | None = 120) -> Iterator[RewardPool]:
    config = compose_job([f"task.reward=tests.support.rewards:{reward}"])
    assert config.task.reward is not None
    pool = RewardPool(partial(make_task, config), 2, reward=config.task.reward, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        pool.close()


def scorers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_processes_give_the_scores_that_the_task_gives_in_the_same_order() -> None:
    task = make_task(compose_job(["task.reward=tests.support.rewards:long"]))
    here = [await score_of(task, sample) for sample in ASKED]
    with scoring("long") as pool:
        there = await pool.scores(ASKED)
    assert [(score.reward, score.exact_match) for score in there] == [(s.reward, s.exact_match) for s in here]
    assert len({score.extra["process"] for score in there}) == 2
    assert not {score.extra["process"] for score in there} & {score.extra["process"] for score in here}


async def test_a_reward_that_ends_its_process_is_named() -> None:
    died = "the reward tests.support.rewards:deadly ended the process that scored samples with it"
    with scoring("deadly") as pool:
        with pytest.raises(RuntimeError, match=died):
            await pool.scores(ASKED)
        with pytest.raises(RuntimeError, match=died):
            await pool.scores(ASKED)


async def test_what_a_reward_raises_arrives_with_where_it_was_raised() -> None:
    with scoring("failing") as pool:
        with pytest.raises(ZeroDivisionError, match="a response of 1 tokens") as raised:
            await pool.scores(ASKED[:1])
    assert "tests/support/rewards.py" in str(raised.value.__cause__)


async def test_a_reward_that_takes_too_long_is_an_error_and_its_processes_end_with_the_pool() -> None:
    with scoring("endless", timeout_s=0.5) as pool:
        with pytest.raises(TimeoutError, match=r"rewards:endless took longer than 0.5 s for 24 samples"):
            await pool.scores(ASKED)
        left = scorers()
        assert len(left) == 2
    until = time.monotonic() + 60
    while any(is_alive(process) for process in left):  # not waited for: only the pool may take note of their ends
        assert time.monotonic() < until
        await asyncio.sleep(0.02)
