"""Prompts and their verifiable rewards."""

from __future__ import annotations

from collections.abc import Callable

from harness.config import JobConfig
from harness.tasks.characters import Copy, Expand, Jsonl, Reverse
from harness.tasks.task import Problem, Score, Task, extra_metrics, extra_values

TASKS: dict[str, Callable[..., Task]] = {
    "reverse": Reverse,
    "copy": Copy,
    "expand": Expand,
    "jsonl": Jsonl,
}
"""Every task by name. The options of its class are the task's options: `TASKS["copy"](mean_letters=6)`."""


def make_task(config: JobConfig) -> Task:
    """Raises OSError, TypeError or ValueError for options, or names of metrics, that cannot be."""
    options = {} if config.task.path is None else {"path": config.task.path}
    task = TASKS[config.task.name](**options)
    extra_metrics(task)
    return task


def max_tokens(config: JobConfig, task: Task) -> int:
    """Longest response: the job's setting, or the task's own."""
    return config.max_tokens or task.max_response_tokens


__all__ = ["TASKS", "Problem", "Score", "Task", "extra_metrics", "extra_values", "make_task", "max_tokens"]
