"""The MLflow mirror, against a real SQLite store."""

import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.config import ConfigError
from harness.driver.loggers import LoggedRun, MlflowLogger
from harness.metrics.done import INCOMPLETE
from harness.metrics.formatting import OWN
from harness.metrics.manifest import RunIdentity
from harness.metrics.run_files import RunDirectory
from tests.support.mirrored_run import CONFIG, ITERATIONS, STARTED_AT, finished_run, manifest_of, mirrored, points
from tests.support.project import ROOT

# mlflow's own dependencies (SQLAlchemy, pydantic) deprecate things that it still uses.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One database for all tests (making its tables takes a second); each test has its own experiment."""
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield tmp_path_factory.mktemp("results")
    patch.undo()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


def refuse_loss(why: str) -> None:
    raise AssertionError(f"the mirror was lost: {why}")


def identity_in(experiment: str, *, seed: int = 0) -> RunIdentity:
    return RunIdentity(experiment, "fully_async", seed, "fully_async", "tiny", "torch", "virtual")


def track(store: Path, experiment: str, *, seed: int = 0, started_at: str = STARTED_AT, **options: Any) -> Any:
    from harness.metrics.mlflow_mirror import Tracker

    identity = identity_in(experiment, seed=seed)
    manifest = manifest_of(identity) | {"started_at": started_at}
    options = {"flush_seconds": 3600.0, "on_lost": refuse_loss} | options
    return Tracker(store, identity, CONFIG, manifest, **options)


def runs_of(tracker: Any, experiment: str) -> Iterator[Any]:
    client = tracker._store.client
    return iter(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def test_a_run_is_mirrored_with_its_tags_params_metrics_and_artifacts(store: Path, name: str, tmp_path: Path) -> None:
    picture = tmp_path / "reward.png"
    picture.write_bytes(b"png")
    tracker = track(store, name)
    tracker.log({"iteration": 1, "samples": 8, "reward/mean": 0.5, "policy/kl_ref": math.nan})
    tracker.log({"iteration": 2, "samples": 16, "reward/mean": 0.75})
    tracker.log_system({"time": 1.5, "system/cpu_utilization_percentage": 50.0})
    tracker.finish(artifacts=[picture])
    client = tracker._store.client
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"schedule.name": "fully_async", "schedule.eta": "0.5"}
    wanted = {"schedule": "fully_async", "model": "tiny", "engine": "torch", "backend": "virtual", "commit": "abc123"}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.metrics == {"samples": 16.0, "reward/mean": 0.75, "system/cpu_utilization_percentage": 50.0}
    assert points(client, tracker.run_id)["reward/mean"] == {1: 0.5, 2: 0.75}
    stored = store / "mlflow-artifacts" / tracker.run_id / "artifacts" / "reward.png"
    assert stored.read_bytes() == b"png"


def test_what_earlier_attempts_measured_is_mirrored_little_by_little(store: Path, name: str) -> None:
    read = 0

    def before() -> Iterator[dict[str, int | float]]:
        nonlocal read
        for iteration in range(100):
            read += 1
            if iteration == 50 and not whole:
                fail.set()
                assert tracker._closing.wait(60)
            yield {"iteration": iteration, "reward/mean": 1.0}

    for whole in (True, False):
        read, fail = 0, threading.Event()
        tracker = track(store, name, before=before())
        assert whole or fail.wait(60)
        tracker.log({"iteration": 100, "reward/mean": 0.5})
        tracker.finish("FINISHED" if whole else "FAILED")
        steps = set(points(tracker._store.client, tracker.run_id)["reward/mean"])
        assert steps == set(range(101)) if whole else steps == {*range(60), 100}
        assert read == (100 if whole else 60)


def test_the_description_makes_the_run_again(store: Path, name: str) -> None:
    with track(store, name, seed=3) as tracker:
        note = tracker._store.client.get_run(tracker.run_id).data.tags["mlflow.note.content"]
    assert f"`{name}/fully_async/seed=3/`" in note
    assert "\n    git checkout abc123\n" in note
    assert note.endswith("\n    python -m harness bench schedule=fully_async 'seeds=[3]' force=true")


def test_an_experiment_opens_on_its_runs_of_which_none_is_below_another(store: Path, name: str) -> None:
    for seed in (0, 1):
        with track(store, name, seed=seed) as tracker:
            pass
    runs = list(runs_of(tracker, name))
    assert {run.data.tags["seed"] for run in runs} == {"0", "1"} and len(runs) == 2
    assert {run.data.tags["mlflow.runColor"] for run in runs} <= {*OWN.values()}, "as in pages and pictures"
    assert not any("mlflow.parentRunId" in run.data.tags for run in runs)
    found = tracker._store.client.get_experiment_by_name(name)
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    sections = [one["name"] for one in json.loads(found.tags["mlflow.sharedViewState.cadence"])["compareRunSections"]]
    assert sections[:5] == ["reward", "eval", "throughput", "staleness", "idle"] and sections[-1] == "System metrics"
    assert "a run for each cell and seed" in found.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_status_says_how_it_ended(store: Path, name: str, error: type[BaseException] | None, status: str) -> None:
    tracker = track(store, name)
    try:
        with tracker:
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert tracker._store.client.get_run(tracker.run_id).info.status == status
    assert not tracker._thread.is_alive()


def test_what_came_late_or_stood_still_is_mended_in_the_store(store: Path, name: str) -> None:
    dead, other = track(store, name), track(store, name, seed=1)
    with track(store, name) as alive:
        assert alive._store.client.get_run(dead.run_id).info.status == "KILLED"
        assert alive._store.client.get_run(other.run_id).info.status == "RUNNING"
    other.finish()
    dead._closing.set()
    with track(store, name) as tracker:
        for iteration in range(60):
            tracker.log({"iteration": iteration} | {f"idle/role{i}": float(iteration) for i in range(20)})
    assert len(tracker._store.client.get_metric_history(tracker.run_id, "idle/role7")) == 60
    with track(store, name) as tracker:
        experiment = tracker._store.client.get_experiment_by_name(name)
    tracker._store.client.delete_experiment(experiment.experiment_id)
    with track(store, name) as again:
        found = again._store.client.get_experiment_by_name(name)
    assert (found.experiment_id, found.lifecycle_stage) == (experiment.experiment_id, "active")


def test_the_thread_writes_without_being_asked(store: Path, name: str) -> None:
    tracker = track(store, name, flush_seconds=0.001)
    written = threading.Event()
    log_batch = tracker._store.client.log_batch

    def note(*args: Any, **kwargs: Any) -> None:
        log_batch(*args, **kwargs)
        written.set()

    tracker._store.client.log_batch = note
    tracker.log({"iteration": 1, "reward/mean": 0.5})
    assert written.wait(30)
    assert tracker._store.client.get_run(tracker.run_id).data.metrics == {"reward/mean": 0.5}
    tracker.finish()


def test_a_store_that_fails_is_reported_once_and_ends_no_run(store: Path, name: str) -> None:
    lost: list[str] = []
    tracker = track(store, name, flush_seconds=0.001, on_lost=lost.append)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full\nand more about it")

    tracker._store.client.log_batch = fail
    tracker.log({"iteration": 1, "reward/mean": 0.5})
    tracker._thread.join(30)
    for iteration in (2, 3):
        tracker.log({"iteration": iteration, "reward/mean": 0.5})
        tracker.flush()
    tracker.finish()
    assert lost == ["disk full"] and tracker._pending == []


def test_an_error_in_the_code_is_no_lost_mirror(store: Path, name: str) -> None:
    tracker = track(store, name)
    tracker._store.client.log_batch = None
    tracker.log({"iteration": 1, "reward/mean": 0.5})
    with pytest.raises(TypeError):
        tracker.flush()
    tracker._closing.set()


def test_a_server_that_was_never_there_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard service: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lost: list[str] = []
    with track(tmp_path, "bench", on_lost=lost.append) as tracker:
        tracker.log({"iteration": 1, "reward/mean": 0.5})
    (why,) = lost
    assert re.fullmatch(r"API request to http://127\.0\.0\.1:9/\S* failed", why)


def test_nobody_is_told_the_password_of_the_tracking_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.cli.look import mlflow_sync, ui

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:hunter2@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said = io.StringIO()
    console, identity = Console(file=said, width=1000), identity_in("bench")
    incomplete = finished_run(tmp_path, identity) / INCOMPLETE
    nowhere = RunDirectory(tmp_path, "bench", "another", 0)
    MlflowLogger(LoggedRun(nowhere, tmp_path, identity, CONFIG, manifest_of(identity), console.print))
    with pytest.raises(ConfigError) as refused:
        mlflow_sync([], tmp_path, console)
    assert ui([], tmp_path, console) == 0
    for told in (incomplete.read_text(), str(refused.value), *said.getvalue().splitlines()):
        assert "hunter2" not in told and "http://ada:***@127.0.0.1:9" in told


def test_a_lost_mirror_is_said_where_no_folder_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    identity = identity_in("bench")
    folder = RunDirectory(tmp_path, "bench", identity.cell, identity.seed)  # never made: nothing can be written there
    said = io.StringIO()
    MlflowLogger(LoggedRun(folder, tmp_path, identity, CONFIG, manifest_of(identity), said.write))
    assert re.search(r"MLflow mirror incomplete: .*; its folder does not say so: .*No such file", said.getvalue())


def synced(results: Path, experiment: str) -> list[Any]:
    from harness.metrics.mlflow_mirror import sync

    return list(sync(results, results / experiment))


def test_a_run_that_mlflow_never_saw_is_made_from_its_folder(store: Path, name: str) -> None:
    lost: list[str] = []
    live = finished_run(store, identity_in(name), on_lost=lost.append)
    finished_run(store, identity_in(f"{name}-again"), mirror=False)
    assert not lost and not (live / INCOMPLETE).exists()
    (filled,) = synced(store, f"{name}-again")
    assert filled.created and filled.files == 5 and filled.metrics == ITERATIONS * 4 + 3
    expected, found = mirrored(store, name), mirrored(store, f"{name}-again")
    assert found == expected
    (run,) = found.values()
    assert run["tags"]["warning/train/skipped_steps"].startswith("2 optimizer steps were skipped")
    unfinished = store / f"{name}-again" / identity_in(name).cell / "seed=1"
    shutil.copytree(unfinished.parent / "seed=0", unfinished)
    (unfinished / "DONE").unlink()
    assert [filled.changed for filled in synced(store, f"{name}-again")] == [False], (
        "an unfinished one is not looked at"
    )
    assert mirrored(store, f"{name}-again") == expected


def test_a_run_whose_mirror_was_lost_half_way_is_filled_in(store: Path, name: str) -> None:
    finished_run(store, identity_in(name))
    path = finished_run(store, identity_in(f"{name}-half"), lose_at=2)
    assert (path / INCOMPLETE).read_text() == "gone\n"
    (before,) = mirrored(store, f"{name}-half").values()
    assert before["status"] == "RUNNING" and before["points"]["reward/mean"] == {0: 0.0, 1: 0.25}
    (filled,) = synced(store, f"{name}-half")
    assert filled.changed and not filled.created and not (path / INCOMPLETE).exists()
    assert mirrored(store, f"{name}-half") == mirrored(store, name)
    assert not synced(store, f"{name}-half")[0].changed


def test_sync_ends_other_attempts_that_still_count_as_running(store: Path, name: str) -> None:
    dead = track(store, name, started_at="2026-01-01T00:00:00+00:00")
    finished_run(store, identity_in(name), mirror=False)
    (filled,) = synced(store, name)
    assert filled.created
    assert dead._store.client.get_run(dead.run_id).info.status == "KILLED"
    dead._closing.set()


_FIRST_RUN = """
import sys
from pathlib import Path
from tests.support.mirrored_run import manifest_of
from harness.metrics.manifest import RunIdentity
from harness.metrics.mlflow_mirror import Tracker
identity = RunIdentity("bench", "cell", int(sys.argv[2]), "fully_async", "tiny", "torch", "real")
with Tracker(Path(sys.argv[1]), identity, {"eta": 0}, manifest_of(identity), on_lost=sys.exit) as tracker:
    tracker.log({"iteration": 1, "reward/mean": 1.0})
"""


@pytest.mark.slow
def test_two_first_runs_at_once_share_the_experiment_and_print_nothing(tmp_path: Path) -> None:
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _FIRST_RUN, str(tmp_path), seed],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=here,
        )
        for seed in ("0", "1")
    ]
    printed = [process.communicate(timeout=120)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert printed == ["", ""]
    with track(tmp_path, "bench", seed=2) as tracker:
        runs = list(runs_of(tracker, "bench"))
    assert len(runs) == 3


def test_one_experiment_can_catch_up_alone(store: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.cli.look import mlflow_sync

    with pytest.raises(ConfigError, match="nowhere is not there; run `cadence bench` first$"):
        mlflow_sync(["experiment=nowhere"], store, Console())
    from harness.cli.look import mlflow_sync

    for experiment in (name, f"{name}-other"):
        finished_run(store, identity_in(experiment), mirror=False)
    mlflow_sync([f"experiment={name}"], store, Console(width=200))
    line, last = capsys.readouterr().out.splitlines()
    assert line.endswith(f"{name}/fully_async/seed=0 made: {ITERATIONS * 4 + 3} metrics, 5 files")
    assert last.startswith("1 finished runs, 1 brought up to date in sqlite:///")


def test_ui_prints_a_link_to_runs_and_charts_of_each_experiment_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cli.look import ui

    for experiment, started_at in (("newer", "2026-01-02T00:00:00+00:00"), ("older", "2026-01-01T00:00:00+00:00")):
        with track(tmp_path, experiment, started_at=started_at) as tracker:
            pass
    served: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: served.append(command))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ui([f"port={port}"], tmp_path, Console(width=200))
    page = f"http://127.0.0.1:{port}/#/experiments"
    ids = {name: tracker._store.client.get_experiment_by_name(name).experiment_id for name in ("newer", "older")}
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  {name}: {page}/{ids[name]}/runs?compareRunsMode=CHART&workflowType=machine_learning"
        "&viewStateShareKey=cadence"
        for name in ("newer", "older")
    ]
    assert served[0][-1] == f"sqlite:///{tmp_path / 'mlflow.db'}"
