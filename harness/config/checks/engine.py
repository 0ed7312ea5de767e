"""The rollout engine that a job names: its class, its options, and whether it can start in this environment."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engines import ENGINES, OPTIONS
from harness.config import ConfigError, JobConfig
from harness.config.plugins import is_path, load, make


def engine_class(name: str) -> Any:
    """The class of a `harness.protocols.RolloutEngine`; loads the engine's packages."""
    return load(ENGINES.get(name, name), "engine")


def engine_options(config: JobConfig) -> Any | None:
    """An instance of the engine's `Options`; None where it has none. Raises ConfigError for an option that it lacks, or
    a value of another type."""
    name, given = config.engine.name, config.engine.options
    options = getattr(_described(name), "Options", None)
    if options is None and given:
        raise ConfigError(f"engine.{next(iter(given))} is no option of {name}; it has none")
    return None if options is None else make(options, given, "engine", name)


def check_environment(config: JobConfig) -> None:
    """Raises ConfigError where the engine says that it cannot start here."""
    check = getattr(_described(config.engine.name), "check_environment", None)
    if check is not None:
        check()


def _described(name: str) -> Any:
    """What has the engine's `Options` and `check_environment`: a module that loads nothing, or its class."""
    if is_path(name):
        return engine_class(name)
    return import_module(OPTIONS[name]) if name in OPTIONS else None
