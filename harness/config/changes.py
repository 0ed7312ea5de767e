"""A job with other settings, and how these are given on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config import JobConfig

VARIABLES = {
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
"""Settings that commands which are printed give by make's variable."""


def changed(config: JobConfig, settings: Mapping[str, Any]) -> JobConfig:
    """The job with these settings, by their path: a group's own, as in `training.layout`, or a role of
    `schedule.split`. They are taken as they are."""
    for path, value in settings.items():
        group, _, name = path.partition(".")
        part = getattr(config, group)
        first, _, role = name.partition(".")
        new = {first: {**getattr(part, first), role: value}} if role else {name: value}
        config = replace(config, **{group: replace(part, **new)})
    return config


def as_arguments(settings: Mapping[str, Any]) -> str:
    """Settings as given to make: `DEVICES=8 ARGS="training.layout=packed"`."""
    variables = [f"{VARIABLES[path]}={value}" for path, value in settings.items() if path in VARIABLES]
    others = [f"{path}={_text(value)}" for path, value in settings.items() if path not in VARIABLES]
    return " ".join([*variables, *([f'ARGS="{" ".join(others)}"'] if others else [])])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
