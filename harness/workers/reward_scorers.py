"""Scorers of samples: this process, or a pool of others that a reward may hang, crash or fill up."""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from harness.config import JobConfig
from harness.config.readers import scoring_processes
from harness.rpc.children import die_with_parent, end_with_parent, kill_group
from harness.tasks import Sample, Score, Task, checked_score, make_task
from harness.tasks.reward import Rewarded
from harness.tasks.task import SimulatedTask


@dataclass(frozen=True)
class Scored:
    """The score of a sample; failure: why there is none of its own, in which case it is the score of all that fail:
    `task.failure_reward`, or NaN, which is no score."""

    score: Score
    failure: str | None = None


def score_of_failures(failure_reward: float | None) -> Score:
    """The score of all samples that could not be scored."""
    return Score(math.nan if failure_reward is None else failure_reward, False)


class HostScorer:
    """Scores here, one after the other: for rewards that take microseconds. Rewards that have to be waited for are
    waited for together, each no longer than timeout_s."""

    def __init__(self, task: Task, *, failure_reward: float | None, timeout_s: float) -> None:
        self._task, self._failed, self._timeout_s = task, score_of_failures(failure_reward), timeout_s

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores in the order of the samples, one for each."""
        begun = [self._begin(sample) for sample in samples]
        return [one if isinstance(one, Scored) else await one for one in begun]

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def _begin(self, sample: Sample) -> Scored | Awaitable[Scored]:
        try:
            score = self._task.score(sample)
            if not inspect.isawaitable(score):
                return Scored(checked_score(score))
        except (Exception, SystemExit) as error:
            return Scored(self._failed, one_line(error))
        return asyncio.ensure_future(self._waited_for(score))

    async def _waited_for(self, score: Awaitable[Score]) -> Scored:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return Scored(checked_score(await score))
        except (Exception, SystemExit) as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            return Scored(self._failed, f"no score after {self._timeout_s:g} s" if late else one_line(error))


def one_line(error: BaseException) -> str:
    """A line on what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        said = " ".join(str(error).split())[:300]
    except Exception:  # of a class whose text cannot be made
        said = "no text"
    return f"{type(error).__name__}: {said}{where}"


class FailureLog:
    """Says the first failures of a run in the worker's log; all are counted elsewhere."""

    def __init__(self, reward: str, most: int = 10) -> None:
        self._reward, self._left = reward, most

    def told(self, samples: Sequence[Sample], scored: Sequence[Scored]) -> list[str]:
        """A line on each sample that has no score, "" for the others. The first ones are logged."""
        lines = []
        for sample, one in zip(samples, scored, strict=True):
            said = f"no score by the reward {self._reward} for {sample.response!r:.80}: {one.failure}"
            lines.append("" if one.failure is None else said)
            if one.failure is not None and self._left:
                self._left -= 1
                more = "" if self._left else "; further failures are counted only"
                print(f"{lines[-1]}{more}", file=sys.stderr, flush=True)
        return lines


START_TIMEOUT_S = 120.0
"""Longest start of a process: it imports what the reward imports."""


def reward_scorer(config: JobConfig, task: Task) -> HostScorer | RewardPool:
    """Processes, as many as the settings say; none where they leave it open and the reward needs none, or nothing was
    said that could be scored."""
    chosen = config.task
    processes = scoring_processes(chosen)
    if isinstance(task, SimulatedTask) or not processes:
        return HostScorer(task, failure_reward=chosen.failure_reward, timeout_s=chosen.reward_timeout_s)
    return RewardPool(
        partial(make_task, config),
        processes,
        reward=chosen.reward or f"of task {chosen.name}",
        failure_reward=chosen.failure_reward,
        limits=RewardLimits(chosen.reward_timeout_s, int(chosen.reward_memory_gib * (1 << 30))),
    )


@dataclass(frozen=True)
class RewardLimits:
    """Limits of each sample in seconds, of each process in bytes of address space."""

    timeout_s: float
    memory_bytes: int


class RewardPool:
    """`processes` that score samples, one at a time each. make_task: picklable; every process makes its own. reward:
    its name, for messages. A process leads a group of its own, which ends with it."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        processes: int,
        *,
        reward: str,
        failure_reward: float | None,
        limits: RewardLimits,
    ) -> None:
        self._make_task, self._reward, self._limits = make_task, reward, limits
        self._failed = score_of_failures(failure_reward)
        self._idle: asyncio.Queue[_Process | None] = asyncio.Queue()
        self._all = {self._start() for _ in range(processes)}
        for process in self._all:
            self._idle.put_nowait(process)

    async def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Scores in the order of the samples. Raises RuntimeError where a process cannot start."""
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._score(sample)) for sample in samples]
        return [one.result() for one in asked]

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        for process in self._all:
            process.kill()
        self._all.clear()

    async def _score(self, sample: Sample) -> Scored:
        process = await self._idle.get()
        usable = False
        try:
            if process is None:
                process = self._start()
                self._all.add(process)
            if not process.ready:
                await self._await_start(process)
            answer, usable = await self._ask(process, sample)
        finally:
            if not usable and process is not None:
                self._all.discard(process)
                process.kill()
            self._idle.put_nowait(process if usable else None)
        return Scored(answer) if isinstance(answer, Score) else Scored(self._failed, answer)

    async def _ask(self, process: _Process, sample: Sample) -> tuple[Score | str, bool]:
        """The score, or why there is none; and whether the process can score others."""
        try:
            return await process.ask(sample, self._limits.timeout_s), True
        except TimeoutError:
            return f"no score after {self._limits.timeout_s:g} s", False
        except (EOFError, OSError):
            return f"it ended the process that scored, {process.ending()}", False

    async def _await_start(self, process: _Process) -> None:
        try:
            told = await process.answer(START_TIMEOUT_S)
        except TimeoutError as error:
            raise RuntimeError(f"the reward {self._reward} did not start within {START_TIMEOUT_S:g} s") from error
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the reward {self._reward} ended its process at the start") from error
        if told is not None:
            raise RuntimeError(f"the reward {self._reward} cannot start: {told}")
        process.ready = True

    def _start(self) -> _Process:
        return _Process(self._make_task, self._limits.memory_bytes)


class _Process:
    """One that scores what it is asked, in turn. ready: it has made its task."""

    def __init__(self, make_task: Callable[[], Task], memory_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")  # this process has threads
        self._connection, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(other, make_task, memory_bytes), daemon=True)
        self._process.start()
        other.close()
        self.ready = False

    async def ask(self, sample: Sample, timeout_s: float) -> Score | str:
        """The score, or why there is none. Raises TimeoutError, and EOFError or OSError where the process ended."""
        self._connection.send(sample)
        told: Score | str = await self.answer(timeout_s)
        return told

    async def answer(self, timeout_s: float) -> Any:
        """The next thing that the process says. Raises as `ask` does."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await readable.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        return self._connection.recv()

    def ending(self) -> str:
        """How it ended."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "or its pipe"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        """Kill it with all that it started, as far as that stayed in its group."""
        self._connection.close()
        assert self._process.pid is not None
        kill_group(self._process.pid)
        self._process.kill()  # where it has not made its group yet
        self._process.join()


def _work(connection: Connection, make_task: Callable[[], Task], memory_bytes: int) -> None:
    """Score until the pool closes the connection. Says None once it can score, then a score, or why not, for each
    sample."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's, which closes the pool
    os.setpgid(0, 0)
    end_with_parent()
    die_with_parent()
    try:
        task = make_task()
        if isinstance(task, Rewarded):
            task.prepare()
        _limit(memory_bytes)
    except BaseException as error:
        connection.send(one_line(error))
        raise
    connection.send(None)
    while True:
        try:
            sample = connection.recv()
        except EOFError:
            return
        connection.send(_score(task, sample))


def _limit(memory_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _score(task: Task, sample: Sample) -> Score | str:
    try:
        score = task.score(sample)
        return checked_score(asyncio.run(_waited_for(score)) if inspect.isawaitable(score) else score)
    except BaseException as error:  # sys.exit and an interrupt of its own too: the process can go on
        return one_line(error)


async def _waited_for(score: Any) -> Score:
    waited_for: Coroutine[Any, Any, Score] = score
    return await waited_for
