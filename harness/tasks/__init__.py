"""Prompts and their verifiable rewards."""

from __future__ import annotations

from collections.abc import Callable

from harness.config import ConfigError, JobConfig
from harness.config.plugins import lookup, make
from harness.tasks.characters import Copy, Expand, Reverse
from harness.tasks.reward import Rewarded, reward_of, score_of
from harness.tasks.task import MEMBERS, Problem, Sample, Score, Task, extra_metrics, extra_values, sample_of
from harness.tasks.tokenizer import Tokenizer, load_tokenizer

TASKS: dict[str, Callable[..., Task]] = {
    "reverse": Reverse,
    "copy": Copy,
    "expand": Expand,
}
"""Every task by name. The options of its class are the task's options: `TASKS["copy"](mean_letters=6)`."""


def make_task(config: JobConfig) -> Task:
    """The task, with the reward that the settings name. Raises ConfigError for what cannot be such a one."""
    chosen = config.task
    factory = lookup(TASKS, chosen.name, "task")
    options = chosen.options if chosen.path is None else {**chosen.options, "path": chosen.path}
    if chosen.path is not None and "path" not in getattr(factory, "__dataclass_fields__", ()):
        raise ConfigError(f"task.path={chosen.path}: task {chosen.name} reads no file")
    try:
        task: Task = make(factory, options, "task", chosen.name, tokenizer=tokenizer_of(config))
        if missing := [name for name in MEMBERS if not hasattr(task, name)]:
            raise ConfigError(f"task={chosen.name} lacks {', '.join(missing)}; write what harness.tasks.Task asks for")
        if chosen.reward is not None:
            task = Rewarded(task, reward_of(chosen.reward, chosen.reward_options))
        extra_metrics(task)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"task.path={chosen.path}: {error.strerror}; name a file of problems") from error
    except ValueError as error:
        raise ConfigError(f"task={chosen.name}: {error}") from error
    return task


def tokenizer_of(config: JobConfig) -> Tokenizer:
    """Of the model's folder, where it has one; otherwise the shipped one of 32 characters."""
    return load_tokenizer()


def max_tokens(config: JobConfig, task: Task) -> int:
    """Longest response: the job's setting, or the task's own."""
    return config.max_tokens or task.max_response_tokens


__all__ = [
    "TASKS",
    "Problem",
    "Sample",
    "Score",
    "Task",
    "Tokenizer",
    "extra_metrics",
    "extra_values",
    "load_tokenizer",
    "make_task",
    "max_tokens",
    "sample_of",
    "score_of",
    "tokenizer_of",
]
