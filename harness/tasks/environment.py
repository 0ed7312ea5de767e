"""Environments, which answer a policy between its turns: tools, games, users."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from harness.tasks.task import Problem, Task


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of an action.

    observation: what the policy reads next, not looked at where `done`; reward: added up over the turns of a sample,
    for the task's `score` as `Sample.environment_reward`, None is none; latency_s: on the run's clock, that the answer
    takes longer than it took to compute.
    """

    observation: str
    done: bool
    reward: float | None = None
    latency_s: float = 0.0


class Environment(Protocol):
    """Plays with many samples at once; all that it knows of one is in that one's state.

    A task that has one gives it as its attribute `environment`. The policy speaks first, to the problem's prompt; its
    turn ends with an end token, and is answered by `step`, until that is `done`, the sample has as many turns or tokens
    as it may have, or an answer takes too long. All three methods are coroutines, called in the worker of a rollout
    engine: what blocks one holds up the engine too, and belongs in a thread or a process of its own.
    """

    @property
    def max_turns(self) -> int:
        """How often the policy may speak."""

    @property
    def step_timeout_s(self) -> float:
        """The longest wait for one answer, its latency included. Who has none by then has failed, and so has a sample
        over which `reset` or `step` raise an error: it ends there (`finish_reason` "failed"), and has no score."""

    async def reset(self, problem: Problem, seed: int) -> Any:
        """The state of a new sample of `problem`, asked for with its first turn. seed: of this sample in this run, the
        same under every schedule."""

    async def step(self, state: Any, action: str) -> Step:
        """The outcome of a turn. action: its text, without the end token. `state` may be changed in place."""

    async def close(self, state: Any) -> None:
        """End a sample that is over, for whatever reason; not called where its worker dies."""


MEMBERS = tuple(name for name in vars(Environment) if not name.startswith("_"))


def environment_of(task: Task) -> Environment | None:
    """The task's environment; None where responses are one turn. Raises ValueError for what cannot be one."""
    environment: Environment | None = getattr(task, "environment", None)
    if environment is None:
        return None
    if missing := [name for name in MEMBERS if not hasattr(environment, name)]:
        raise ValueError(f"its environment lacks {', '.join(missing)}; write what harness.tasks.Environment asks for")
    for name in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, name)):
            raise ValueError(f"{name} of its environment must be a coroutine: write `async def {name}`")
    if environment.max_turns < 1 or environment.step_timeout_s <= 0:
        given = f"max_turns={environment.max_turns}, step_timeout_s={environment.step_timeout_s}"
        raise ValueError(f"an environment needs max_turns >= 1 and step_timeout_s > 0, not {given}")
    return environment


def observation_tokens(task: Task, observation: str) -> np.ndarray:
    """Tokens that the policy reads after its turn, int64 [n]: of a task that writes chats, in its template."""
    encode = getattr(task, "encode_observation", task.encode)
    tokens: np.ndarray = encode(observation)
    return tokens


def transcript(task: Task, problem: Problem) -> Sequence[np.ndarray]:
    """A right response in parts, int64 [n] each: what the policy says, end token included, and what the environment
    answers, in turn. Raises ValueError where none is known."""
    parts = getattr(task, "transcript", None)
    return [task.demonstration(problem)] if parts is None else parts(problem)
