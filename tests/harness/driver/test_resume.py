"""Simulated runs that are cut off, and go on from their checkpoints: what must hold of a run holds of them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.config import CheckpointConfig, JobConfig
from harness.config.checks.job import plan_job
from harness.config.compose import compose_job, make_schedule, plain
from harness.config.machine import Machine
from harness.driver.backends import RunSpec, clock_of, event_loop
from harness.driver.checkpoint_files import CHECKPOINTS
from harness.driver.earlier import EarlierAttempt
from harness.driver.session import Session
from harness.metrics.run_files import RunDirectory, load_metrics
from harness.runtime.interrupts import run_in
from schedules import SCHEDULES
from tests.support.invariants import check_run, read_run

ITERATIONS = 8
SMALL = (
    "cost=tiny_cpu",
    f"iterations={ITERATIONS}",
    "cluster.devices=4",
    "algorithm.batch_groups=4",
    "algorithm.group_size=2",
    "algorithm.micro_batch_groups=1",
    "warmup_iterations=0",
    "backend=virtual",
)


def job(schedule: str, every: int = 2, **options: Any) -> JobConfig:
    config = compose_job([*SMALL, f"schedule={schedule}"])
    made = replace(config, schedule=replace(config.schedule, options=config.schedule.options | options))
    return replace(made, checkpoint=CheckpointConfig(every=every))


def attempt(config: JobConfig, results: Path, seconds: float | None, began: list[int]) -> RunDirectory | None:
    """For so many simulated seconds, or to its end; the folder of a run that came there. It goes on from what the
    attempts before left. began: the version that it begins with is added."""
    schedule = make_schedule(config)
    plan = plan_job(config, schedule, Machine(cores=0, gpus=0, gpu_bytes=0))
    earlier = EarlierAttempt(Console(quiet=True), ignored=False)
    with RunDirectory(results, "e", "c", 0, earlier) as folder, ExitStack() as stack:
        began.append(0 if earlier.checkpoint is None else earlier.checkpoint.version)
        folder.write_config(plain(config))
        runner = stack.enter_context(event_loop(plan))
        spec = RunSpec(
            config,
            schedule,
            plan,
            config.model,
            seed=0,
            checkpoints=folder.path / CHECKPOINTS,
            resumed=earlier.checkpoint,
        )
        session = Session(spec, clock_of(plan, runner.get_loop()))
        session.recorder.listeners.append(folder.append_metrics)
        session.recorder.write_into(folder)
        session.file_sizes = folder.file_sizes

        async def measure() -> None:
            async with asyncio.timeout(seconds):
                await session.measure()

        session.start(stack)
        run_in(runner, session.connect())
        try:
            run_in(runner, measure())
        except TimeoutError:
            return None
        session.recorder.write(folder)
        folder.finish()
        return folder


def check_resumed(config: JobConfig, cuts: list[float]) -> list[int]:
    """cuts: shares of the whole run after which an attempt is cut off. The versions that attempts began with."""
    began: list[int] = []
    with TemporaryDirectory() as results:
        whole = attempt(config, Path(results) / "whole", None, [])
        assert whole is not None
        length = load_metrics(whole.path)[-1]["seconds"]
        for cut in cuts:
            if attempt(config, Path(results) / "cut", cut * length, began) is not None:
                break
        else:
            finished = attempt(config, Path(results) / "cut", None, began)
            assert finished is not None
        path = Path(results) / "cut" / "e" / "c" / "seed=0"
        check_run(read_run(path))
        lines = load_metrics(path)
        assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
        times = [line["seconds"] for line in lines]
        assert times == sorted(times)
    return began


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_was_cut_off_twice_keeps_what_its_schedule_promises(schedule: str) -> None:
    began = check_resumed(job(schedule), [0.55, 0.4])
    assert began == sorted(began) and began[-1] > began[0] == 0


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_so_it_is_where_training_follows_the_order_of_completion(on_stale: str) -> None:
    check_resumed(job("fully_async", order="completion", on_stale=on_stale, max_staleness=1.0), [0.6, 0.3])


@pytest.mark.parametrize("order", ["fifo", "completion"])
def test_so_it_is_where_engines_get_every_third_version(order: str) -> None:
    began = check_resumed(job("fully_async", order=order, max_staleness=2.5, publish_every=3), [0.7, 0.4])
    assert began[1] == 3, "the only version before the cut that engines got, and a checkpoint holds"


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    every=st.integers(1, 3),
    cuts=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4),
)
def test_wherever_it_is_cut_off(schedule: str, every: int, cuts: list[float]) -> None:
    check_resumed(job(schedule, every), cuts)
