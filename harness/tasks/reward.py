"""A reward of the user's own, in the place of a task's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.config.plugins import check_called, keywords, load
from harness.tasks.task import Score, Task

Reward = Callable[[np.ndarray, np.ndarray, Task], Score | float]
"""(response int64 [L], answer int64 [A], task) -> a score, or a reward alone; `task.decode` gives text. Options are
keyword-only parameters."""


def reward_of(path: str, options: Mapping[str, Any]) -> Reward:
    """Raises ConfigError where `path` names no reward, or the reward has no such options."""
    found = load(path, "task.reward")
    check_called(found, 3, "task.reward", path, "reward(response, answer, task)")
    return partial(found, **keywords(found, options, "task.reward_options", path))


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
        own = getattr(getattr(self.reward, "func", self.reward), "extra_metrics", ())
        return tuple(dict.fromkeys((*getattr(self.task, "extra_metrics", ()), *own)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a task, by who unpickles it
            raise AttributeError(name)
        return getattr(self.task, name)

    def score(self, response: np.ndarray, answer: np.ndarray) -> Score:
        score = self.reward(response, answer, self.task)
        if not isinstance(score, Score):
            score = replace(self.task.score(response, answer), reward=float(score))
        if not math.isfinite(score.reward):
            raise ValueError(f"the reward of {self.task.decode(response)!r} is {score.reward}; return a finite number")
        return score
