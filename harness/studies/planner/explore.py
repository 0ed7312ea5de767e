"""All ways to use the devices under one schedule: enumerate, drop what does not fit, bound, and try the likeliest."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from harness.config import ConfigError, CostConfig, JobConfig
from harness.config.checks.job import device_roles
from harness.config.compose import make_schedule
from harness.config.placement import place
from harness.cost_model.job_cost import check_memory, simulated_cost
from harness.driver.build import fair_share
from harness.studies.planner.candidate import Candidate
from harness.studies.planner.draws import Draws
from harness.studies.planner.grid import grid
from harness.studies.planner.period import hindered, period
from harness.studies.planner.search import Found, Prospect, search
from harness.studies.planner.trial import Outcome, trial, window
from harness.studies.planner.work import Crew, least_work, likely_work
from schedules import FullyAsync, HalfStep, KStepOff, Schedule
from schedules.capacity import Capacity

_STREAMING = (FullyAsync, HalfStep)  # engines go from one batch to the next without running empty


@dataclass(frozen=True)
class Effort:
    """What a search may cost: simulated samples (of all trials together), and trials."""

    samples: int
    trials: int


@dataclass(frozen=True)
class Exploration:
    """What was found of one schedule with its options. unfit: candidates that memory cannot hold."""

    config: JobConfig
    candidates: int
    unfit: int
    found: Found[Candidate, Outcome] | None

    @property
    def name(self) -> str:
        options = self.config.schedule.options
        return self.config.schedule.name + (f" ({options['max_staleness']:g})" if "max_staleness" in options else "")


def explore(config: JobConfig, fixed: Collection[str], seed: int, effort: Effort) -> Exploration:
    """The best of `config`'s schedule on its devices. fixed: settings that are not searched.

    `found` is None where nothing fits. At least one candidate is tried, whatever the effort allows.
    """
    schedule, roles = make_schedule(config), device_roles(config)
    batch_samples = config.algorithm.batch_samples
    its = window(schedule, batch_samples)
    candidates = grid(config, schedule, bool(scoring_roles(roles)), fixed)
    prospects = list(_prospects(config, schedule, candidates, Draws.of(config, seed, its.iterations)))
    bounds = {prospect.candidate: prospect.bound for prospect in prospects}

    def run(candidate: Candidate) -> Outcome:
        return trial(candidate.apply(config, roles), its, seed, bound=bounds[candidate])

    budget = max(1, min(effort.trials, effort.samples // (batch_samples * its.iterations)))
    found = search(prospects, run, budget) if prospects else None
    return Exploration(config, len(candidates), len(candidates) - len(prospects), found)


def _prospects(
    config: JobConfig, schedule: Schedule, candidates: Sequence[Candidate], draws: Draws
) -> Iterator[Prospect[Candidate]]:
    """Those that fit memory, with the time that they need at least, and probably."""
    roles, streaming = device_roles(config), isinstance(schedule, _STREAMING)
    for candidate in candidates:
        cost = cost_of(config, candidate, roles)
        if cost is not None:
            crew = crew_of(config, schedule, candidate, len(scoring_roles(roles)))
            least = least_work(cost, crew, draws)
            likely = likely_work(cost, crew, draws, streaming=streaming)
            yield Prospect(candidate, period(schedule, least), period(schedule, likely, hindered))


def scoring_roles(roles: tuple[str, ...]) -> set[str]:
    return {"actor_fwd", "reference"} & set(roles)


def crew_of(config: JobConfig, schedule: Schedule, candidate: Candidate, stages: int) -> Crew:
    """Its workers, as the run will make them."""
    algorithm = config.algorithm
    scorers = (candidate.scoring or candidate.actor) // candidate.rank_devices
    rows = candidate.micro_groups * algorithm.group_size
    share = fair_share(algorithm, candidate.engines, batches=_batches_at_once(schedule))
    return Crew(
        engines=candidate.engines,
        running=min(config.engine.slots, share),
        ranks=candidate.ranks,
        rows=min(algorithm.batch_samples, rows * candidate.ranks),
        scorers=scorers,
        scored_rows=min(algorithm.batch_samples, rows * scorers),
        stages=stages,
        apart=candidate.scoring > 0,
        fresh_from=_fresh_from(algorithm.batch_groups, schedule.eta),
        together=schedule.k if isinstance(schedule, KStepOff) else 1,
        transport=schedule.transport,
    )


def _batches_at_once(schedule: Schedule) -> float:
    """Batches of which an engine may have its fair share."""
    if isinstance(schedule, KStepOff):
        return schedule.k
    return 1.0 + schedule.eta


def _fresh_from(batch: int, eta: float) -> int:
    """The first group of a batch b that version b - ceil(eta) may not start: see `schedules.capacity`."""
    return Capacity(batch, eta).limit(-math.ceil(eta))


def cost_of(config: JobConfig, candidate: Candidate, roles: tuple[str, ...]) -> CostConfig | None:
    """What its workers cost; None where they do not fit."""
    job = candidate.apply(config, roles)
    placement = place(job.schedule.split, job.cluster.devices, roles)
    try:
        check_memory(job, placement)
        return simulated_cost(job, placement)
    except ConfigError:
        return None
