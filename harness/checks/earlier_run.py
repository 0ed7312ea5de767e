"""A run that a job builds on: that it is there, and of the same job. `checkpoint.begin_with` goes on from its
checkpoint, on other devices; `replay` does again what was recorded of it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.config import Backend, ConfigError, JobConfig
from harness.config.files import MIB, read_json
from harness.config.inputs import Input, inputs_of, refuse_changed
from harness.config.plugins import Plugin
from harness.config.readers import live_settings, naming_settings
from schedules import Schedule

SAME = ("iterations", "model", "task", "algorithm", "max_tokens", "schedule")
"""Settings that both have to have alike; of the schedule all but its split."""


class _Read(msgspec.Struct):
    """The part of a manifest on files, and on code of the user's; nothing where an earlier version wrote it."""

    inputs: list[Input] = []
    plugins: list[Plugin] = []


def run_to_begin_with(config: JobConfig, seed: int) -> Path | None:
    """The folder of the run of this seed; None where the job begins by itself."""
    return run_of_seed(config.checkpoint.begin_with, seed)


def check_begin_with(config: JobConfig, backend: Backend) -> None:
    """Raises ConfigError unless each seed has a run with checkpoints, not over, of this job and the same files."""
    cell = f"checkpoint.begin_with={config.checkpoint.begin_with}"
    for seed in config.seed_list:
        folder = run_to_begin_with(config, seed)
        assert folder is not None, "asked where there is one"
        lacks = f"{cell} has no run of seed {seed} that made checkpoints"
        refuse_missing(folder, ("config.yaml", "manifest.json"), lacks)
        if (folder / "DONE").exists():
            raise ConfigError(f"{cell}: seed {seed} is done there, and nothing is left to go on with; leave it out")
        if not any((folder / "checkpoints").glob("version-*")):
            raise ConfigError(f"{cell}: seed {seed} has no checkpoint; leave it out")
        there, here = (_same(one) for one in (config_of(folder), config))
        why = ": it goes on with the same model, task, algorithm, schedule and iterations"
        refuse_other(cell, there, here, why)
        made = manifest_of(folder).get("backend")
        if made != backend:
            raise ConfigError(
                f"{cell} is of a run with backend={made}, and this one has backend={backend}; set it alike"
            )
        _refuse_changed(folder, replace(config, backend=backend))


def _refuse_changed(folder: Path, config: JobConfig) -> None:
    """Raises ConfigError unless files, and code of the user's, that settings name are as this run read them."""
    from harness.config.compose import plugins_of  # with Hydra

    try:
        read = msgspec.convert(manifest_of(folder), _Read)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / 'manifest.json'} is damaged: {error}; name another run") from error
    since, fix = f"{folder} was begun", "put it back, or leave checkpoint.begin_with out"
    files = [one for one in inputs_of(config) if _has_to_agree(one.setting)]
    refuse_changed({one.setting: one.digest for one in read.inputs}, files, since, fix)
    code = {one.path: one.sha256 for one in read.plugins}
    for own in plugins_of(config):
        if own.path in code and _has_to_agree(own.setting):
            now = Input(own.setting, own.path, own.sha256)
            refuse_changed({own.setting: code[own.path]}, [now], since, fix)


def _has_to_agree(setting: str) -> bool:
    return setting.partition(".")[0] in SAME


def _same(job: JobConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in live_settings(job).items()
        if name.startswith("training.lora_")
        or (name.partition(".")[0] in SAME and not name.startswith("schedule.split"))
    }


_REPEAT_THEMSELVES = ("colocate_sync", "separated_sync", "one_step_off", "k_step_off", "delayed_update")
"""Built-in schedules under which order of arrival decides nothing."""
_BESIDE = ("replay", "cluster.on_lost_engine", "cluster.serve_membership", "cluster.oversubscribe")
"""Settings that both need not have alike, nor limits of time; nor what is simulated, where the run is real."""


def run_to_replay(config: JobConfig, seed: int) -> Path | None:
    """The folder of the recorded run of this seed; None where the job is no replay."""
    return run_of_seed(config.replay, seed)


def check_replay(config: JobConfig, schedule: Schedule, backend: Backend, gpu: bool) -> None:
    """Raises ConfigError for a job that cannot be a replay, and unless every seed has a finished run of this job."""
    told = f"replay={config.replay}"
    if why := why_not_replayed(config, schedule, backend, gpu):
        raise ConfigError(f"{told}: {why}")
    for seed in config.seed_list:
        folder = run_to_replay(config, seed)
        assert folder is not None, "asked where there is one"
        refuse_missing(folder, ("config.yaml", "manifest.json", "DONE"), f"{told} has no finished run of seed {seed}")
        _check_same(told, folder, config, backend)


def _check_same(told: str, folder: Path, config: JobConfig, backend: Backend) -> None:
    def same(one: JobConfig) -> dict[str, Any]:
        return {
            name: value
            for name, value in naming_settings(replace(one, backend=backend)).items()
            if name not in _BESIDE and not name.endswith("_timeout_s")
        }

    manifest = manifest_of(folder)
    if manifest.get("backend") != backend:
        raise ConfigError(f"{told} is of a run with backend={manifest.get('backend')}, and this one has {backend}")
    if "begun_with" in manifest:
        raise ConfigError(f"{told} began with a checkpoint of other devices, whose engines are not there; leave it out")
    there, here = (same(one) for one in (config_of(folder), config))
    refuse_other(told, there, here)


def why_not_replayed(config: JobConfig, schedule: Schedule, backend: Backend, gpu: bool) -> str | None:
    """The reason why a job cannot be replayed, and the fix; None: it can. gpu: it computes on some."""
    algorithm = config.algorithm
    real = backend == "real"
    refused = {
        f"under schedule={config.schedule.name} order of arrival decides nothing: the same command without replay "
        "gives the same bits": config.schedule.name in _REPEAT_THEMSELVES,
        f"schedule={config.schedule.name} generates batch by batch on the devices of training; only schedules whose "
        "engines stream can be replayed": schedule.colocated,
        f"schedule={config.schedule.name}: it decides by what took how long, which is not recorded": (
            schedule.follows_time
        ),
        f"engine={config.engine.name}: what it samples depends on which samples are beside; replay runs of "
        "engine=torch": real and config.engine.name != "torch",
        "on GPUs what an engine samples depends on which samples are beside (docs/equivalence.md); set "
        "cluster.kind=cpu": gpu,
        "engine.keep_cache=true: keys and values of older weights are not recorded; replay runs with false": (
            config.engine.keep_cache
        ),
        f"algorithm.advantage={algorithm.advantage}: which version of the critic a value is of is not recorded": (
            algorithm.has_critic
        ),
        f"algorithm.correction={algorithm.correction} and algorithm.advantage={algorithm.advantage} learn from what "
        "actor_fwd computes, and by which version is not recorded": algorithm.learns_from_actor_fwd,
        f"algorithm.advantage={algorithm.advantage}: by which versions greedy responses were sampled is not recorded": (
            algorithm.has_greedy_baseline
        ),
        f"engine.sample_limit_s={config.engine.sample_limit_s}: where it cut samples off is not recorded": (
            config.engine.sample_limit_s is not None
        ),
        f"algorithm.filter={algorithm.filter}: in which order groups were refused is not recorded": algorithm.filters,
        "task.on_failed_score=redeal: in which order groups were refused is not recorded": (
            config.task.on_failed_score == "redeal"
        ),
        f"schedule.order={schedule.order} and algorithm.kl_coef={algorithm.kl_coef}: in which micro-batches the "
        "reference scored is not recorded": schedule.order != "fifo" and algorithm.kl_coef > 0,
        f"task.buffer={config.task.buffer}: when it was told of rewards is not recorded": (
            config.task.buffer is not None
        ),
        f"task={config.task.name}: samples of several turns are not replayed": _several_turns(config, real),
        f"eval.every={config.eval.every}: set it to 0, a replay learns what the recorded run did": (
            config.eval.period > 0
        ),
        f"checkpoint.every={config.checkpoint.every}: set it to 0, a replay is begun again from its beginning": (
            config.checkpoint.every > 0 or config.checkpoint.begin_with is not None
        ),
        "cluster.on_lost_engine=go_on: set it to end, others cannot do what was recorded of an engine": (
            config.cluster.on_lost_engine == "go_on"
        ),
    }
    return next((why for why, is_so in refused.items() if is_so), None)


def _several_turns(config: JobConfig, real: bool) -> bool:
    from harness.tasks import environment_of, make_task

    return environment_of(make_task(config)) is not None if real else config.cost.turns is not None


def run_of_seed(cell: str | None, seed: int) -> Path | None:
    """Folder of a run in that of its cell; None where none is named."""
    return None if cell is None else Path(cell) / f"seed={seed}"


def refuse_missing(folder: Path, files: Iterable[str], lacks: str) -> None:
    """Raises ConfigError, which begins with `lacks`, unless these files are in the run's folder."""
    if all((folder / name).is_file() for name in files):
        return
    fix = "name the folder of a cell, as results/bench/<cell>"
    if (folder.parent / "config.yaml").is_file():
        fix = f"it is the folder of one seed: name {folder.parent.parent}"
    raise ConfigError(f"{lacks}; {fix}, or change seeds")


def config_of(folder: Path) -> JobConfig:
    """Settings of a run. Raises ConfigError, which names the file, where they are none of a job."""
    from harness.config.compose import read_job  # with Hydra, which other checks need not load

    return read_job(folder / "config.yaml")


def manifest_of(folder: Path) -> dict[str, Any]:
    """Contents of manifest.json. Raises ConfigError, which names the file, where it is none."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path, 4 * MIB)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; name another run") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object; name another run")
    return manifest


def refuse_other(told: str, there: Mapping[str, Any], here: Mapping[str, Any], why: str = "") -> None:
    """Raises ConfigError, which begins with `told`, where a setting of the two is not the same. why: it has to be."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            one, other = (f"{name}={tree[name]}" if name in tree else f"no {name}" for tree in (there, here))
            raise ConfigError(f"{told} has {one}, and this job {other}{why}; make them agree, or leave it out")
