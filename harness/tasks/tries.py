"""Several tries at one question: a wrong answer is told so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from harness.tasks.environment import Step
from harness.tasks.task import Problem


@dataclass
class Tried:
    """One sample: the answer of its problem, how often it tried, and the score of its last try."""

    answer: str
    tries: int = 0
    score: float = 0.0


@dataclass(frozen=True)
class Tries:
    """`harness.tasks.Environment`: a turn is an answer, which `judge(turn, answer of the problem)` scores. One that
    scores less than `right` is followed by `feedback`, while there are tries left.

    Each step's reward is what the score rose by, so that they add up to the score of the last try, however a sample
    ends. `judge` is called in a thread: it may take its time.
    """

    judge: Callable[[str, str], float]
    right: float
    max_turns: int
    feedback: str
    step_timeout_s: float

    async def reset(self, problem: Problem, seed: int) -> Tried:
        return Tried(problem.answer)

    async def step(self, state: Tried, action: str) -> Step:
        score = await asyncio.to_thread(self.judge, action, state.answer)
        rise, state.score = score - state.score, score
        state.tries += 1
        done = score >= self.right or state.tries == self.max_turns
        return Step("" if done else self.feedback, done, reward=rise)

    async def close(self, state: Tried) -> None:
        """Do nothing: it holds nothing."""
