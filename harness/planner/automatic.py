"""The split of a simulated job whose user chose none: a short search, before the job is admitted."""

from dataclasses import replace

from harness.checks.layout import device_roles
from harness.checks.settle import Draft
from harness.config.compose import changed
from harness.cost_model.shape import parameters

DEVICES = 16
"""Devices of a simulated job that names none: two nodes of eight, the fewest on which models of 32 billion parameters
train beside their rollout on devices of 80 GB."""

SAMPLES, TRIALS, PARTS = 200_000, 2, 12  # the effort of a plan that nobody asked for by itself
LARGE = 100_000_000  # parameters of a model from which on nobody simulates the batch of the toy task
ITERATIONS = 10  # iterations of such a job that says none: as many as show its steady state
_BATCH = ("algorithm.batch_groups", "algorithm.group_size")

_MAX_STALENESS = "schedule.max_staleness"  # decides what is learnt: a plan of one schedule leaves it


def plan_split(draft: Draft, why: str) -> Draft:
    """Return the job with the planner's split and layout: the `Planner` of whoever settles jobs (harness/checks)."""
    from harness.planner.explore import Effort  # loads torch: a run that needs no plan does so later
    from harness.planner.plan import DEFAULTS, bench_command, devices_and_batch, make_plan, shared_as_alone

    config = shared_as_alone(replace(draft.config, backend="virtual"), draft.given)
    arguments, published = draft.arguments, ""
    if parameters(config.model) > LARGE and not draft.given & {"algorithm", *_BATCH}:
        config = changed(config, {name: int(DEFAULTS[name]) for name in _BATCH})
        arguments = (*(f"{name}={DEFAULTS[name]}" for name in _BATCH), *arguments)
        lengths = config.cost.lengths
        published = (
            "A batch as published (DAPO, arXiv 2503.14476), as none was given; responses of a mathematics task, "
            f"{lengths.mean or 0:,.0f} tokens in the mean and {lengths.cap:,} at most (cost={config.cost.name}). "
        )
        if "iterations" not in draft.given:
            config = replace(config, iterations=ITERATIONS)
    if not draft.given & {"cluster", "cluster.devices"}:
        config = replace(config, cluster=replace(config.cluster, devices=DEVICES))
    plan = make_plan([config], draft.given | {_MAX_STALENESS}, Effort(SAMPLES, TRIALS, PARTS), processes=1)
    command = bench_command(plan.best, arguments, config.iterations)
    split, layout = plan.best.candidate.describe()
    devices, batch = devices_and_batch(config)
    messages = (
        *((f"Why: {why}",) if why else ()),
        f"{published}Planned for {devices}, with {batch} an iteration: {split}; {layout}. The same as",
        f"  {command}",
    )
    return replace(draft, config=plan.best.candidate.apply(config, device_roles(config)), messages=messages)
