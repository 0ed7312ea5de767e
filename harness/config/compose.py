"""From the command line to a checked configuration: Hydra composes the files, typed config reads the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from harness.config import ConfigError, JobConfig, first_line, job_config
from schedules import SCHEDULES, Schedule

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
GROUPS = ("schedule", "model", "engine", "task", "algorithm", "training", "cluster", "cost", "device")
_FILE = ".yaml"
"""The end of a choice that is a file instead of a name."""
NOT_IN_CELL = ("experiment", "seeds", "force", "save_weights")
"""Settings that do not change what a run computes, so that they do not name a cell."""


def choices(group: str) -> list[str]:
    """Names of a group's files."""
    return sorted(path.stem for path in (EXPERIMENTS / group).glob("*.yaml"))


def compose_job(overrides: Sequence[str]) -> JobConfig:
    """The configuration of `python -m harness bench <overrides>`. Raises ConfigError with one line."""
    for override in overrides:
        _check_override(override)
    try:
        return job_config(_tree(overrides))
    except OverrideParseException as error:
        raise ConfigError(f"{error.override} cannot be read; write setting=value, such as iterations=20") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, overrides)) from error


def _tree(overrides: Sequence[str]) -> dict[str, Any]:
    """What the files say, with these changes."""
    with initialize_config_dir(config_dir=str(EXPERIMENTS), version_base="1.3"):
        composed = compose("bench", [_by_name(override) for override in overrides])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _by_name(override: str) -> str:
    """The choice of a group by a file's path, `cost=results/costs/mine.yaml`, as one by a name that Hydra now knows."""
    group, _, value = override.partition("=")
    if group not in GROUPS or not value.endswith(_FILE):
        return override
    name = f"file_{hashlib.sha256(str(Path(value).resolve()).encode()).hexdigest()[:12]}"
    ConfigStore.instance().store(group=group, name=name, node=read_settings(Path(value)))
    return f"{group}={name}"


def read_settings(path: Path) -> dict[str, Any]:
    """What a file of settings says. Raises ConfigError where there is none, or it holds no settings."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; `make list` shows the choices that have names")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; write a line such as `name: {path.stem}` for each")
    return {str(key): value for key, value in tree.items()}


def make_schedule(config: JobConfig) -> Schedule:
    """The schedule with its options checked by its own class. Raises ConfigError."""
    schedule = SCHEDULES.get(config.schedule.name)
    if schedule is None:
        raise ConfigError(f"schedule={config.schedule.name} is unknown; choose one of {', '.join(SCHEDULES)}")
    known = [field.name for field in dataclasses.fields(schedule)]  # type: ignore[arg-type]
    for option in config.schedule.options:
        if option not in known:
            raise ConfigError(
                f"schedule.{option} is no option of {config.schedule.name}; it has {', '.join(known) or 'none'}"
            )
    try:
        return TypeAdapter(schedule).validate_python(config.schedule.options)
    except ValidationError as error:
        raise ConfigError(first_line(error, "schedule.")) from error


def plain(config: JobConfig) -> dict[str, Any]:
    """The configuration as nested plain values, options of schedule and engine beside their names as in the YAML."""
    tree = json.loads(json.dumps(dataclasses.asdict(config)))
    for group in ("schedule", "engine"):
        tree[group] |= tree[group].pop("options")
    return tree


def cell_name(config: JobConfig) -> str:
    """`<schedule>-<model>-<task>-<hash>`: equal exactly when two configurations compute the same, seeds aside."""
    left_out = (*NOT_IN_CELL, "cost", "device") if config.backend == "real" else NOT_IN_CELL
    tree = {key: value for key, value in plain(config).items() if key not in left_out}
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:6]
    return f"{config.schedule.name}-{config.model.name}-{config.task.name}-{digest}"


def _check_override(override: str) -> None:
    """What Hydra would take, or refuse in words of its own."""
    setting, equals, value = override.lstrip("+~").partition("=")
    if not setting or not (equals or override.startswith("~")):
        raise ConfigError(f"{override} cannot be read; write setting=value, such as iterations=20")
    if setting in GROUPS and not value.endswith(_FILE) and value not in choices(setting):
        raise ConfigError(f"{setting}={value} is unknown; choose one of {', '.join(choices(setting))}")
    if setting in GROUPS and override != f"{setting}={value}":
        raise ConfigError(f"{override} cannot be read; a group has one choice: {setting}={value}")
    if setting.startswith("hydra."):
        raise ConfigError(f"{override} is no setting of a job; `make list` shows the files that name them all")


def _one_line(error: HydraException | OmegaConfBaseException, overrides: Sequence[str]) -> str:
    setting = str(getattr(error, "full_key", None) or "")
    if isinstance(error, MissingMandatoryValue):
        return f'{setting} has no value; add ARGS="{setting}=..."'
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith(("Could not override '", "Could not delete from config. '")):
        return _no_setting(lines[0].split("'")[1], overrides)
    return f"{setting}: {lines[0]}" if setting else " ".join(lines[:2])


def _no_setting(setting: str, overrides: Sequence[str]) -> str:
    """Names the settings that there are beside it."""
    tree: Any = _tree([override for override in overrides if override.partition("=")[0] in GROUPS])
    above: list[str] = []
    for part in setting.split(".")[:-1]:
        if not isinstance(tree.get(part), dict):
            break
        tree, above = tree[part], [*above, part]
    where = ".".join(above) or "a job"
    return f"{setting} is no setting; those of {where} are {', '.join(sorted(tree))}"
