"""The fast event model: the schedule's own file over fronts that keep no queue, no rows and no records, so that a job
of thousands of samples takes milliseconds where `simulate` takes seconds. Engines decode by the rules of
`engines.simulated.decoding`, the same lengths at the same seed; an engine goes at once to its next moment that anybody
waits for.

What it does not cover (`not_covered`) is left to `simulate`, and the result says so.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.checks.layout import device_roles
from harness.config import JobConfig
from harness.config.compose import make_schedule
from harness.config.placement import ENGINE_ROLES, Placement, resolve_split
from harness.cost_model.job_cost import simulated_cost
from harness.driver.event_model.job import FastSteps, Job
from harness.driver.listeners import IterationListener
from harness.driver.session import simulate
from harness.metrics.timeline import clip
from harness.runtime.virtual_runtime import VirtualLoop, infrequent_gc
from schedules import Schedule


def not_covered(config: JobConfig, schedule: Schedule, placement: Placement) -> str:
    """The parts of a job that the event model does not know; "" where it knows all."""
    rollout_shares = len(placement.roles_on(placement.devices["rollout"][0])) > 1
    reasons = {
        f"order={schedule.order}": schedule.order not in ("fifo", "completion"),
        "a critic": config.algorithm.has_critic,
        "groups that are refused for another reason than a filter": config.refills and not config.algorithm.filters,
        "spare groups in the place of those that a filter refuses": config.refills
        and config.algorithm.spare_groups > 0,
        "turns with an environment": config.cost.turns is not None,
        "a limit on how long samples take": config.engine.sample_limit_s is not None,
        "groups that are refused while devices are lent": config.refills and schedule.lends,
        "engines on devices of others": rollout_shares and not schedule.colocated,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def fast_steps(config: JobConfig, seed: int, until: int | None = None) -> FastSteps:
    """Iterations of a job that was admitted, as `simulate` has them at this seed. until: so many that are looked at;
    what comes after them is not simulated. Raises ConfigError as `make_schedule`
    and `simulated_cost` do, Deadlock as `simulate`."""
    schedule = make_schedule(config)
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    if reason := not_covered(config, schedule, placement):
        return replace(simulated_steps(config, seed), not_covered=reason)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, infrequent_gc():
        cost = simulated_cost(config, placement)
        lent = simulated_cost(config, placement, "lent") if schedule.lends else None
        job = Job(config, schedule, placement, cost, seed, runner.get_loop(), until, lent)
        runner.run(job.run())
    return job.steps()


def simulated_steps(config: JobConfig, seed: int) -> FastSteps:
    """The same of `simulate`."""
    every: list[Mapping[str, float]] = []
    recorder = simulate(
        config, seed, lambda session: session.recorder.listeners.append(IterationListener(every.append))
    )
    timeline = recorder.timeline
    spans = [(span.start, span.end) for span in timeline.spans if span.kind == "generate"]
    engines = sum(role in ENGINE_ROLES for role, _ in timeline.placement)
    windows = [timeline.window(iteration) for iteration in timeline.iteration_ends]

    def each(name: str) -> NDArray[np.float64]:
        return np.array([metrics[name] for metrics in every])

    longest = np.zeros(len(every))
    first: list[dict[int, int]] = [{} for _ in every]  # lags of groups
    for sample in recorder.samples():
        if sample.trained_iteration is not None and sample.finished_at and sample.started_at is not None:
            took = sample.finished_at - sample.started_at
            longest[sample.trained_iteration] = max(longest[sample.trained_iteration], took)
        if sample.trained_iteration is not None and sample.lag_worst is not None:
            of_groups = first[sample.trained_iteration]
            of_groups[sample.group_id] = max(of_groups.get(sample.group_id, 0), sample.lag_worst)
    seconds = each("time/iteration_s")

    dropped = sum(value for name, value in every[-1].items() if name.startswith("ledger/dropped"))
    return FastSteps(
        seconds,
        np.array([sum(end - start for start, end in clip(spans, window)) / engines for window in windows]),
        each("time/wait_for_samples_s"),
        each("staleness/mean"),
        each("staleness/max"),
        np.array([np.mean(list(of_groups.values())) for of_groups in first]),
        longest,
        each("time/weight_sync_exposed_s"),
        {role: seconds * (1 - each(f"idle/{role}")) for role in ("rollout", "actor")},
        int(dropped),
    )


def difference(config: JobConfig, seed: int) -> float:
    """How far the event model is from the schedule's file: the largest difference of the end of an iteration, of the
    seconds of a mean iteration."""
    fast, own = (np.cumsum(found.seconds) for found in (fast_steps(config, seed), simulated_steps(config, seed)))
    return float(np.abs(fast - own).max() * len(own) / own[-1])
