"""A small finished run, as files and in MLflow, and what of it is in MLflow."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.metrics.manifest import RunIdentity
from harness.metrics.run_files import RunDirectory, mirrored_files
from tests.support.played_runs import MANIFEST

CONFIG = {"schedule": {"name": "fully_async", "eta": 0.5}}
ITERATIONS = 5
STARTED_AT = "2026-01-02T03:04:05+00:00"
_OF_THE_EXPERIMENT = ("mlflow.note.content", "mlflow.user")


def manifest_of(identity: RunIdentity) -> dict[str, Any]:
    """What the mirror reads of a manifest."""
    return {
        **MANIFEST,
        **asdict(identity),
        "started_at": STARTED_AT,
        "command": ["__main__.py", "bench", "schedule=fully_async", "seeds=3", "force=true"],
        "git": {"commit": "abc123", "dirty": False},
    }


def finished_run(
    results: Path,
    identity: RunIdentity,
    *,
    mirror: bool = True,
    lose_at: int | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Path:
    """Write a run's folder, and mirror it meanwhile; the mirror fails before iteration `lose_at`. Returns the
    folder."""
    from harness.metrics.mlflow_mirror import Tracker

    manifest = manifest_of(identity)

    def lose() -> None:
        raise OSError("gone")

    with RunDirectory(results, identity.experiment, identity.cell, identity.seed) as folder:
        folder.write_config(CONFIG)
        folder.write_manifest(manifest)
        lost = on_lost or folder.mirror_is_incomplete
        tracker = Tracker(results, identity, CONFIG, manifest, on_lost=lost, flush_seconds=3600.0) if mirror else None
        for iteration in range(ITERATIONS):
            metrics = {"iteration": iteration, "samples": 8 * iteration, "seconds": 2.0 * iteration}
            metrics["reward/mean"], metrics["train/skipped_steps"] = iteration / 4, 2.0
            folder.append_metrics(metrics)
            if tracker is not None:
                if iteration == lose_at:
                    tracker._attempt(lose)
                tracker.log(metrics)
                tracker.flush()
        sample = {"time": 1767323050.5, "system/cpu_utilization_percentage": 50.0, "system/disk_usage_percentage": 9.0}
        folder.append_system(sample)
        folder.write_summary({"throughput/samples_per_s": 4.0})
        if tracker is not None:
            tracker.log_system(sample)
            tracker.log_summary(folder.path)
            tracker.log_faults(folder.path)
            tracker.finish(artifacts=mirrored_files(folder.path))
        folder.finish()
    return folder.path


def mirrored(results: Path, experiment: str) -> dict[str, Any]:
    """Every run of an experiment, by its name: all that a reader of MLflow sees, but for dates and ids."""
    from harness.metrics.mlflow_mirror import MlflowStore

    client = MlflowStore(results).client
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id])
    seen = {
        run.info.run_name: {
            "status": run.info.status,
            "params": run.data.params,
            "tags": {name: tag for name, tag in run.data.tags.items() if name not in _OF_THE_EXPERIMENT},
            "points": points(client, run.info.run_id),
            "artifacts": sorted(file.path for file in client.list_artifacts(run.info.run_id)),
        }
        for run in runs
    }
    assert len(seen) == len(runs), "a run is there twice"
    return seen


def points(client: Any, run_id: str) -> dict[str, dict[int, float]]:
    """Every metric's values by step."""
    found = {}
    for name in client.get_run(run_id).data.metrics:
        history = client.get_metric_history(run_id, name)
        found[name] = {point.step: point.value for point in sorted(history, key=lambda point: point.step)}
        assert len(found[name]) == len(history), f"a step of {name} is there twice"
    return found
