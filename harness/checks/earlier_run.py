"""A run that a job builds on, named by `checkpoint.begin_with` or `replay`: that it is there, and of the same job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.config import ConfigError, JobConfig, job_config
from harness.config.files import MIB, read_json


def run_of_seed(cell: str | None, seed: int) -> Path | None:
    """Its folder in that of a cell; None where none is named."""
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
    """Its settings. Raises ConfigError, which names the file, where they are none of a job."""
    from harness.config.compose import read_settings  # with Hydra, which other checks need not load

    path = folder / "config.yaml"
    settings = read_settings(path)
    try:
        return job_config(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def manifest_of(folder: Path) -> dict[str, Any]:
    """What manifest.json says. Raises ConfigError, which names the file, where it is none."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path, 4 * MIB)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; name another run") from error
    if not isinstance(manifest, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object; name another run")
    return manifest


def refuse_other(told: str, there: Mapping[str, Any], here: Mapping[str, Any], why: str = "") -> None:
    """Raises ConfigError, which begins with `told`, where a setting of the two, by its path, is not the same. why: it
    has to be."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            one, other = (f"{name}={tree[name]}" if name in tree else f"no {name}" for tree in (there, here))
            raise ConfigError(f"{told} has {one}, and this job {other}{why}; make them agree, or leave it out")
