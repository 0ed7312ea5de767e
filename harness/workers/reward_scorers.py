"""Scorers of samples: this process, or a pool of others that a reward may hang, crash or fill up."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.tasks import Sample, Score, Task


@dataclass(frozen=True)
class Scored:
    """The score of a sample; failure: why there is none of its own, in which case it is the score of all that fail."""

    score: Score
    failure: str | None = None


class RewardScorer(Protocol):
    """Scores samples."""

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores in the order of the samples, one for each."""

    def close(self) -> None:
        """Ends what was started."""


class HostScorer:
    """Scores here, one after the other: for rewards that take microseconds. Rewards that have to be waited for are
    waited for together, each no longer than timeout_s."""

    def __init__(self, task: Task, *, failure_reward: float, timeout_s: float) -> None:
        self._task, self._failed, self._timeout_s = task, Score(failure_reward, False), timeout_s

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        begun = [self._begin(sample) for sample in samples]
        return [one if isinstance(one, Scored) else await one for one in begun]

    def close(self) -> None: ...

    def _begin(self, sample: Sample) -> Scored | Awaitable[Scored]:
        try:
            score = self._task.score(sample)
        except Exception as error:
            return Scored(self._failed, one_line(error))
        return asyncio.ensure_future(self._waited_for(score)) if inspect.isawaitable(score) else Scored(score)

    async def _waited_for(self, score: Awaitable[Score]) -> Scored:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return Scored(await score)
        except Exception as error:
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
    """Says the first failures of a run, for people; all are counted elsewhere."""

    def __init__(self, reward: str, most: int = 10) -> None:
        self._reward, self._left = reward, most

    def note(self, samples: Sequence[Sample], scored: Sequence[Scored]) -> None:
        """Log the failures among these, as long as there are few."""
        for sample, one in zip(samples, scored, strict=True):
            if one.failure is None or not self._left:
                continue
            self._left -= 1
            said = f"the reward {self._reward} failed on {sample.response!r:.80}: {one.failure}"
            print(said if self._left else f"{said}; further failures are counted only", file=sys.stderr, flush=True)
