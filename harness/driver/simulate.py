"""A whole job on the virtual clock, in this process; writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from harness.config import JobConfig
from harness.config.checks.job import plan_job
from harness.config.compose import make_schedule
from harness.config.machine import Machine
from harness.driver.backends import Wanted, clock_of, event_loop
from harness.driver.recorder import Recorder
from harness.driver.session import Session
from harness.runtime.interrupts import run_in

_NO_MACHINE = Machine(cores=0, gpus=0, gpu_bytes=0)  # nothing is asked of it


def simulate(config: JobConfig, seed: int, started: Callable[[Session], None] = lambda session: None) -> Recorder:
    """Run `config` on the virtual clock, whatever its backend, and return what was recorded.

    started: is shown the session before time begins. Raises ConfigError for a job that cannot be, Deadlock for one that
    cannot go on.
    """
    config = replace(config, backend="virtual")
    schedule = make_schedule(config)
    plan = plan_job(config, schedule, _NO_MACHINE)
    with ExitStack() as stack:
        runner = stack.enter_context(event_loop(plan))
        session = Session(Wanted(config, schedule, plan, config.model, seed), clock_of(plan, runner.get_loop()))
        session.start(stack)
        run_in(runner, session.connect())
        started(session)
        run_in(runner, session.measure())
    return session.recorder
