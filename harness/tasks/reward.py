"""A reward by name or of the user's own, in the place of a task's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.config.plugins import keywords
from harness.config.registries import find_function
from harness.tasks.task import Sample, Score, Task

Reward = Callable[[Sample], Score | float | Awaitable[Score | float]]
"""A score, or a reward alone. Options are keyword-only parameters."""


def reward_of(name: str, options: Mapping[str, Any]) -> Reward:
    """A reward that is built in, or of the user's own by import path. Raises ConfigError where there is no such reward,
    or it has no such options."""
    found = find_function("task.reward", name, 1, "reward(sample)")
    return partial(found, **keywords(found, options, "task.reward_options", name))


@dataclass(frozen=True)
class Rewarded:
    """A task whose responses another function scores. Of a reward alone, whether it matches exactly is the task's to
    say. Raises ValueError for a reward that is not finite.

    extra_metrics: of the task, and of the reward where the function has names under this attribute.
    """

    task: Task
    reward: Reward

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Names of the task's and the reward's own metrics."""
        own = getattr(getattr(self.reward, "func", self.reward), "extra_metrics", ())
        return tuple(dict.fromkeys((*getattr(self.task, "extra_metrics", ()), *own)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a task, by who unpickles it
            raise AttributeError(name)
        return getattr(self.task, name)

    def prepare(self) -> None:
        """Do what takes its time before the first score, such as imports, which is not the time of a sample."""
        prepare = getattr(getattr(self.reward, "func", self.reward), "prepare", None)
        if prepare is not None:
            prepare()

    async def score(self, sample: Sample) -> Score:
        """Score by the reward; one that returns a number leaves the rest to the task. Raises ValueError for a reward
        that is not finite."""
        given = self.reward(sample)
        score = await given if inspect.isawaitable(given) else given
        if not isinstance(score, Score):
            score = replace(await score_of(self.task, sample), reward=float(score))
        if not math.isfinite(score.reward):
            raise ValueError(f"the reward of {sample.response!r} is {score.reward}; return a finite number")
        return score


async def score_of(task: Task, sample: Sample) -> Score:
    """The score by the task's own rule, whether it has to be waited for or not."""
    score = task.score(sample)
    return await score if inspect.isawaitable(score) else score
