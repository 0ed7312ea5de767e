"""A data buffer that writes down what it is asked and told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.tasks import Problem, Task


@dataclass
class Remembering:
    """The answer of its n-th problem is n, counted from 0."""

    taken: list[int] = field(default_factory=list, init=False)
    told_of: list[tuple[int, str]] = field(default_factory=list, init=False)

    def take(self, task: Task, group: int, seed: int) -> Problem:
        self.taken.append(group)
        return replace(task.problem(group, seed), answer=str(len(self.taken) - 1))

    def record_rewards(self, problem: Problem, group: int, rewards: Sequence[float]) -> None:
        self.told_of.append((group, problem.answer))

    def state(self) -> Mapping[str, Any]:
        return {"taken": self.taken, "told": self.told_of}

    def load(self, state: Mapping[str, Any]) -> None:
        self.taken = list(state["taken"])
        self.told_of = [(group, answer) for group, answer in state["told"]]
