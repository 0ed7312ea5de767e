"""A job that begins with a checkpoint of another run (`checkpoint.begin_with`): of the same job, on other devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.checks.earlier_run import config_of, manifest_of, refuse_missing, refuse_other, run_of_seed
from harness.config import Backend, ConfigError, JobConfig
from harness.config.inputs import Input, inputs_of, refuse_changed
from harness.config.job import flatten
from harness.config.plugins import Plugin

SAME = ("iterations", "model", "task", "algorithm", "max_tokens", "schedule")
"""Settings that both have to have alike; of the schedule all but its split."""


class _Read(msgspec.Struct):
    """What a manifest says of files, and of code of the user's; nothing where an earlier version wrote it."""

    inputs: list[Input] = []
    plugins: list[Plugin] = []


def run_to_begin_with(config: JobConfig, seed: int) -> Path | None:
    """The folder of the run of this seed; None where the job begins by itself."""
    return run_of_seed(config.checkpoint.begin_with, seed)


def check_begin_with(config: JobConfig, backend: Backend) -> None:
    """Raises ConfigError unless for every seed a run is there that is not over, has checkpoints, and is of this job and
    of the same files."""
    from harness.config.compose import plain  # with Hydra, which other checks need not load

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
        there, here = (_same(plain(one)) for one in (config_of(folder), config))
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


def _same(tree: dict[str, Any]) -> dict[str, Any]:
    flat = flatten({name: tree[name] for name in SAME if name in tree})
    return {name: value for name, value in flat.items() if not name.startswith("schedule.split")}
