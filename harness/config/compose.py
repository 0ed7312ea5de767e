"""Makes a checked configuration of a command line: Hydra composes the files, typed config reads the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from harness.config import ConfigError, JobConfig, ModelConfig, job_config
from harness.config.files import read_yaml
from harness.config.job import COMMON_TO_TASKS, refuse_moved
from harness.config.model_folder import is_source, looks_like_source, model_settings
from harness.config.plugins import Plugin, as_file_name, defaults, is_path, load, make, plugin
from harness.config.registries import check_name, find
from schedules import Schedule

_ROOT = Path(__file__).resolve().parents[2]  # a checkout, or where packages are installed: experiments/ comes along
EXPERIMENTS = _ROOT / "experiments"
DOCS = _ROOT / "docs" if (_ROOT / "docs").is_dir() else Path("docs")
"""Folder of pages: of this checkout; of the current folder where this is an installed copy."""
GROUPS = ("schedule", "model", "engine", "task", "algorithm", "training", "cluster", "cost", "device")
_FILE = ".yaml"
_LONGEST_NAME = 200  # bytes of one; longer than that of any setting
_DEEPEST = 32  # brackets in each other: more, and parsers of values run out of stack
"""The end of a choice that is a file instead of a name."""
_FREE = (
    *(
        "schedule.split.critic=",
        "algorithm.options.",
        "algorithm.rejection.",
        "algorithm.rejection=",
        "cost.filtered_share=",
        "eval.function=",
        "cluster.queue=",
        "cluster.queue_options.",
        *(f"task.{name}_options." for name in ("reward", "generate", "buffer")),
        *(f"task.{name}=" for name in COMMON_TO_TASKS),
    ),
    *(f"task.{name}{at}" for name in ("settings", "chat_options") for at in "=."),
)
"""Options of code of the user's or of others', and settings of every task: what they are is not in the files."""
_OF_MODEL = {f"model.{made.name}" for made in dataclasses.fields(ModelConfig)}
"""Settings of every model; files give those that are not the default."""
_PLUGINS = ("schedule", "engine", "task")
"""Groups whose choice may be code of the user's."""
_SHARED = {"actor": "rest", "rollout": "actor", "actor_fwd": "actor", "reference": "actor"}
_SEPARATE = {"rollout": "50%", "actor": "rest", "actor_fwd": "actor", "reference": "actor"}
"""Splits of a schedule that has no file."""
_SHAPED = (
    "rejection",
    "kl_in",
    "kl_target",
    "kl_horizon",
    "shaping",
    "filter",
    "filter_rounds",
    "over_sampling",
    "mask_truncated",
    "entropy_coef",
    "critic_learning_rate",
    "value_clip",
)
_WRITTEN_IF_SET = {
    "task": COMMON_TO_TASKS,
    "algorithm": (
        "advantage",
        "options",
        "warmup_steps",
        "decay",
        "decay_to",
        "aggregation",
        "kl",
        "kl_unbiased",
        *_SHAPED,
    ),
    "engine": ("sample_limit_s", "on_straggler"),
    "cluster": ("heartbeat_timeout_s", "queue", "queue_options"),
    "training": ("tokens_per_micro_batch",),
    "eval": ("every", "samples", "k", "function"),
    "checkpoint": ("every", "keep", "background", "begin_with"),
    "restarts": ("limit",),
    "texts": ("samples", "characters"),
    "model": (
        *("architecture", "tokenizer", "attention_bias", "qk_norm", "sliding_window", "sliding_layers"),
        *("rope_theta", "norm_eps", "fp32_head"),
    ),
}
"""Settings that a configuration names only where they are not the default, as before there were any."""
_GROUPS_WRITTEN_IF_SET = ("eval", "checkpoint", "replay", "restarts", "texts")
NOT_IN_CELL = ("experiment", "seeds", "force", "save_weights", "checkpoint", "restarts", "texts")
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


def names_of(overrides: Sequence[str]) -> frozenset[str]:
    """The settings that they give a value."""
    return frozenset(override.lstrip("+~").partition("=")[0] for override in overrides)


def _tree(overrides: Sequence[str], *, complete: bool = True) -> dict[str, Any]:
    """Settings as the files say, with these changes. complete: raise where a value has yet to be given."""
    with initialize_config_dir(config_dir=str(EXPERIMENTS), version_base="1.3"):
        composed = compose("bench", [_by_name(override) for override in overrides])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _by_name(override: str) -> str:
    """An override as Hydra knows it: a choice of a group by a file's path, `cost=results/costs/mine.yaml`, by an import
    path, `schedule=my_lab.schedules:Mine`, or a model by its folder, gets a name in its store; a free option is added
    where there is none."""
    group, _, value = override.partition("=")
    if override.startswith(_FREE) or group in _OF_MODEL:
        return f"++{override}"
    if group not in GROUPS or value in choices(group):
        return override
    node = read_settings(Path(value)) if value.endswith(_FILE) else _settings_of(group, value)
    name = f"own_{hashlib.sha256(json.dumps(node, default=str).encode()).hexdigest()[:12]}"
    ConfigStore.instance().store(group=group, name=name, node=node)
    return f"{group}={name}"


def _settings_of(group: str, path: str) -> dict[str, Any]:
    """Settings as a file of this choice would say: its options with their defaults; of a schedule also a split."""
    if group == "model":
        return model_settings(path)
    if group == "engine":
        common = read_settings(EXPERIMENTS / "engine" / "torch.yaml")
        own = getattr(load(path, group), "Options", None)
        return common | ({} if own is None else defaults(own, group, path)) | {"name": path}
    if group == "task":
        own = {name: value for name, value in defaults(load(path, group), group, path).items() if name != "name"}
        return own | {"name": path}
    schedule = _schedule_class(path)
    return {"name": path, **defaults(schedule, group, path), "split": _SHARED if schedule.colocated else _SEPARATE}


def _schedule_class(name: str) -> type[Schedule]:
    found = find("schedule", name)
    if not (isinstance(found, type) and issubclass(found, Schedule)):
        raise ConfigError(f"schedule={name} is no schedule; make it a frozen dataclass that extends schedules.Schedule")
    if left_out := sorted(found.__abstractmethods__):
        raise ConfigError(f"schedule={name} leaves out {', '.join(left_out)}; write it, a field with a default")
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of a file. Raises ConfigError where there is none, or it holds no settings."""
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; `make list` shows the choices that have names")
        tree = read_yaml(path)
    except ConfigError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; write a line such as `name: {path.stem}` for each")
    return {str(key): value for key, value in tree.items()}


def make_schedule(config: JobConfig) -> Schedule:
    """The schedule with its options checked by its own class. Raises ConfigError."""
    name = config.schedule.name
    try:
        made = make(_schedule_class(name), config.schedule.options, "schedule", name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    eta, transport = made.eta, getattr(made, "transport", None)
    if not isinstance(eta, int | float) or not 0 <= eta < math.inf:
        raise ConfigError(f"schedule={name} has eta={eta}; make it a number of iterations, 0 or more")
    check_name("schedule.order", made.order)
    check_name("schedule.transport", str(transport), f"schedule={name}: transport")
    return made


def plain(config: JobConfig) -> dict[str, Any]:
    """The configuration as nested plain values, options beside the name that they are of, as in the YAML."""
    tree = json.loads(json.dumps(dataclasses.asdict(config)))
    for group in ("schedule", "engine", "task"):
        tree[group] |= tree[group].pop("options")
    for group, names in _WRITTEN_IF_SET.items():
        for made in dataclasses.fields(getattr(config, group)):
            unset = made.default if made.default_factory is dataclasses.MISSING else made.default_factory()
            if made.name in names and tree[group][made.name] == unset:
                del tree[group][made.name]
    for own in dataclasses.fields(_schedule_class(config.schedule.name)):  # type: ignore[arg-type]
        if own.metadata.get("written_if_set") and tree["schedule"].get(own.name) == own.default:
            del tree["schedule"][own.name]
    return {group: settings for group, settings in tree.items() if settings or group not in _GROUPS_WRITTEN_IF_SET}


def cell_name(config: JobConfig) -> str:
    """`<schedule>-<model>-<task>-<hash>`: equal exactly when two configurations compute the same, seeds aside; other
    where code of the user's own has changed."""
    left_out = (*NOT_IN_CELL, "cost", "device") if config.backend == "real" else NOT_IN_CELL
    tree = {key: value for key, value in plain(config).items() if key not in left_out}
    if plugins := plugins_of(config):
        tree["plugins"] = [plugin.sha256 for plugin in plugins]
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:6]
    return f"{cell_prefix(config)}-{digest}"


def plugins_of(config: JobConfig) -> list[Plugin]:
    """The code of the user's that a job uses. Raises ConfigError where one cannot be imported."""
    schedule = make_schedule(config)
    others = (
        ("schedule.order", schedule.order),
        ("schedule.transport", schedule.transport),
        ("task.generate", config.task.generate or ""),
        ("task.buffer", config.task.buffer or ""),
        ("eval.function", config.eval.function or ""),
    )
    return [plugin(setting, path) for setting, path in (*config.named, *others) if is_path(path)]


def cell_prefix(config: JobConfig) -> str:
    """The beginning that names of cells of one schedule, model and task have in common."""
    return "-".join(map(as_file_name, (config.schedule.name, config.model.name, config.task.name)))


def _check_override(override: str) -> None:
    """Refuse what Hydra would take, or refuse in words of its own."""
    setting, equals, value = override.lstrip("+~").partition("=")
    if not setting or not (equals or override.startswith("~")):
        raise ConfigError(f"{override} cannot be read; write setting=value, such as iterations=20")
    refuse_moved(setting, value)
    if len(setting.encode(errors="replace")) > _LONGEST_NAME:  # Hydra looks for a folder of that name
        raise ConfigError(f"{setting[:40]}... is no setting; `make list` shows the files that name them all")
    if max(accumulate((sign in "[{(") - (sign in "]})") for sign in value), default=0) > _DEEPEST:
        raise ConfigError(f"{setting} is nested deeper than {_DEEPEST} levels; no setting is")
    own = value.endswith(_FILE) or (is_path(value) and setting in _PLUGINS)
    own = own or (setting == "model" and (is_source(value) or looks_like_source(value)))
    if setting in GROUPS and not own and value not in choices(setting):
        folder = ", or a folder with a config.json, or hf:<org>/<name>" if setting == "model" else ""
        raise ConfigError(f"{setting}={value} is unknown; choose one of {', '.join(choices(setting))}{folder}")
    if setting in GROUPS and override != f"{setting}={value}":
        raise ConfigError(f"{override} cannot be read; a group has one choice: {setting}={value}")
    if setting == "experiment" and not value.isascii():
        raise ConfigError(f"{override} cannot name a folder; use letters a to z, digits, `_`, `-` and inner dots")
    if setting.startswith(("hydra.", "hydra/")):
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
    groups = [override for override in overrides if override.partition("=")[0] in GROUPS]
    tree: Any = _tree(groups, complete=False)
    above: list[str] = []
    for part in setting.split(".")[:-1]:
        if not isinstance(tree.get(part), dict):
            break
        tree, above = tree[part], [*above, part]
    where = ".".join(above) or "a job"
    where += f"={tree['name']}" if where == "schedule" else ""
    return f"{setting} is no setting; those of {where} are {', '.join(sorted(tree))}"
