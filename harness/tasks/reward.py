"""A reward by name or of the user's own, in the place of a task's."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.config.plugins import keywords
from harness.config.registries import find_function
from harness.tasks.task import Sample, Score, Task, checked_score, number_of, unpaid

Reward = Callable[[Sample], Score | float | Awaitable[Score | float]]
"""A score, or a reward alone. Options are keyword-only parameters."""


def reward_of(name: str, options: Mapping[str, Any], *, pay_truncated: bool = False) -> Reward:
    """A reward that is built in, or of the user's own by import path; of those built in one that pays what the limit
    cut off, too. Raises ConfigError where there is no such reward, or it has no such options."""
    found = find_function("task.reward", name)
    given = keywords(found, options, "task.reward_options", name)
    return partial(getattr(found, "paying_truncated", found) if pay_truncated else found, **given)


@dataclass(frozen=True)
class Rewarded:
    """A task whose responses another function scores, or itself where there is none. Of a reward alone, whether it
    matches exactly is the task's to say.

    pay_truncated: whether a response that the limit cut off may earn something; else it earns 0 at most, by whatever
    reward. extra_metrics: of the task, and of the reward where the function has names under this attribute.
    """

    task: Task
    reward: Reward | None
    pay_truncated: bool = False

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Names of the task's and the reward's own metrics."""
        own = getattr(self._function, "extra_metrics", ())
        return tuple(dict.fromkeys((*getattr(self.task, "extra_metrics", ()), *own)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a task, by who unpickles it
            raise AttributeError(name)
        return getattr(self.task, name)

    @property
    def _function(self) -> Any:
        return getattr(self.reward, "func", self.reward)

    def prepare(self) -> None:
        """Do what takes its time before the first score, such as imports, which is not the time of a sample."""
        prepare = getattr(self._function, "prepare", None)
        if prepare is not None:
            prepare()

    def score(self, sample: Sample) -> Score | Awaitable[Score]:
        """Score by the reward; one that returns a number leaves the rest to the task. Raises ValueError for a reward
        that is none."""
        given = self.task.score(sample) if self.reward is None else self.reward(sample)
        if isinstance(given, Score):
            return self._paid(given, sample)
        return self._completed(given, sample)

    async def _completed(self, given: Any, sample: Sample) -> Score:
        score = await given if inspect.isawaitable(given) else given
        if not isinstance(score, Score):
            score = replace(await score_of(self.task, sample), reward=number_of(score, "the reward"))
        return self._paid(score, sample)

    def _paid(self, score: Score, sample: Sample) -> Score:
        return score if sample.stopped or self.pay_truncated else unpaid(checked_score(score))


async def score_of(task: Task, sample: Sample) -> Score:
    """The score by the task's own rule, whether it has to be waited for or not."""
    score = task.score(sample)
    return await score if inspect.isawaitable(score) else score
