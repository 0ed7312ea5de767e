"""Catching up: what MLflow lacks of finished runs is filled in from their folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.config.flat import flatten
from harness.metrics.manifest import identity_of
from harness.metrics.mlflow_store import (
    COMPLETE,
    STARTED_AT,
    Metric,
    Run,
    Store,
    iteration_metrics,
    milliseconds,
    run_tags,
    system_metrics,
)
from harness.metrics.run_files import (
    INCOMPLETE,
    finished_runs,
    load_config,
    load_manifest,
    load_metrics,
    load_system,
    mirrored_files,
)


@dataclass(frozen=True)
class Filled:
    """What was done about one run's folder."""

    path: Path
    created: bool = False
    metrics: int = 0
    files: int = 0

    @property
    def changed(self) -> bool:
        return self.created or self.metrics > 0 or self.files > 0


def sync(results: Path, folder: Path) -> Iterator[Filled]:
    """Bring MLflow up to date with every finished run below `folder`, which is `results` or in it; a `Filled` for each.

    Doing it again changes nothing. Raises MlflowException where MLflow cannot be reached.
    """
    store = Store(results)
    for path in finished_runs(folder):
        yield sync_run(store, path)


def sync_run(store: Store, path: Path) -> Filled:
    """Make or complete the child run of the finished run in folder `path`."""
    manifest, config = load_manifest(path), load_config(path)
    identity = identity_of(manifest)
    ours = [run for run in store.children(identity) if run.data.tags.get(STARTED_AT) == manifest[STARTED_AT]]
    if ours and COMPLETE in ours[0].data.tags:
        (path / INCOMPLETE).unlink(missing_ok=True)
        return Filled(path)
    run_id = ours[0].info.run_id if ours else store.create(identity, config, manifest)
    run = store.client.get_run(run_id)
    for name, value in run_tags(identity, manifest).items() - run.data.tags.items():
        store.client.set_tag(run_id, name, value)
    store.log_params(run_id, {name: its for name, its in flatten(config).items() if name not in run.data.params})
    metrics = _lacking(store, run, _metrics_of(path))
    store.log_metrics(run_id, metrics)
    there = {file.path: file.file_size for file in store.client.list_artifacts(run_id)}
    files = [file for file in mirrored_files(path) if there.get(file.name) != file.stat().st_size]
    store.log_files(run_id, files)
    store.client.set_tag(run_id, COMPLETE, "true")
    store.client.set_terminated(run_id, "FINISHED", _done_at(path))
    store.bury(identity, but=run_id)
    (path / INCOMPLETE).unlink(missing_ok=True)
    return Filled(path, not ours, len(metrics), len(files))


def _metrics_of(path: Path) -> list[Metric]:
    """All metrics of the run's files. Iterations are dated as the run's clock says, which on a simulated run is no time
    of day: so never after the end."""
    began, ended = milliseconds(load_manifest(path)["started_at"]), _done_at(path)
    found: list[Metric] = []
    for metrics in load_metrics(path):
        found += iteration_metrics(metrics, min(ended, began + int(metrics["seconds"] * 1000)))
    for step, sample in enumerate(load_system(path)):
        found += system_metrics(sample, step)
    return found


def _lacking(store: Store, run: Run, metrics: Iterable[Metric]) -> list[Metric]:
    """Those whose steps MLflow does not have."""
    have = {
        name: {point.step for point in store.client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    return [metric for metric in metrics if metric.step not in have.get(metric.key, ())]


def _done_at(path: Path) -> int:
    return milliseconds((path / "DONE").read_text(encoding="utf-8").strip())
