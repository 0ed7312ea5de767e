"""A plan: every schedule explored on the same devices, side by side, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.config import ConfigError, CostConfig, JobConfig
from harness.runtime.parallel import parallel_as_completed
from harness.studies.planner.candidate import Candidate
from harness.studies.planner.explore import Effort, Exploration, explore
from harness.studies.planner.grid import STALENESS
from harness.studies.planner.pareto import front
from harness.studies.planner.trial import Outcome

SEED = 0
WORTH = 0.01
"""A share of throughput that is not worth any lag."""

_PROCESSES = 2
_TIMEOUT_S = 3600.0  # longest wait for all of them
_STALENESS = "max_staleness"


@dataclass(frozen=True)
class Choice:
    """A candidate that was tried, and what came out."""

    name: str
    config: JobConfig
    candidate: Candidate
    outcome: Outcome

    @property
    def schedule(self) -> str:
        return self.config.schedule.name


@dataclass(frozen=True)
class Plan:
    """explorations: one for each schedule, and for each staleness of a schedule that takes one."""

    explorations: Sequence[Exploration]

    @cached_property
    def best_of_each(self) -> list[Choice]:
        """The fastest of every schedule that fits, fastest first."""
        best: dict[str, Choice] = {}
        for choice in self.choices:
            best.setdefault(choice.schedule, choice)
        return list(best.values())

    @cached_property
    def choices(self) -> list[Choice]:
        """Everything that was tried, fastest first; of equals, the one that lags less."""
        every = [
            Choice(its.name, its.config, candidate, outcome)
            for its in self.explorations
            if its.found is not None
            for candidate, outcome in its.found.tried
        ]
        return sorted(every, key=lambda choice: (choice.outcome.seconds, choice.outcome.lag_mean))

    @cached_property
    def front(self) -> list[Choice]:
        """Throughput against mean lag, the fastest of each schedule and staleness: what nothing else beats in both."""
        fastest = {choice.name: choice for choice in reversed(self.choices)}
        return front(list(fastest.values()), _rate, lambda its: its.outcome.lag_mean, worth=WORTH)

    @cached_property
    def best(self) -> Choice:
        """The one that lags least of those that are as good as the fastest."""
        enough = _rate(self.choices[0]) * (1 - WORTH)
        return min((its for its in self.choices if _rate(its) >= enough), key=lambda its: its.outcome.lag_mean)

    @cached_property
    def runner_up(self) -> Choice | None:
        """The fastest of another schedule, or the next of the same where only one was planned."""
        others = [its for its in self.best_of_each if its.schedule != self.best.schedule]
        others = others or [its for its in self.choices if its is not self.best]
        return others[0] if others else None


def _rate(choice: Choice) -> float:
    return choice.outcome.samples_per_s


def variants(config: JobConfig, fixed: frozenset[str]) -> list[JobConfig]:
    """The job with each staleness that is searched, if its schedule takes one and the user did not choose it."""
    options = config.schedule.options
    if _STALENESS not in options or f"schedule.{_STALENESS}" in fixed:
        return [config]
    return [
        replace(config, schedule=replace(config.schedule, options={**options, _STALENESS: value}))
        for value in STALENESS
    ]


def make_plan(
    jobs: Sequence[JobConfig],
    fixed: frozenset[str],
    effort: Effort,
    *,
    processes: int = _PROCESSES,
    told: Callable[[str], None] = lambda said: None,
) -> Plan:
    """Explore every job, in processes that end with this call. told: hears what was explored.

    Raises ConfigError where no job fits its devices.
    """
    plan = Plan(explore_all(jobs, fixed, effort, processes=processes, told=told))
    if not plan.choices:
        job = jobs[0]
        raise ConfigError(
            f"model={job.model.name} fits no split of {job.cluster.devices} devices of device={job.device.name}; "
            "set DEVICES higher, or a device with more memory, as in DEVICE=h200"
        )
    return plan


def explore_all(
    jobs: Sequence[JobConfig],
    fixed: frozenset[str],
    effort: Effort,
    *,
    processes: int = _PROCESSES,
    told: Callable[[str], None] = lambda said: None,
) -> list[Exploration]:
    """Every job, with every staleness that is searched, in their order."""
    fixed = fixed | (_GIVEN if isinstance(jobs[0].cost, CostConfig) else frozenset())
    tasks = [(job, fixed, SEED, effort) for base in jobs for job in variants(base, fixed)]
    found: dict[int, Exploration] = {}
    # the longest simulations are begun first
    order = sorted(range(len(tasks)), key=lambda n: -float(tasks[n][0].schedule.options.get(_STALENESS, 0)))
    what = "processes that explore schedules, one each"
    turns = parallel_as_completed(
        _explore, [tasks[n] for n in order], processes=processes, timeout_s=_TIMEOUT_S, what=what
    )
    for turn, exploration in turns:
        found[order[turn]] = exploration
        told(exploration.name)
    return [found[number] for number in range(len(tasks))]


_GIVEN = frozenset(
    {
        "engine.tensor_parallel",
        "training.tensor_parallel",
        "training.pipeline_parallel",
        "training.expert_parallel",
    }
)
"""Costs that are given are those of one layout: no other is searched."""

_Task = tuple[JobConfig, frozenset[str], int, Effort]


def _explore(task: _Task) -> Exploration:
    return explore(*task)
