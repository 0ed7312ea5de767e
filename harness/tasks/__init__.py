"""Prompts and their verifiable rewards."""

from __future__ import annotations

from collections.abc import Callable

from harness.tasks.copy import Copy
from harness.tasks.expand import Expand
from harness.tasks.jsonl import Jsonl
from harness.tasks.reverse import Reverse
from harness.tasks.task import Problem, Score, Task

TASKS: dict[str, Callable[..., Task]] = {
    "reverse": Reverse,
    "copy": Copy,
    "expand": Expand,
    "jsonl": Jsonl,
}
"""Every task by name. The options of its class are the task's options: `TASKS["copy"](mean_letters=6)`."""

__all__ = ["TASKS", "Problem", "Score", "Task"]
