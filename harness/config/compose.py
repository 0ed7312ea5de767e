"""Makes a checked configuration of a command line: Hydra composes the files, typed config reads the result."""

import dataclasses
import hashlib
import json
import math
import pickle
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from harness.config import ConfigError, JobConfig, job_config
from harness.config.files import read_yaml
from harness.config.job import flatten, in_words_of_now, refuse_moved
from harness.config.model_folder import is_source, looks_like_source, model_settings
from harness.config.plugins import Plugin, as_file_name, defaults, is_path, load, make, plugin
from harness.config.readers import Setting, Where, naming_settings, settings_of
from harness.config.registries import check_name, find, refuse_module
from schedules import Schedule

_ROOT = Path(__file__).resolve().parents[2]  # a checkout, or where packages are installed: experiments/ comes along
EXPERIMENTS = _ROOT / "experiments"
DOCS = _ROOT / "docs" if (_ROOT / "docs").is_dir() else Path("docs")
"""Folder of pages: of this checkout; of the current folder where this is an installed copy."""
GROUPS = ("schedule", "model", "engine", "task", "algorithm", "training", "cluster", "cost", "device")
CONFIG = "config"
"""Names the config.yaml of a run, whose settings a job has that are not given."""
_FILE = ".yaml"
"""The end of a choice that is a file instead of a name."""
_LONGEST_NAME = 200  # bytes of one; longer than that of any setting
_LONGEST_NUMBER = 400  # a float has 309 before its point; Python reads no integer of over 4,300
_DEEPEST = 32  # brackets in each other: more, and parsers of values run out of stack
_DEFAULTS = in_words_of_now({group: {} for group in GROUPS})
"""Settings that have a default, by group: they need not stand in a file."""
_FREE = ("schedule.split.critic", "cost.filtered_share", "task.settings", "task.chat_options")
"""Others that need not: a share of the devices, what only some jobs have, options that are sets of options."""
_PLUGINS = ("schedule", "engine", "task")
"""Groups whose choice may be code of the user's."""
_SHARED = {"actor": "rest", "rollout": "actor", "actor_fwd": "actor", "reference": "actor"}
_SEPARATE = {"rollout": "50%", "actor": "rest", "actor_fwd": "actor", "reference": "actor"}
"""Splits of a schedule that has no file."""


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


def given_by(overrides: Sequence[str]) -> frozenset[str]:
    """The settings that they give a value, or the run's file among them does."""
    names = names_of(overrides)
    return names | {path for path in flatten(_of_run(overrides)) if path.partition(".")[0] not in names}


def run_file(overrides: Sequence[str]) -> Path | None:
    """The config.yaml that they name, None where they name none."""
    named = [override.partition("=")[2] for override in overrides if names_of([override]) == {CONFIG}]
    return Path(named[-1]) if named else None


def read_job(path: Path) -> JobConfig:
    """The job of a run's config.yaml, also of one that an earlier version wrote. Raises ConfigError, which names the
    file, where it is none."""
    settings = read_settings(path)
    needed = [one.name for one in dataclasses.fields(JobConfig) if one.default is one.default_factory]  # MISSING, both
    if lacking := [name for name in needed if name not in settings]:
        what = "config is the whole config.yaml of a run, as --dry-run prints one"
        raise ConfigError(f"{path} lacks {', '.join(lacking)}; {what}")
    try:
        return job_config(in_words_of_now(settings))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _of_run(overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of the file that they name; whether to run again what is done is for the command to say."""
    path = run_file(overrides)
    return {} if path is None else {name: value for name, value in plain(read_job(path)).items() if name != "force"}


def _tree(overrides: Sequence[str], *, complete: bool = True) -> dict[str, Any]:
    """Settings as the files say, with these changes. complete: raise where a value has yet to be given."""
    run, named = _of_run(overrides), [_by_name(one) for one in overrides if names_of([one]) != {CONFIG}]
    changes = [override for override in named if _is_value(override)]
    chosen = [override for override in named if override not in changes]
    kept = {name: _literal(value) for name, value in run.items() if name not in names_of(chosen)}
    like = [name for name in GROUPS if name in kept and kept[name]["name"] in choices(name)]
    composed = pickle.loads(_composed((*(f"{group}={kept[group]['name']}" for group in like), *chosen)))
    for name, value in kept.items():
        newer: Any = OmegaConf.to_container(composed[name]) if name in like else {}
        composed[name] = {**newer, **value} if isinstance(value, dict) else value
    values = OverridesParser.create().parse_overrides(changes)
    ConfigLoaderImpl.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=False)
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=complete)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _literal(value: Any) -> Any:
    """The value of which OmegaConf makes the same again: texts of a run's file are as they are to be, also `${...}`."""
    if isinstance(value, dict):
        return {name: _literal(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@lru_cache(maxsize=64)
def _composed(chosen: tuple[str, ...]) -> bytes:
    """Settings of these choices, pickled, to be copied soonest. Hydra would read all files anew for each value that is
    set."""
    with initialize_config_dir(config_dir=str(EXPERIMENTS), version_base="1.3"):
        return pickle.dumps(compose("bench", list(chosen)))


def _is_value(override: str) -> bool:
    """Whether it sets one, and chooses no files."""
    setting = names_of([override])
    return setting.isdisjoint(GROUPS) and all(re.fullmatch(r"\w+(\.\w+)*", name) for name in setting)


def _by_name(override: str) -> str:
    """An override as Hydra knows it: a choice of a group by a file's path, `cost=results/costs/mine.yaml`, by an import
    path, `schedule=my_lab.schedules:Mine`, or a model by its folder, gets a name in its store; a free option is added
    where there is none."""
    group, _, value = override.partition("=")
    if group == "loggers" and not value.startswith("["):
        return f"loggers=[{value}]"
    above, _, below = group.partition(".")
    if group.startswith(_FREE) or (below and below.partition(".")[0] in _DEFAULTS.get(above, ())):
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
    split = (_SHARED if schedule.colocated else _SEPARATE) | ({"lent": "actor"} if schedule.lends else {})
    return {"name": path, **defaults(schedule, group, path), "split": split}


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
            raise ConfigError(f"{path} is no file; `cadence list` shows the choices that have names")
        tree = read_yaml(path)
    except ConfigError:
        raise
    except (YAMLError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {str(error).partition(chr(10))[0]}; write `setting: value` lines"
        ) from error
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


def changed(config: JobConfig, settings: Mapping[str, Any]) -> JobConfig:
    """The job with these settings, by their path: a group's own, as in `training.layout`, or a role of
    `schedule.split`. They are taken as they are."""
    for path, value in settings.items():
        group, _, name = path.partition(".")
        part = getattr(config, group)
        first, _, role = name.partition(".")
        new = {first: {**getattr(part, first), role: value}} if role else {name: value}
        config = dataclasses.replace(config, **{group: dataclasses.replace(part, **new)})
    return config


def as_arguments(settings: Mapping[str, Any]) -> str:
    """Settings as given on a command line: `cluster.devices=8 training.layout=packed`."""
    return " ".join(f"{path}={shlex.quote(_text(value))}" for path, value in settings.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def plain(config: JobConfig) -> dict[str, Any]:
    """The configuration as nested plain values, options beside the name that they are of, as in the YAML."""
    tree: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    for group in ("schedule", "engine", "task"):
        tree[group] |= tree[group].pop("options")
    return tree


def cell_name(config: JobConfig) -> str:
    """`<schedule>-<model>-<task>-<hash>`: equal where two configurations compute the same, seeds aside; other where
    code of the user's own has changed. The hash is of what a job reads and what is not the default, so that neither
    what it does not read nor a setting that a later version adds gives another name."""
    tree: dict[str, Any] = naming_settings(config)
    if plugins := plugins_of(config):
        tree["plugins"] = [plugin.sha256 for plugin in plugins]
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:6]
    return f"{cell_prefix(config)}-{digest}"


def refuse_unread(overrides: Sequence[str], config: JobConfig) -> None:
    """Raises ConfigError for a setting that was given, on the command line or in a file of the user's that differs from
    the default there, and that this job does not read."""
    for setting, (value, where) in unread_of(overrides, config).items():
        raise ConfigError(without_effect(setting, value, where))


def without_effect(setting: str, value: str, where: Where) -> str:
    """A line on a setting that a job does not read, and what to do."""
    fix = f", or set {where.fix}" if where.fix else ""
    return f"{setting}={value} has no effect: it is read only where {where.words}; leave it out{fix}"


def unread_of(overrides: Sequence[str], config: JobConfig) -> dict[str, tuple[str, Where]]:
    """Settings that these give and that the job does not read: the value, and the reader that the job lacks."""
    settings, found = settings_of(config), dict[str, tuple[str, Where]]()
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if where := _unread(name, settings):
            found[name] = (value, where)
        elif name in GROUPS and value.endswith(_FILE):
            inside = {path: settings[path] for path in flatten({name: read_settings(Path(value))}) if path in settings}
            changed = {path: one for path, one in inside.items() if one.value != one.default}
            found |= {path: (str(one.value), one.unread) for path, one in changed.items() if one.unread is not None}
    return found


def _unread(name: str, settings: Mapping[str, Setting]) -> Where | None:
    """The reader that is lacking for what is set by this name: a setting, a group or other set of them, or a part of
    one; None where some of it is read."""
    within = [one for path, one in settings.items() if f"{path}.".startswith(f"{name}.") or name.startswith(f"{path}.")]
    if name in GROUPS:  # what its choice decides
        within = [one for one in within if one.value != one.default] or within
    return within[0].unread if within and all(one.unread is not None for one in within) else None


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


def refuse_endless(override: str) -> None:
    """Raise ConfigError for what no parser of Hydra is to see: names, numbers and nests beyond all that settings
    have."""
    setting, _, value = override.lstrip("+~").partition("=")
    if len(setting.encode(errors="replace")) > _LONGEST_NAME:  # Hydra looks for a folder of that name
        raise ConfigError(f"{setting[:40]}... is no setting; `cadence list` shows the files that name them all")
    if re.search(f"[0-9_]{{{_LONGEST_NUMBER},}}", value):
        raise ConfigError(f"{setting}={value[:40]}... is a number longer than {_LONGEST_NUMBER} digits; no setting is")
    if max(accumulate((sign in "[{(") - (sign in "]})") for sign in value), default=0) > _DEEPEST:
        raise ConfigError(f"{setting} is nested deeper than {_DEEPEST} levels; no setting is")


def _check_override(override: str) -> None:
    """Refuse what Hydra would take, or refuse in words of its own."""
    setting, equals, value = override.lstrip("+~").partition("=")
    if not setting or not (equals or override.startswith("~")):
        raise ConfigError(f"{override} cannot be read; write setting=value, such as iterations=20")
    refuse_moved(setting, value)
    refuse_endless(override)
    own = value.endswith(_FILE) or (is_path(value) and setting in _PLUGINS)
    own = own or (setting == "model" and (is_source(value) or looks_like_source(value)))
    if setting in GROUPS and not own and value not in choices(setting):
        if setting in _PLUGINS:
            refuse_module(setting, value)
        folder = ", or a folder with a config.json, or hf:<org>/<name>" if setting == "model" else ""
        raise ConfigError(f"{setting}={value} is unknown; choose one of {', '.join(choices(setting))}{folder}")
    if setting in GROUPS and override != f"{setting}={value}":
        raise ConfigError(f"{override} cannot be read; a group has one choice: {setting}={value}")
    if setting == "experiment" and not value.isascii():
        raise ConfigError(f"{override} cannot name a folder; use letters a to z, digits, `_`, `-` and inner dots")
    if re.split("[./@]", setting)[0] == "hydra":
        raise ConfigError(f"{override} is no setting of a job; `cadence list` shows the files that name them all")


def _one_line(error: HydraException | OmegaConfBaseException, overrides: Sequence[str]) -> str:
    setting = str(getattr(error, "full_key", None) or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{setting} has no value; give it one, {setting}=..."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", "".join(lines[:1])):
        name, values = several.groups()
        return f"{name}={values} are several values; a list is {name}=[{values}], and `cadence sweep` runs each"
    if lines and lines[0].startswith(("Could not override '", "Could not delete from config. '")):
        return _no_setting(lines[0].split("'")[1], overrides)
    return f"{setting}: {lines[0]}" if setting else " ".join(lines[:2])


def _no_setting(setting: str, overrides: Sequence[str]) -> str:
    """Names the settings that there are beside it."""
    groups = [override for override in overrides if override.partition("=")[0] in (*GROUPS, CONFIG)]
    tree: Any = _tree(groups, complete=False)
    above: list[str] = []
    for part in setting.split(".")[:-1]:
        if not isinstance(tree.get(part), dict):
            break
        tree, above = tree[part], [*above, part]
    where = ".".join(above) or "a job"
    where += f"={tree['name']}" if where == "schedule" else ""
    return f"{setting} is no setting; those of {where} are {', '.join(sorted(tree))}"
