"""Rewards that cost CPU time, scored by processes of their own: so none holds up what else is on the host."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from harness.runtime.parallel import end_with_parent
from harness.tasks import Score, Task


class RewardPool:
    """`processes` that score samples, one at a time each. make_task: picklable; every process makes its own."""

    def __init__(self, make_task: Callable[[], Task], processes: int, *, timeout_s: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, _begin, (make_task,))
        self._timeout_s = timeout_s

    async def scores(self, responses: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> list[Score]:
        """In the order of the samples. Raises what scoring raises, RuntimeError where a process died over a sample,
        TimeoutError where they are not there in time."""
        loop = asyncio.get_running_loop()
        asked = [
            loop.run_in_executor(self._pool, _score, response, answer)
            for response, answer in zip(responses, answers, strict=True)
        ]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*asked)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a process died while it scored one of {len(asked)} samples: {error}") from error
        except TimeoutError as error:
            raise TimeoutError(f"the rewards of {len(asked)} samples took longer than {self._timeout_s} s") from error

    def close(self) -> None:
        """Whatever they are doing."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


_task: Task


def _begin(make_task: Callable[[], Task]) -> None:
    global _task
    end_with_parent()
    _task = make_task()


def _score(response: np.ndarray, answer: np.ndarray) -> Score:
    return _task.score(response, answer)
