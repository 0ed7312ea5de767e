"""Finished runs, read from their folders, and cells of them."""

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa

from harness.metrics.done import check_files, is_done, read_done
from harness.metrics.manifest import BUSY, RunIdentity, identity_of, others_load
from harness.metrics.run_files import (
    finished_runs,
    load_evaluations,
    load_known_config,
    load_ledger,
    load_manifest,
    load_metrics,
    load_samples,
    load_timeline,
)
from harness.metrics.schemas import ComparedLine, reading
from harness.metrics.timeline import Timeline


@dataclass(frozen=True)
class Run:
    """The files of one run. config: config.yaml as nested mappings; metrics: one mapping per iteration."""

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    ledger: dict[str, Any]
    checked: bool = False  # DONE says what its files were, and they are that

    @cached_property
    def identity(self) -> RunIdentity:
        """Names of the run: experiment, cell, seed and the rest."""
        return identity_of(self.manifest)

    @cached_property
    def samples(self) -> pa.Table:
        """samples.parquet: a row per sample ever admitted."""
        return load_samples(self.path)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """eval.jsonl: what was found of each version that was evaluated, the initial one first."""
        return load_evaluations(self.path)

    @cached_property
    def timeline(self) -> Timeline:
        """Spans of the run, read from its trace."""
        return load_timeline(self.path)

    @property
    def pools(self) -> str:
        """Devices by the roles that share them, hosts left out: `rollout 1 | actor, actor_fwd, reference 1`."""
        roles: dict[str, list[str]] = {}
        devices: dict[str, set[str]] = {}
        for (role, _), place in self.timeline.placement.items():
            if place.pool.startswith("host "):
                continue
            if role not in roles.setdefault(place.pool, []):
                roles[place.pool].append(role)
            devices.setdefault(place.pool, set()).update(place.devices)
        return " | ".join(f"{', '.join(roles[pool])} {len(devices[pool])}" for pool in roles)


@dataclass(frozen=True)
class Cell:
    """One configuration and its runs, one per seed. name: of its folder; label: what tells it from the other cells."""

    name: str
    label: str
    runs: tuple[Run, ...]  # by seed

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of its runs, in their order."""
        return tuple(run.identity.seed for run in self.runs)

    def of_seeds(self, seeds: Container[int]) -> Self:
        """The cell with its runs of these seeds alone."""
        return replace(self, runs=tuple(run for run in self.runs if run.identity.seed in seeds))

    @property
    def others_load(self) -> float | None:
        """The largest share of cores that others kept busy in its runs; None where unknown, or times are simulated."""
        found = (others_load(run.manifest) for run in self.runs)
        return max((share for share in found if share is not None), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether others kept the machine too busy for its times to be judged."""
        return (self.others_load or 0.0) > BUSY

    @property
    def timelines(self) -> list[Timeline]:
        """Timelines of its runs, in their order."""
        return [run.timeline for run in self.runs]


def read_run(path: Path) -> Run:
    """The finished run in folder `path`. Raises FileNotFoundError if it is not finished; reading any of its files,
    then or later, raises DamagedFile for one that is not what a run writes."""
    if not is_done(path):
        raise FileNotFoundError(f"{path} has no finished run: there is no DONE in it")
    check_files(path)
    return replace(run_of(path), checked=read_done(path).files is not None)


def run_of(path: Path) -> Run:
    """The run whose files are all in folder `path`, called finished or not yet. Raises DamagedFile as `read_run`."""
    run = Run(path, load_manifest(path), load_known_config(path), load_metrics(path), load_ledger(path))
    with reading(path / "metrics.jsonl"):
        if not run.metrics:
            raise ValueError("it has no iteration")
        msgspec.convert(run.metrics, list[ComparedLine])
    return run


def runs_in(folder: Path) -> list[Run]:
    """Every finished run below `folder`: of a cell, or of experiments; or the one whose folder it is. By path."""
    return [read_run(path) for path in ([folder] if is_done(folder) else finished_runs(folder))]
