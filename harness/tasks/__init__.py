"""Prompts and their verifiable rewards."""

from __future__ import annotations

from collections.abc import Callable

from harness.config import JobConfig
from harness.tasks.characters import Copy, Expand, Jsonl, Reverse
from harness.tasks.task import Problem, Score, Task

TASKS: dict[str, Callable[..., Task]] = {
    "reverse": Reverse,
    "copy": Copy,
    "expand": Expand,
    "jsonl": Jsonl,
}
"""Every task by name. The options of its class are the task's options: `TASKS["copy"](mean_letters=6)`."""


def make_task(config: JobConfig) -> Task:
    options = {} if config.task.path is None else {"path": config.task.path}
    return TASKS[config.task.name](**options)


def max_tokens(config: JobConfig, task: Task) -> int:
    """Longest response: the job's setting, or the task's own."""
    return config.max_tokens or task.max_response_tokens


__all__ = ["TASKS", "Problem", "Score", "Task", "make_task", "max_tokens"]
