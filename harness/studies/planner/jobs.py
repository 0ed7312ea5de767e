"""Which jobs a plan is made for: what the user says, and defaults of what published runs have."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.studies.planner.explore import Effort
from schedules import SCHEDULES

DEFAULTS = {
    "model": "qwen7b",
    "cluster.devices": "16",
    "algorithm.batch_groups": "512",
    "algorithm.group_size": "16",
}
"""What is planned where nothing else is said: a batch as published runs have it (verl's fully asynchronous recipe)."""

EFFORT = Effort(samples=85_000, trials=12)


def plan_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Schedules, and the settings of the job: the user's, and the defaults of what they do not say."""
    given = [argument for argument in arguments if not argument.startswith("schedule=")]
    chosen = [argument.partition("=")[2] for argument in arguments if argument.startswith("schedule=")]
    schedules = list(SCHEDULES) if not chosen or chosen[-1] == "all" else [chosen[-1]]
    said = {argument.partition("=")[0] for argument in given}
    return schedules, [f"{name}={value}" for name, value in DEFAULTS.items() if name not in said] + given


def fixed_by(settings: Sequence[str]) -> frozenset[str]:
    """Settings that the user chose: they are not searched. A split cannot be among them."""
    names = frozenset(setting.lstrip("+~").partition("=")[0] for setting in settings)
    for name in sorted(names):
        if name.startswith("schedule.split"):
            raise ConfigError(f"{name} is what a plan chooses; run your own split with `make bench`, or leave it out")
    return names


def plan_jobs(arguments: Sequence[str]) -> tuple[list[JobConfig], list[str]]:
    """The job under every schedule that is to be planned, and its settings."""
    schedules, settings = plan_settings(arguments)
    jobs = [compose_job([f"schedule={name}", *settings]) for name in schedules]
    return jobs, settings
