"""The mirror of a results folder in MLflow: an experiment, and in it a run for each cell and seed.

The files are the truth. A `Tracker` mirrors a run while it goes on, and a mirror that fails ends no run; `sync` brings
MLflow up to date from the files. Import this module only where it is used: mlflow takes seconds to load."""
# ruff: noqa: E402

import json
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

# Read when mlflow is imported, or when it calls a server; what the user has set stays. With its own defaults, a server
# that is gone is waited for during four minutes by each call.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}.items():
    os.environ.setdefault(_name, _value)

from mlflow.entities import Metric, Param, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_RUN_NOTE, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE
from sqlalchemy.exc import SQLAlchemyError

from harness.config.job import flatten
from harness.metrics.atomic_files import Lock
from harness.metrics.definitions import DEFINITIONS, logged
from harness.metrics.done import INCOMPLETE, check_files, read_done
from harness.metrics.formatting import of_schedules, redacted
from harness.metrics.manifest import RunIdentity, identity_of
from harness.metrics.run_files import (
    config_as_written,
    finished_runs,
    load_faults,
    load_manifest,
    load_metrics,
    load_summary,
    load_system,
    mirrored_files,
)

_LOCKED_S = 120.0  # by another process, which makes an experiment in a second or two
_ITERATIONS = 20  # of an earlier attempt, read at once
_BATCH = 1000  # MLflow's limit of metrics per log_batch
_PARAM_BATCH = 100  # and of params
VIEW = "cadence"  # key of the view by which an experiment's charts are laid out
_FIRST = ("reward", "eval", "throughput", "staleness", "idle")  # sections that are unfolded; MLflow's order is A to Z


def _view() -> str:
    """Sections of charts in the order in which they matter, as MLflow keeps views that are shared; it fills them."""
    others = sorted(
        {metric.name.partition("/")[0] for metric in DEFINITIONS if "/" in metric.name} - {*_FIRST, "queue"}
    )
    sections = [
        {"uuid": name, "name": name, "display": name in _FIRST, "isReordered": True}
        for name in (*_FIRST, *others, "summary", "Model metrics", "System metrics")
    ]
    return json.dumps({"compareRunCharts": [], "compareRunSections": sections, "isAccordionReordered": True})


_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # else its page is for traces
    f"mlflow.sharedViewState.{VIEW}": _view(),
}
STARTED_AT = "started_at"  # tag: which attempt at a cell and seed it is, as in its manifest.json
WARNING = "warning/"  # beginning of tags of what went wrong in a run
SUMMARY = "summary"
COMPLETE = "cadence.mirrored"  # tag: set last, when everything that the run's folder holds is in MLflow

for _chatty in ("mlflow", "alembic", "urllib3.connectionpool"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # what it says, the mirror says in a line


def tracking_uri(results: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set, else a database in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


class MlflowStore:
    """MLflow's side of a results folder. Every call may raise MlflowException: a server may be gone."""

    def __init__(self, results: Path) -> None:
        self.results = results.resolve()
        self.uri = tracking_uri(results)
        self.results.mkdir(parents=True, exist_ok=True)
        with self._lock():
            try:
                self.client = MlflowClient(tracking_uri=self.uri)
            except SQLAlchemyError as error:  # of a database that cannot be opened
                raise MlflowException(first_line(error)) from error

    def newest_experiments(self) -> dict[str, str]:
        """Ids of the experiments that have runs, by name, that with the newest run first."""
        every = {experiment.experiment_id: experiment.name for experiment in self.client.search_experiments()}
        newest = {
            run.info.experiment_id: run.info.start_time
            for id_ in every
            for run in self.client.search_runs([id_], max_results=1, order_by=["attributes.start_time DESC"])
        }
        return {every[id_]: id_ for id_ in sorted(newest, key=newest.__getitem__, reverse=True)}

    def create(self, identity: RunIdentity, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
        """A run, RUNNING since the manifest's time, with tags, params and description; returns its id."""
        experiment_id, tags = self.experiment_id(identity.experiment), run_tags(identity, manifest)
        name, start = f"{identity.cell} seed={identity.seed}", milliseconds(manifest["started_at"])
        run_id: str = self.client.create_run(experiment_id, start, tags, name).info.run_id
        self.log_params(run_id, flatten(config))
        return run_id

    def attempts(self, identity: RunIdentity) -> list[Run]:
        """Every run of this cell and seed, whatever became of it."""
        found = self._search(self.experiment_id(identity.experiment), f"tags.seed = '{identity.seed}'")
        return [run for run in found if run.data.tags.get("cell") == identity.cell]

    def mark_dead(self, identity: RunIdentity, but: str = "") -> None:
        """Mark attempts at this cell and seed that died while RUNNING as KILLED. The caller holds the run's folder, or
        knows that it is done: so none of them is alive, except run `but`."""
        for run in self.attempts(identity):
            if run.info.status == "RUNNING" and run.info.run_id != but:
                self.client.set_terminated(run.info.run_id, "KILLED")

    def tag_faults(self, run_id: str, path: Path) -> None:
        """Tag what went wrong in the run in folder `path`: `warning/<metric>`, in words."""
        for fault in load_faults(path):
            self.client.set_tag(run_id, f"{WARNING}{fault.name}", fault.text)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Send parameters, in batches."""
        listed = [Param(key, str(value)) for key, value in params.items()]
        for start in range(0, len(listed), _PARAM_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + _PARAM_BATCH])

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Send metrics, in batches."""
        for start in range(0, len(metrics), _BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + _BATCH])

    def log_files(self, run_id: str, files: Iterable[Path]) -> None:
        """Send files as artifacts."""
        for path in files:
            self.client.log_artifact(run_id, str(path))

    def _lock(self) -> Lock:
        busy = (
            f"another process has been making its experiment for {_LOCKED_S:g} s; see whether it lives, and try again"
        )
        return Lock(self.results / ".mlflow.lock", within_s=_LOCKED_S, busy=busy)

    def experiment_id(self, name: str) -> str:
        """The id of the MLflow experiment, made, or brought back, if need be. Servers know where artifacts go."""
        note = (
            f"Experiment `{name}`: a run for each cell and seed. The files below `{name}/` in the results folder are "
            "the truth; `cadence mlflow-sync` brings what is missing here."
        )
        remote = self.uri.startswith(("http://", "https://"))
        where = None if remote else (self.results / "mlflow-artifacts").as_uri()
        with self._lock():  # two first runs must not both make it
            try:
                return self.client.create_experiment(name, where, _TAGS | {MLFLOW_RUN_NOTE: note})
            except MlflowException as error:
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise error
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            for key, value in _TAGS.items() - found.tags.items():
                self.client.set_experiment_tag(found.experiment_id, key, value)
            return found.experiment_id

    def _search(self, experiment_id: str, condition: str) -> list[Run]:
        found: list[Run] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs([experiment_id], condition, ViewType.ACTIVE_ONLY, page_token=token or None)
            found += page
            token = page.token or None
        return found


def iteration_metrics(metrics: Mapping[str, int | float | None], at_ms: int) -> list[Metric]:
    """One object of metrics.jsonl, as `logged`, the iteration as step."""
    step = int(metrics["iteration"] or 0)
    return [Metric(name, value, at_ms, step) for name, value in logged(metrics).items()]


def system_metrics(sample: Mapping[str, float], step: int) -> list[Metric]:
    """One object of system.jsonl, at its own time."""
    at_ms = int(sample["time"] * 1000)
    return [Metric(name, value, at_ms, step) for name, value in sample.items() if name != "time"]


def summary_metrics(path: Path, at_ms: int) -> list[Metric]:
    """summary.json of the run in folder `path`, as `summary/...`: what charts and tables of runs should show, where an
    iteration's metric keeps its last value, at which an asynchronous run only drains."""
    return [Metric(f"{SUMMARY}/{name}", value, at_ms, 0) for name, value in load_summary(path).items()]


def run_tags(identity: RunIdentity, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Tags to find a run by, and its description."""
    git = manifest["git"] or {}
    commit = {MLFLOW_GIT_COMMIT: git["commit"]} if git else {}
    return commit | {
        "schedule": identity.schedule,
        "model": identity.model,
        "engine": identity.engine,
        "backend": identity.backend,
        "commit": git.get("commit", "unknown"),
        "cell": identity.cell,
        "seed": str(identity.seed),
        "smoke": str(identity.smoke).lower(),
        STARTED_AT: manifest["started_at"],
        "mlflow.runColor": of_schedules([identity.schedule])[identity.schedule],  # of its lines in charts
        MLFLOW_SOURCE_NAME: "python -m harness",
        MLFLOW_SOURCE_TYPE: "LOCAL",
        MLFLOW_RUN_NOTE: description(identity, manifest),
    }


def description(identity: RunIdentity, manifest: Mapping[str, Any]) -> str:
    """Markdown: what the run is, and the commands that make it again."""
    git = manifest["git"] or {}
    program, *arguments = manifest["command"]
    if program == "__main__.py":
        own = [argument for argument in arguments if not argument.startswith(("seeds=", "force="))]
        again = ["python", "-m", "harness", *own, f"seeds=[{identity.seed}]", "force=true"]
    else:
        again = [program, *arguments]
    lines = [f"git checkout {git['commit']}"] if git else []
    lines.append(shlex.join(again))
    dirty = "\n\nThe code differed from that commit." if git.get("dirty") else ""
    return (
        f"Schedule `{identity.schedule}` on `{identity.model}`, seed {identity.seed}, backend `{identity.backend}`. "
        f"Files: `{identity.experiment}/{identity.cell}/seed={identity.seed}/`. Made again by:\n\n"
        + "\n".join(f"    {line}" for line in lines)
        + dirty
    )


def first_line(failure: BaseException) -> str:
    """The message of a failure, without MLflow's details and without passwords; of a request that failed, which one."""
    lines = [line for line in str(failure).splitlines() if not line.startswith("(raised as a result of")]
    line = lines[0] if lines and lines[0] else type(failure).__name__
    return redacted(re.sub(r" failed with (timeout )?exception .*", " failed", line))


def milliseconds(isotime: str) -> int:
    """A time as manifest.json holds it, since 1970."""
    return int(datetime.fromisoformat(isotime).timestamp() * 1000)


Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker:
    """Mirrors one run. `log` only buffers; a thread writes every `flush_seconds`, so that training never waits, after
    what an earlier attempt has measured: some of that at a time is in memory. An attempt that fails leaves out the
    rest.

    As a context manager it ends the run as FINISHED, FAILED, or KILLED (interrupted). Where MLflow's store fails (a
    server that went away, a full disk) the mirror is lost: `on_lost` is called once, on the thread that saw it, nothing
    more is mirrored, and no call raises. `sync` completes it from the run's folder."""

    def __init__(
        self,
        results: Path,
        identity: RunIdentity,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        *,
        on_lost: Callable[[str], None],
        before: Iterable[Mapping[str, int | float]] = (),
        flush_seconds: float = 3.0,
    ) -> None:
        """Create the run. config: nested mappings, logged flat as params; manifest: of `build_manifest`; before: of the
        iterations of earlier attempts what `log` takes, which is read on another thread. The
        caller must hold the run's folder: an earlier attempt that is still RUNNING is dead, and is marked KILLED."""
        self.lost = ""  # why nothing is mirrored any more, if so
        self.run_id = ""
        self._on_lost = on_lost
        self._pending: list[Metric] = []
        self._system_samples = 0
        self._buffering = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._left = False  # as it has failed
        self._attempt(lambda: self._create(results, identity, config, manifest))
        self._thread = threading.Thread(
            target=self._write_until_closed, args=(iter(before), flush_seconds), name="mlflow-mirror", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, int | float]) -> None:
        """Buffer one iteration's object ("iteration" is the step). NaN and None are left out."""
        self._buffer(iteration_metrics(metrics, int(time.time() * 1000)))

    def log_system(self, sample: Mapping[str, float]) -> None:
        """Buffer a sample of `SystemSampler`."""
        self._buffer(system_metrics(sample, self._system_samples))
        self._system_samples += 1

    def log_summary(self, path: Path) -> None:
        """Buffer the summary of the run in folder `path`."""
        self._buffer(summary_metrics(path, int(time.time() * 1000)))

    def flush(self) -> None:
        """Write what is buffered, and wait for it."""
        self._attempt(self._write_pending)

    def finish(self, status: Status = "FINISHED", artifacts: Iterable[Path] = ()) -> None:
        """Stop the thread, write the rest, store `artifacts` (files), and end the run with this status."""
        self._left = status != "FINISHED"
        self._closing.set()
        self._thread.join()
        self._attempt(lambda: self._end(status, artifacts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._closing.is_set():
            return
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")

    def _create(
        self, results: Path, identity: RunIdentity, config: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> None:
        self._store = MlflowStore(results)
        self._store.mark_dead(identity)
        self.run_id = self._store.create(identity, config, manifest)

    def log_faults(self, path: Path) -> None:
        """Tag what went wrong in the run in folder `path`."""
        self._attempt(lambda: self._store.tag_faults(self.run_id, path))

    def _end(self, status: Status, artifacts: Iterable[Path]) -> None:
        self._write_pending()
        self._store.log_files(self.run_id, artifacts)
        if status == "FINISHED":
            self._store.client.set_tag(self.run_id, COMPLETE, "true")
        self._store.client.set_terminated(self.run_id, status)

    def _write_until_closed(self, before: Iterator[Mapping[str, int | float]], seconds: float) -> None:
        """Consumes what was before, then the buffer, every `seconds`; ends when the tracker closes or is lost."""
        while not (self.lost or self._left) and (some := list(islice(before, _ITERATIONS))):
            at_ms = int(time.time() * 1000)
            metrics = [metric for one in some for metric in iteration_metrics(one, at_ms)]
            self._attempt(partial(self._store.log_metrics, self.run_id, metrics))
        while not self.lost and not self._closing.wait(seconds):
            self.flush()

    def _buffer(self, metrics: list[Metric]) -> None:
        with self._buffering:
            if not self.lost:
                self._pending += metrics

    def _write_pending(self) -> None:
        with self._writing:
            with self._buffering:
                pending, self._pending = self._pending, []
            self._store.log_metrics(self.run_id, pending)

    def _attempt(self, mirror: Callable[[], None]) -> None:
        """Do it, unless the mirror is lost; it is lost from now on where that fails."""
        if self.lost:
            return
        try:
            mirror()
        except (MlflowException, OSError) as failure:
            with self._buffering:
                first, self.lost = not self.lost, first_line(failure)
                self._pending.clear()
            if first:
                self._on_lost(self.lost)


@dataclass(frozen=True)
class SyncedRun:
    """Counts of what MLflow was given of one run's folder."""

    path: Path
    created: bool = False
    metrics: int = 0
    files: int = 0

    @property
    def changed(self) -> bool:
        """Whether MLflow was given anything."""
        return self.created or self.metrics > 0 or self.files > 0


def sync(results: Path, folder: Path) -> Iterator[SyncedRun]:
    """Bring MLflow up to date with every finished run below `folder`, which is `results` or in it. Idempotent. Raises
    MlflowException where MLflow cannot be reached."""
    store = MlflowStore(results)
    for path in finished_runs(folder):
        yield sync_run(store, path)


def sync_run(store: MlflowStore, path: Path) -> SyncedRun:
    """Make or complete the mirror of the finished run in folder `path`."""
    check_files(path)
    manifest, config = load_manifest(path), config_as_written(path)
    identity = identity_of(manifest)
    same = [run for run in store.attempts(identity) if run.data.tags.get(STARTED_AT) == manifest[STARTED_AT]]
    if same and COMPLETE in same[0].data.tags:
        (path / INCOMPLETE).unlink(missing_ok=True)
        return SyncedRun(path)
    run_id = same[0].info.run_id if same else store.create(identity, config, manifest)
    run = store.client.get_run(run_id)
    for name, value in run_tags(identity, manifest).items() - run.data.tags.items():
        store.client.set_tag(run_id, name, value)
    store.log_params(run_id, {name: value for name, value in flatten(config).items() if name not in run.data.params})
    metrics = _lacking(store, run, _metrics_of(path))
    store.log_metrics(run_id, metrics)
    there = {file.path: file.file_size for file in store.client.list_artifacts(run_id)}
    files = [file for file in mirrored_files(path) if there.get(file.name) != file.stat().st_size]
    store.log_files(run_id, files)
    store.tag_faults(run_id, path)
    store.client.set_tag(run_id, COMPLETE, "true")
    store.client.set_terminated(run_id, "FINISHED", _done_at(path))
    store.mark_dead(identity, but=run_id)
    (path / INCOMPLETE).unlink(missing_ok=True)
    return SyncedRun(path, not same, len(metrics), len(files))


def _metrics_of(path: Path) -> list[Metric]:
    """All metrics of the run's files. Iterations are dated as the run's clock says, which on a simulated run is no time
    of day: so never after the end."""
    began, ended = milliseconds(load_manifest(path)["started_at"]), _done_at(path)
    found: list[Metric] = []
    for metrics in load_metrics(path):
        found += iteration_metrics(metrics, min(ended, began + int(metrics["seconds"] * 1000)))
    for step, sample in enumerate(load_system(path)):
        found += system_metrics(sample, step)
    return found + summary_metrics(path, ended)


def _lacking(store: MlflowStore, run: Run, metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics whose steps MLflow does not have."""
    have = {
        name: {point.step for point in store.client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    return [metric for metric in metrics if metric.step not in have.get(metric.key, ())]


def _done_at(path: Path) -> int:
    return int(read_done(path).at.timestamp() * 1000)
