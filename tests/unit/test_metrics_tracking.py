"""The MLflow mirror, against a real SQLite store."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.metrics.manifest import RunIdentity

# mlflow's own dependencies (SQLAlchemy, pydantic) deprecate things that it still uses.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests (making its tables takes a second); each test has its own experiment."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


def track(store: Path, experiment: str, *, cell: str = "fully_async", seed: int = 0, **options: Any) -> Any:
    from harness.metrics.tracking import Tracker

    identity = RunIdentity(experiment, cell, seed, "fully_async", "tiny", "torch", "virtual")
    options = {"flush_seconds": 3600.0} | options
    return Tracker(store, identity, {"schedule": {"name": "fully_async", "eta": 0.5}}, "abc123", **options)


def runs_of(tracker: Any, experiment: str) -> Iterator[Any]:
    client = tracker._client
    return iter(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def test_a_run_is_mirrored_with_its_tags_params_metrics_and_artifacts(store: Path, name: str, tmp_path: Path) -> None:
    picture = tmp_path / "reward.png"
    picture.write_bytes(b"png")
    tracker = track(store, name)
    tracker.log({"iteration": 1, "samples": 8, "reward/mean": 0.5, "policy/kl_ref": math.nan})
    tracker.log({"iteration": 2, "samples": 16, "reward/mean": 0.75})
    tracker.finish(artifacts=[picture])
    client = tracker._client
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"schedule.name": "fully_async", "schedule.eta": "0.5"}
    wanted = {"schedule": "fully_async", "model": "tiny", "engine": "torch", "backend": "virtual", "commit": "abc123"}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.metrics == {"samples": 16.0, "reward/mean": 0.75}
    history = client.get_metric_history(tracker.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.75)]
    stored = store / "mlflow-artifacts" / tracker.run_id / "artifacts" / "reward.png"
    assert stored.read_bytes() == b"png"


def test_runs_of_one_experiment_share_one_parent(store: Path, name: str) -> None:
    for seed in (0, 1):
        with track(store, name, seed=seed) as tracker:
            pass
    parents = [run for run in runs_of(tracker, name) if "cadence.parent" in run.data.tags]
    children = [run for run in runs_of(tracker, name) if "cadence.parent" not in run.data.tags]
    assert len(parents) == 1 and len(children) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parents[0].info.run_id}
    assert {run.data.tags["seed"] for run in children} == {"0", "1"}


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_status_says_how_the_run_ended(
    store: Path, name: str, error: type[BaseException] | None, status: str
) -> None:
    tracker = track(store, name)
    try:
        with tracker:
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert tracker._client.get_run(tracker.run_id).info.status == status
    assert not tracker._thread.is_alive()


def test_an_earlier_try_that_died_silently_is_marked_killed(store: Path, name: str) -> None:
    dead, other = track(store, name), track(store, name, seed=1)
    with track(store, name) as alive:
        assert alive._client.get_run(dead.run_id).info.status == "KILLED"
        assert alive._client.get_run(other.run_id).info.status == "RUNNING"
    other.finish()
    dead._closing.set()


def test_the_thread_writes_without_being_asked(store: Path, name: str) -> None:
    tracker = track(store, name, flush_seconds=0.001)
    written = threading.Event()
    log_batch = tracker._client.log_batch

    def note(*args: Any, **kwargs: Any) -> None:
        log_batch(*args, **kwargs)
        written.set()

    tracker._client.log_batch = note
    tracker.log({"iteration": 1, "reward/mean": 0.5})
    assert written.wait(30)
    assert tracker._client.get_run(tracker.run_id).data.metrics == {"reward/mean": 0.5}
    tracker.finish()


def test_a_failure_of_the_thread_surfaces_at_the_next_call(store: Path, name: str) -> None:
    tracker = track(store, name, flush_seconds=0.001)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    tracker._client.log_batch = fail
    tracker.log({"iteration": 1, "reward/mean": 0.5})
    tracker._thread.join(30)
    with pytest.raises(RuntimeError, match="the MLflow mirror failed: disk full"):
        tracker.log({"iteration": 2, "reward/mean": 0.5})
    with pytest.raises(RuntimeError, match="disk full"):
        tracker.finish()
    assert tracker._client.get_run(tracker.run_id).info.status == "FAILED"


def test_more_metrics_than_one_batch_holds_are_all_written(store: Path, name: str) -> None:
    with track(store, name) as tracker:
        for iteration in range(60):
            tracker.log({"iteration": iteration} | {f"idle/role{i}": float(iteration) for i in range(20)})
    assert len(tracker._client.get_metric_history(tracker.run_id, "idle/role7")) == 60


def test_a_deleted_experiment_is_brought_back(store: Path, name: str) -> None:
    with track(store, name) as tracker:
        experiment = tracker._client.get_experiment_by_name(name)
    tracker._client.delete_experiment(experiment.experiment_id)
    with track(store, name) as again:
        found = again._client.get_experiment_by_name(name)
    assert (found.experiment_id, found.lifecycle_stage) == (experiment.experiment_id, "active")


_FIRST_RUN = """
import sys
from pathlib import Path
from harness.metrics.manifest import RunIdentity
from harness.metrics.tracking import Tracker
identity = RunIdentity("bench", "cell", int(sys.argv[2]), "fully_async", "tiny", "torch", "real")
with Tracker(Path(sys.argv[1]), identity, {"eta": 0}, None) as tracker:
    tracker.log({"iteration": 1, "reward/mean": 1.0})
"""


@pytest.mark.slow
def test_two_first_runs_at_once_share_the_experiment_and_print_nothing(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _FIRST_RUN, str(tmp_path), seed], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for seed in ("0", "1")
    ]
    printed = [process.communicate(timeout=120)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert printed == ["", ""]
    with track(tmp_path, "bench", seed=2) as tracker:
        runs = list(runs_of(tracker, "bench"))
    assert len(runs) == 4  # one parent, three children
