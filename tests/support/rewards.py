"""Rewards for tests of the processes that score: in a module that those can import."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from harness.tasks import Score, Task


def long(response: np.ndarray, answer: np.ndarray, task: Task) -> Score:
    """The more tokens the better; says which process scored. The first samples take longest."""
    time.sleep(0.002 * (24 - min(24, len(response))))
    own = task.score(response, answer)
    return Score(len(response) / 100, own.exact_match, {"process": os.getpid()})


long.extra_metrics = ("process",)  # type: ignore[attr-defined]


def deadly(response: np.ndarray, answer: np.ndarray, task: Task) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def failing(response: np.ndarray, answer: np.ndarray, task: Task) -> float:
    raise ZeroDivisionError(f"a response of {len(response)} tokens")


def endless(response: np.ndarray, answer: np.ndarray, task: Task) -> float:
    time.sleep(3600)
    return 0.0
