"""The command that runs a plan."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.checks.job import device_roles
from harness.studies.planner.plan import Choice

ITERATIONS = 20
"""Of the run that is proposed: enough to be in a steady state for most of it."""

_VARIABLES = {
    "schedule": "SCHEDULE",
    "model": "MODEL",
    "cluster.devices": "DEVICES",
    "device": "DEVICE",
    "cost": "COST",
    "engine": "ENGINE",
    "task": "TASK",
    "backend": "BACKEND",
    "iterations": "ITERATIONS",
    "seeds": "SEEDS",
}
"""Settings that the Makefile has a variable for."""


def bench_command(choice: Choice, settings: Sequence[str], iterations: int = ITERATIONS) -> str:
    """`make bench ...` for a choice of a plan that was made with these settings, the user's own among them."""
    given = dict(setting.split("=", 1) for setting in settings)
    given |= {"schedule": choice.schedule, "cluster.devices": str(choice.config.cluster.devices)}
    given.setdefault("iterations", str(iterations))
    options = {f"schedule.{name}": value for name, value in choice.config.schedule.options.items()}
    searched = {name: value for name, value in options.items() if name == "schedule.max_staleness"}
    given |= {name: written(value) for name, value in (searched | layout(choice)).items()}
    variables = [f"{_VARIABLES[name]}={value}" for name, value in given.items() if name in _VARIABLES]
    others = [f"{name}={value}" for name, value in given.items() if name not in _VARIABLES]
    return f'make bench {" ".join(variables)} ARGS="{" ".join(others)}"'


def layout(choice: Choice) -> dict[str, object]:
    """The settings that its candidate stands for."""
    return dict(choice.candidate.settings(device_roles(choice.config)))


def written(value: object) -> str:
    """As on a command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
