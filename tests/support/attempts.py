"""Attempts at a run on the virtual clock, in its folder, as `harness.driver.run` makes them."""

import asyncio
import math
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from harness.checks.job import plan_job
from harness.config import JobConfig
from harness.config.compose import make_schedule, plain
from harness.config.machine import NO_MACHINE
from harness.driver.backends import RunSpec, clock_of, event_loop
from harness.driver.checkpoint_files import CHECKPOINTS
from harness.driver.earlier import EarlierAttempt
from harness.driver.evaluation import Evaluated, Evaluation
from harness.driver.listeners import IterationListener
from harness.driver.run import FolderListener
from harness.driver.session import Session
from harness.metrics.run_files import RunDirectory, last_evaluated
from harness.runtime.interrupts import run_in
from harness.workers.replaying import Replay


class PlayedEvaluation(Evaluation):
    """Of the versions that a real run would evaluate, though nothing is sampled."""

    def __init__(self, session: Session) -> None:
        self.settings, self.iterations = session.run.config.eval, session.run.config.iterations
        self.newest, self.fleet = session.run.evaluated, session.assembly.coordinator.fleet
        self._session = session

    async def evaluate(self, version: int) -> None:
        self.newest = version
        at = self._session.clock.now()
        self._session.recorder.evaluated(Evaluated(version, at, 0, 0, 0.0, 0.0, None, None, 0.0, 0, 0.0, 0.0), {})


def attempt(
    config: JobConfig,
    results: Path,
    seconds: float | None,
    began: list[int],
    begin_with: Path | None = None,
    leave_at: float = math.inf,
    replay: Replay | None = None,
) -> RunDirectory | None:
    """For so many simulated seconds, or to its end; the folder of a run that came there. It goes on from what the
    attempts before left, or begins with what another run did. began: the version that it begins with is added.
    leave_at: from this time on it is asked to. replay: of another run."""
    schedule = make_schedule(config)
    plan = plan_job(config, schedule, NO_MACHINE)
    earlier = EarlierAttempt(Console(quiet=True), ignored=False, begin_with=begin_with)
    with RunDirectory(results, "e", "c", 0, earlier) as folder, ExitStack() as stack:
        began.append(0 if earlier.checkpoint is None else earlier.checkpoint.version)
        folder.write_config(plain(config))
        runner = stack.enter_context(event_loop(plan))
        clock = clock_of(plan, runner.get_loop())
        spec = RunSpec(
            config, schedule, plan, config.model, seed=0, checkpoints=folder.path / CHECKPOINTS,
            resumed=earlier.checkpoint, evaluated=last_evaluated(folder.path), replay=replay,
            leave=lambda: clock.now() >= leave_at,
        )  # fmt: skip
        session = Session(spec, clock)
        session.start(stack)
        if config.eval.period:
            session.assembly.job.weights.evaluation = PlayedEvaluation(session)
        session.recorder.listeners.append(FolderListener(folder))
        session.recorder.write_into(folder)
        if (buffer := session.assembly.job.prompts.dealer.buffer) is not None:
            session.recorder.listeners.append(IterationListener(lambda _: folder.write_buffer(buffer.state())))

        async def measure() -> None:
            async with asyncio.timeout(seconds):
                await session.measure()

        run_in(runner, session.connect())
        try:
            run_in(runner, measure())
        except TimeoutError:
            return None
        session.recorder.write(folder)
        folder.finish()
        return folder
