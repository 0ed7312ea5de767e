"""The rollout engine that a job names: its class, its options, and whether it can start in this environment."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engines import ENGINES, OPTIONS
from harness.config import ConfigError, JobConfig, first_line


def engine_class(name: str) -> Any:
    """The class of a `harness.protocols.RolloutEngine`; loads the engine's packages."""
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(import_module(module), attribute)


def engine_options(config: JobConfig) -> Any | None:
    """An instance of the engine's `Options`; None where it has none. Raises ConfigError for an option that it lacks, or
    a value of another type."""
    name, given = config.engine.name, config.engine.options
    options = getattr(_described(name), "Options", None)
    known = [] if options is None else [field.name for field in dataclasses.fields(options)]
    for option in given:
        if option not in known:
            raise ConfigError(f"engine.{option} is no option of {name}; it has {', '.join(known) or 'none'}")
    try:
        return None if options is None else TypeAdapter(options).validate_python(given)
    except ValidationError as error:
        raise ConfigError(first_line(error, "engine.")) from error


def check_environment(config: JobConfig) -> None:
    """Raises ConfigError where the engine says that it cannot start here."""
    check = getattr(_described(config.engine.name), "check_environment", None)
    if check is not None:
        check()


def _described(name: str) -> Any:
    """What has the engine's `Options` and `check_environment`: a module that loads nothing, or its class."""
    return import_module(OPTIONS[name]) if name in OPTIONS else None
