"""Does a simulated run predict the paced run of the same job: eight engines' worth of pacing, for every schedule?

    python -m tests.benchmarks.bench_paced [--schedules half_step,fully_async] [--seed 0] [settings ...]

Runs each job twice: on the virtual clock, and with real workers, queue and weight transfers whose engines last what the
same cost model says. Prints the mean time of an iteration after warm-up on both, and by how much the prediction is
off. Target: 5 %. Takes about a minute for a schedule on two cores, most of it to start processes.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from harness.checks.job import plan_job
from harness.config import JobConfig
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import NO_MACHINE
from harness.config.registries import SCHEDULES
from harness.driver.backends import RunSpec, clock_of, event_loop
from harness.driver.session import Session, simulate
from harness.metrics.timeline import Timeline

JOB = (
    "backend=paced iterations=8 cluster.devices=12 algorithm.batch_groups=36 algorithm.micro_batch_groups=1 "
    "engine.slots=64 model=qwen7b cost.prompt_tokens=32 cost.lengths.mean=96 cost.lengths.sigma=0.8 "
    "cost.lengths.cap=320"
).split()
"""On H100s, by the roofline, a decode step lasts 7.3 ms at least: an iteration lasts seconds, so that calls between
processes are small beside it, as they would be in earnest."""
SPLIT = ("schedule.split.rollout=8", "schedule.split.actor=4")
COLUMNS = "{:<34}{:>14}{:>14}{:>10}"


@dataclass(frozen=True)
class Case:
    """A schedule with its options."""

    name: str
    settings: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        return " ".join([self.name, *(setting.removeprefix("schedule.") for setting in self.settings)])

    def config(self, more: Sequence[str]) -> JobConfig:
        pools = () if self.name == "colocate_sync" else SPLIT
        return compose_job([f"schedule={self.name}", *JOB, *pools, *self.settings, *more])


CASES = [
    *(Case(name) for name in SCHEDULES),
    Case("separated_sync", ("schedule.streaming=false",)),
    Case("fully_async", ("schedule.pause=wait", "schedule.max_staleness=1")),
]


def iteration_s(timeline: Timeline) -> float:
    """Seconds of an iteration: a mean, the warm-up left out."""
    start, end = timeline.steady_window()
    return (end - start) / (len(timeline.iteration_ends) - timeline.warmup)


def paced(config: JobConfig, seed: int) -> Timeline:
    """Run the job in processes of its own, and leave no file."""
    schedule = make_schedule(config)
    plan = plan_job(config, schedule, NO_MACHINE)
    with ExitStack() as stack:
        runner = stack.enter_context(event_loop(plan))
        session = Session(RunSpec(config, schedule, plan, config.model, seed), clock_of(plan, runner.get_loop()))
        session.start(stack)
        runner.run(session.connect())
        runner.run(session.measure())
    return session.recorder.timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="more settings of the job, such as cost.lengths.sigma=0.5")
    given = parser.parse_args()
    print(COLUMNS.format("schedule", "simulated, s", "paced, s", "error"), flush=True)
    for case in CASES:
        if case.name in given.schedules.split(","):
            config = case.config(given.settings)
            predicted = iteration_s(simulate(config, given.seed).timeline)
            measured = iteration_s(paced(config, given.seed))
            error = f"{predicted / measured - 1:+.1%}"
            print(COLUMNS.format(case.told, f"{predicted:.3f}", f"{measured:.3f}", error), flush=True)


if __name__ == "__main__":
    main()
