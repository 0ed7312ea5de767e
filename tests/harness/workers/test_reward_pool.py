"""Rewards in processes of their own: the same scores, what fails is counted, and an end."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from harness.config.compose import compose_job
from harness.config.readers import scoring_processes
from harness.tasks import Sample, Score, Task, make_task, score_of
from harness.tasks.characters import Reverse
from harness.tasks.reward import Rewarded
from harness.workers.reward_scorers import FailureLog, HostScorer, RewardLimits, RewardPool, Scored
from tests.support.rewards import HOSTILE

SAMPLES = 24
ASKED = [Sample("ab=", "b" * i, "b" * (i % 3), True, i + 1) for i in range(SAMPLES)]
FAILURE = -1.0


def says(response: str) -> Sample:
    return Sample("ab=", response, "ba", True, 1)


@contextmanager
def scoring(reward: str, timeout_s: float = 60.0, make: Callable[[], Task] | None = None) -> Iterator[RewardPool]:
    """make: the task, where it is not that of a job with this reward."""
    make, limits = make or partial(make_task, compose_job([f"task.reward={reward}"])), RewardLimits(timeout_s, 2 << 30)
    pool = RewardPool(make, 2, reward=reward, failure_reward=FAILURE, limits=limits)
    try:
        yield pool
    finally:
        pool.close()


_before: set[int] = set()


@pytest.fixture(autouse=True)
def of_other_tests() -> None:
    """Processes that were there before, such as servers that all tests of a session share."""
    _before.clear()
    _before.update(process.pid for process in psutil.Process().children(recursive=True))


def descendants() -> list[psutil.Process]:
    """That live and are new, but for the one of multiprocessing, which stays."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # nor zombies: orphans of other tests, where this process inherits them
            if process.pid not in _before and "resource_tracker" not in " ".join(process.cmdline()):
                living.append(process)
    return living


async def test_processes_give_the_scores_that_the_task_gives_in_the_same_order() -> None:
    task = make_task(compose_job(["task.reward=tests.support.rewards:long"]))
    here = [await score_of(task, sample) for sample in ASKED]
    with scoring("tests.support.rewards:long") as pool:
        there = [scored.score for scored in await pool.scores(ASKED)]
    assert [(score.reward, score.exact_match) for score in there] == [(s.reward, s.exact_match) for s in here]
    assert len({score.extra["process"] for score in there}) == 2
    assert not {score.extra["process"] for score in there} & {score.extra["process"] for score in here}


@pytest.mark.slow
async def test_every_hostile_reward_costs_its_own_sample_and_no_other() -> None:
    """Endless loops, memory bombs, crashes: each between two samples that are scored as ever."""
    asked = [says(response) for name in HOSTILE for response in ("fine", name)]
    with scoring("tests.support.rewards:commanded", timeout_s=1.0) as pool:
        scored = await asyncio.wait_for(pool.scores(asked), 200)
    for sample, one in zip(asked, scored, strict=True):
        assert (one.failure is None) == (sample.response == "fine"), (sample.response, one)
        assert one.score.reward == (1.0 if one.failure is None else FAILURE)
    why = {sample.response: one.failure or "" for sample, one in zip(asked, scored, strict=True)}
    assert why["endless"] == why["catastrophic"] == why["child"] == "no score after 1 s"
    assert why["at once"].startswith("MemoryError") and why["raise"].startswith("ZeroDivisionError: division by zero (")
    assert why["kill"] == "it ended the process that scored, by SIGKILL"
    assert why["os exit"] == "it ended the process that scored, with exit code 0"
    assert why["exit"].startswith("SystemExit: 3")
    assert not descendants(), "neither processes that score nor what they started are left"


async def test_a_pool_that_is_closed_leaves_nothing_whatever_it_is_doing() -> None:
    with scoring("tests.support.rewards:commanded") as pool:
        asking = asyncio.ensure_future(pool.scores([says("endless"), says("child")]))
        until = time.monotonic() + 60
        while len(descendants()) < 3:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert not descendants()


@pytest.mark.slow
async def test_a_reward_whose_process_cannot_start_is_named() -> None:
    with scoring("mine:reward", make=_no_task) as pool, pytest.raises(ExceptionGroup) as raised:
        await pool.scores([says("a")])
    assert "the reward mine:reward cannot start: KeyError: 'no such task'" in str(raised.value.exceptions[0])


def _no_task() -> Task:
    raise KeyError("no such task")


async def test_rewards_that_are_waited_for_are_waited_for_together_and_no_longer_than_their_limit() -> None:
    task = make_task(compose_job(["task.reward=tests.support.rewards:judged"]))
    scorer = HostScorer(task, failure_reward=FAILURE, timeout_s=0.2)
    good, late, raised = await scorer.scores([says("good"), says("forever"), says("raise")])
    assert good == Scored(good.score) and good.score.reward == 0.5
    assert (late.score.reward, late.failure) == (FAILURE, "no score after 0.2 s")
    assert raised.failure is not None and raised.failure.startswith("ConnectionError: the judge is away (")


NUMBERS = [True, 3, Decimal("0.5"), Fraction(1, 4), np.float32(0.5), np.bool_(1), np.array([0.5]), torch.tensor(0.5)]
NO_NUMBERS = [
    None, {"score": 1.0}, "1.0", "one", [1.0], np.array([1.0, 0.0]), torch.zeros(2), np.array([]), 1j,
    math.nan, math.inf, -math.inf, 1e39, -(10**400), Decimal("NaN"), np.float32("nan"), torch.tensor(torch.inf),
]  # fmt: skip


class Answers(Reverse):
    """A task of one's own, whose `score` gives these, one after the other."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.given = iter(given)

    def score(self, sample: Sample) -> Any:
        return next(self.given)


async def test_a_number_is_a_reward_and_nothing_else_is_whether_the_reward_or_the_task_gives_it() -> None:
    own = Answers([Score(value, True) for value in (*NUMBERS, *NO_NUMBERS)])
    values = iter([*NUMBERS, *NO_NUMBERS])
    for task in (own, Rewarded(Reverse(), lambda sample: next(values))):
        scored = await HostScorer(task, failure_reward=None, timeout_s=1).scores([says("a")] * 25)
        for value, one in zip([1, 3, 0.5, 0.25, 0.5, 1, 0.5, 0.5], scored[:8], strict=True):
            assert one.failure is None and one.score.reward == value
        for value, one in zip(NO_NUMBERS, scored[8:], strict=True):
            assert math.isnan(one.score.reward) and not one.score.exact_match
            assert one.failure is not None and one.failure.startswith(f"ValueError: the reward is {value!r:.80}")
    odd = [None, 1.0, Score(1.0, None), Score(1.0, True, {"style": math.inf})]  # type: ignore[arg-type]
    scored = await HostScorer(Answers(odd), failure_reward=None, timeout_s=1).scores([says("a")] * 4)
    whats = ("the score is None", "the score is 1.0", "exact_match is None", "extra['style'] is inf")
    assert all(what in (one.failure or "") for what, one in zip(whats, scored, strict=True))


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ((), 0),
        (("task.reward=numeric",), 0),
        (("task.reward=math",), 2),
        (("task.reward=regex", "task.reward_options.pattern=a"), 2),
        (("task.reward=tests.support.rewards:commanded",), 2),
        (("task.reward=tests.support.rewards:judged",), 0),
    ],
)
def test_what_takes_its_time_gets_processes_where_nobody_says(settings: tuple[str, ...], processes: int) -> None:
    assert scoring_processes(compose_job(settings).task) == processes


def test_the_first_failures_are_said_with_their_response(capsys: pytest.CaptureFixture[str]) -> None:
    log = FailureLog("mine:reward", most=2)
    failed = Scored(Scored(None).score, "ValueError: why")  # type: ignore[arg-type]
    told = log.told([says(letter) for letter in "abcd"], [failed, failed, failed, Scored(Score(1.0, True))])
    first, second = capsys.readouterr().err.splitlines()
    assert first == told[0] == "no score by the reward mine:reward for 'a': ValueError: why"
    assert second == f"{told[1]}; further failures are counted only" and "'c'" in told[2] and told[3] == ""
