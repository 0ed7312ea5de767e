"""What deals problems: task.buffer=my_lab.buffers:Again task.buffer_options.kept=50 (docs/plugins.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.tasks import Problem, Task


@dataclass
class Again:
    """Every other group gets a problem once more that was not solved by all of its samples."""

    kept: int = 100
    unsolved: list[int] = field(default_factory=list, init=False)
    came_from: dict[int, int] = field(default_factory=dict, init=False)

    def take(self, task: Task, group: int, seed: int) -> Problem:
        number = self.unsolved.pop(0) if group % 2 and self.unsolved else group
        self.came_from[group] = number
        return task.problem(number, seed)

    def record_rewards(self, problem: Problem, group: int, rewards: Sequence[float]) -> None:
        number = self.came_from.pop(group)
        if min(rewards) < 1:
            self.unsolved = [*self.unsolved, number][-self.kept :]

    def state(self) -> Mapping[str, Any]:
        return {"unsolved": self.unsolved}

    def load(self, state: Mapping[str, Any]) -> None:
        self.unsolved = list(state["unsolved"])
