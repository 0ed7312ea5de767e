"""Rewards that cost CPU time, scored by processes of their own: so none holds up what else is on the host."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from harness.runtime.parallel import end_with_parent
from harness.tasks import Sample, Score, Task, score_of


class RewardPool:
    """`processes` that score samples, one at a time each. make_task: picklable; every process makes its own. reward:
    its name, for messages."""

    def __init__(self, make_task: Callable[[], Task], processes: int, *, reward: str, timeout_s: float | None) -> None:
        context = multiprocessing.get_context("spawn")  # this process has threads
        self._pool = ProcessPoolExecutor(processes, context, _begin, (make_task,))
        self._reward, self._timeout_s = reward, timeout_s
        for _ in range(processes):
            self._pool.submit(_started)  # so that none of them starts only with the first batch

    async def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """In the order of the samples. Raises what scoring raises, RuntimeError where a process died over a sample,
        TimeoutError where they are not there in time."""
        loop, waiting = asyncio.get_running_loop(), asyncio.timeout(self._timeout_s)
        try:
            asked = [loop.run_in_executor(self._pool, _score, sample) for sample in samples]
            async with waiting:
                return await asyncio.gather(*asked)
        except BrokenProcessPool as error:
            raise RuntimeError(f"the reward {self._reward} ended the process that scored samples with it") from error
        except TimeoutError as error:
            if not waiting.expired():  # the reward's own
                raise
            raise TimeoutError(
                f"the reward {self._reward} took longer than {self._timeout_s} s for {len(samples)} samples"
            ) from error

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


_task: Task


def _begin(make_task: Callable[[], Task]) -> None:
    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's, which closes the pool
    end_with_parent()
    _task = make_task()


def _started() -> None:
    """Nothing to do."""


def _score(sample: Sample) -> Score:
    return asyncio.run(score_of(_task, sample))
