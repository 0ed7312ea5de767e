"""A job that begins with a checkpoint of another run (`checkpoint.begin_with`): of the same job, on other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.config import Backend, ConfigError, JobConfig
from harness.config.checks.earlier_run import config_of, manifest_of, refuse_missing, refuse_other, run_of_seed
from harness.config.job import flatten

SAME = ("iterations", "model", "task", "algorithm", "max_tokens", "schedule")
"""Settings that both have to have alike; of the schedule all but its split."""


def run_to_begin_with(config: JobConfig, seed: int) -> Path | None:
    """The folder of the run of this seed; None where the job begins by itself."""
    return run_of_seed(config.checkpoint.begin_with, seed)


def check_begin_with(config: JobConfig, backend: Backend) -> None:
    """Raises ConfigError unless for every seed a run is there that is not over, has checkpoints, and is of this job."""
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


def _same(tree: dict[str, Any]) -> dict[str, Any]:
    flat = flatten({name: tree[name] for name in SAME if name in tree})
    return {name: value for name, value in flat.items() if not name.startswith("schedule.split")}
