"""The split of a simulated job whose user chose none: a short search, before the job is admitted."""

from __future__ import annotations

from dataclasses import replace

from harness.checks.layout import device_roles
from harness.checks.settle import Draft

DEVICES = 16
"""Devices of a simulated job that names none: two nodes of eight, the fewest on which models of 32 billion parameters
train beside their rollout on devices of 80 GB."""

SAMPLES, TRIALS = 200_000, 12
"""The effort of a plan that nobody asked for by itself."""

_MAX_STALENESS = "schedule.max_staleness"  # decides what is learnt: a plan of one schedule leaves it


def plan_split(draft: Draft, why: str) -> Draft:
    """Return the job with the planner's split and layout: the `Planner` of whoever settles jobs (harness/checks)."""
    from harness.planner.explore import Effort  # loads torch: a run that needs no plan does so later
    from harness.planner.plan import bench_command, devices_and_batch, make_plan

    config = replace(draft.config, backend="virtual")
    if not draft.given & {"cluster", "cluster.devices"}:
        config = replace(config, cluster=replace(config.cluster, devices=DEVICES))
    plan = make_plan([config], draft.given | {_MAX_STALENESS}, Effort(samples=SAMPLES, trials=TRIALS), processes=1)
    command = bench_command(plan.best, draft.arguments, config.iterations)
    split, layout = plan.best.candidate.describe()
    devices, batch = devices_and_batch(config)
    messages = (
        *((f"Why: {why}",) if why else ()),
        f"Planned for {devices}, with {batch} an iteration: {split}; {layout}. The same as",
        f"  {command}",
    )
    return replace(draft, config=plan.best.candidate.apply(config, device_roles(config)), messages=messages)
