"""Rewards for tests of the processes that score: in a module that those can import."""

from __future__ import annotations

import os
import signal
import time

from harness.tasks import Sample, Score


def long(sample: Sample) -> Score:
    """The more tokens the better; says which process scored. The first samples take longest."""
    time.sleep(0.002 * (24 - min(24, sample.tokens)))
    return Score(sample.tokens / 100, sample.response == sample.answer, {"process": os.getpid()})


long.extra_metrics = ("process",)  # type: ignore[attr-defined]


def deadly(sample: Sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def failing(sample: Sample) -> float:
    raise ZeroDivisionError(f"a response of {sample.tokens} tokens")


def endless(sample: Sample) -> float:
    time.sleep(3600)
    return 0.0
