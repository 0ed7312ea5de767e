"""Random jobs of every schedule on the virtual clock, played to their end."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from harness.acceptance.chaos.jobs import random_job, random_options
from harness.comparison import runs
from harness.comparison.promises import FinishedRun
from harness.config import JobConfig
from harness.config.compose import plain
from harness.driver.listeners import IterationListener
from harness.driver.session import Session, simulate
from harness.metrics.samples import SCHEMA
from schedules import Schedule


@dataclass(frozen=True)
class Run:
    """One finished run and the most rows its queue ever held."""

    finished: FinishedRun
    most_rows: int
    metrics: list[dict[str, float]]
    """Of each iteration."""
    files: runs.Run
    """The same run, as it is read from its folder."""


def without_limit(config: JobConfig) -> JobConfig:
    """The job without a limit on samples: none is cut, which would depend on time, and none for that dropped."""
    over_sampling = config.algorithm.over_sampling if config.algorithm.filters else 1.0
    return replace(
        config,
        engine=replace(config.engine, on_straggler="wait", sample_limit_s=None),
        algorithm=replace(config.algorithm, over_sampling=over_sampling),
    )


def play(config: JobConfig, seed: int = 0) -> Run:
    most = [0]
    metrics: list[dict[str, float]] = []

    def watch(session: Session) -> None:
        session.recorder.listeners.append(IterationListener(lambda found: metrics.append(dict(found))))
        queue: Any = session.assembly.queue
        controller = queue._service._controller
        create = controller.create

        def created(name: str, rows: Any, group_size: int) -> None:
            create(name, rows, group_size)
            most[0] = max(most[0], controller._partitions.rows)

        controller.create = created

    recorder = simulate(config, seed, started=watch)
    recorder.ledger.check()
    samples, counts, tokens = recorder.samples(), recorder.ledger.counts(), recorder.tokens
    finished = FinishedRun(config, samples, counts, recorder.timeline, tokens=tokens)
    ledger = recorder.ledger.to_json() | {"tokens": tokens}
    files = runs.Run(Path("played"), {}, plain(config), metrics, ledger)
    columns = {name: [getattr(sample, name) for sample in finished.samples] for name in SCHEMA.names}
    files.__dict__["samples"] = pa.table(columns, schema=SCHEMA)
    return Run(finished, most[0], metrics, files)


@st.composite
def options_of(draw: st.DrawFn, schedule: type[Schedule]) -> dict[str, Any]:
    """Of a schedule, some that go together."""
    return random_options(schedule, lambda values: draw(st.sampled_from(values)))


@st.composite
def jobs(draw: st.DrawFn, schedule: str) -> JobConfig:
    return random_job(schedule, lambda values: draw(st.sampled_from(values)))
