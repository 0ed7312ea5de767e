"""Tests that interrupt an engine, which a fast engine or a slow test may be too late for."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.contract.subject import LOAD, Subject

LOADS = (LOAD, 4 * LOAD, 16 * LOAD)


class TooLate(Exception):
    """The engine was through with its work before the test could interrupt it."""


def too_late_unless(in_time: object) -> None:
    if not in_time:
        raise TooLate


def in_flight(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test of what happens to running samples: where it came too late, it starts again with four times the load."""

    @functools.wraps(test)
    async def run(subject: Subject, **parameters: Any) -> None:
        for subject.load in LOADS:
            try:
                return await test(subject, **parameters)
            except TooLate:
                await subject.reset()
        pytest.fail(f"the engine had done {subject.load} samples before it could be interrupted")

    return run
