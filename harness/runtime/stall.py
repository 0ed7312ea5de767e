"""A run that stands still is an error, and says what everybody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from harness.protocols import Clock
from harness.runtime.handles import Handle, WorkerDied

_LOOKS = 20  # times that progress is looked at before a stall is one: the error comes at most 1/20 late
_ANSWER_S = 5.0  # a loop that waits answers at once; who needs longer is computing


class Stalled(TimeoutError):
    """Nothing happened for too long."""


async def watch_progress(
    progress: Callable[[], float], waiting: Callable[[], Awaitable[Sequence[str]]], timeout_s: float, clock: Clock
) -> NoReturn:
    """Raises Stalled, with what is `waiting`, once `progress` has not changed for `timeout_s`. Runs beside the job, and
    is cancelled when that ends."""
    seen, since = progress(), clock.now()
    while True:
        await clock.sleep(timeout_s / _LOOKS)
        if (figure := progress()) != seen:
            seen, since = figure, clock.now()
        elif clock.now() - since >= timeout_s:
            told = "; ".join(await waiting()) or "nobody, as far as they say"
            raise Stalled(f"nothing happened for {timeout_s:g} s; waiting: {told}")


async def collect_waits(workers: Sequence[Handle], answer_s: float = _ANSWER_S) -> list[str]:
    """What the loops of these workers wait for, a line each. One that computes cannot answer: the line says so."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_ask(worker, answer_s)) for worker in workers]
    return [line for task in asked for line in task.result()]


async def _ask(worker: Handle, answer_s: float) -> list[str]:
    try:
        async with asyncio.timeout(answer_s):
            return list(await worker.call("waiting"))
    except TimeoutError:
        return [f"{worker.name} does not answer (computing, or dead)"]
    except WorkerDied:
        return [f"{worker.name} is dead"]
