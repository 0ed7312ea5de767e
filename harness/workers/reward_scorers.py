"""Scorers of samples: this process, or a pool of others that a reward may hang, crash or fill up."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.tasks import Sample, Score, Task, checked_score


@dataclass(frozen=True)
class Scored:
    """The score of a sample; failure: why there is none of its own, in which case it is the score of all that fail:
    `task.failure_reward`, or NaN, which is no score."""

    score: Score
    failure: str | None = None


class RewardScorer(Protocol):
    """Scores samples."""

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores in the order of the samples, one for each."""

    def close(self) -> None:
        """Ends what was started."""


def score_of_failures(failure_reward: float | None) -> Score:
    """The score of all samples that could not be scored."""
    return Score(math.nan if failure_reward is None else failure_reward, False)


class HostScorer:
    """Scores here, one after the other: for rewards that take microseconds. Rewards that have to be waited for are
    waited for together, each no longer than timeout_s."""

    def __init__(self, task: Task, *, failure_reward: float | None, timeout_s: float) -> None:
        self._task, self._failed, self._timeout_s = task, score_of_failures(failure_reward), timeout_s

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        begun = [self._begin(sample) for sample in samples]
        return [one if isinstance(one, Scored) else await one for one in begun]

    def close(self) -> None: ...

    def _begin(self, sample: Sample) -> Scored | Awaitable[Scored]:
        try:
            score = self._task.score(sample)
            if not inspect.isawaitable(score):
                return Scored(checked_score(score))
        except (Exception, SystemExit) as error:
            return Scored(self._failed, one_line(error))
        return asyncio.ensure_future(self._waited_for(score))

    async def _waited_for(self, score: Awaitable[Score]) -> Scored:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return Scored(checked_score(await score))
        except (Exception, SystemExit) as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            return Scored(self._failed, f"no score after {self._timeout_s:g} s" if late else one_line(error))


def one_line(error: BaseException) -> str:
    """A line on what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        said = " ".join(str(error).split())[:300]
    except Exception:  # of a class whose text cannot be made
        said = "no text"
    return f"{type(error).__name__}: {said}{where}"


class FailureLog:
    """Says the first failures of a run in the worker's log; all are counted elsewhere."""

    def __init__(self, reward: str, most: int = 10) -> None:
        self._reward, self._left = reward, most

    def told(self, samples: Sequence[Sample], scored: Sequence[Scored]) -> list[str]:
        """A line on each sample that has no score, "" for the others. The first ones are logged."""
        lines = []
        for sample, one in zip(samples, scored, strict=True):
            said = f"no score by the reward {self._reward} for {sample.response!r:.80}: {one.failure}"
            lines.append("" if one.failure is None else said)
            if one.failure is not None and self._left:
                self._left -= 1
                more = "" if self._left else "; further failures are counted only"
                print(f"{lines[-1]}{more}", file=sys.stderr, flush=True)
        return lines
