"""A job with other settings, and how these are given on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.config import JobConfig


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
    """Settings as given on a command line: `cluster.devices=8 training.layout=packed`."""
    return " ".join(f"{path}={shlex.quote(_text(value))}" for path, value in settings.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
