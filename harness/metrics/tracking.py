"""The mirror in MLflow: a parent run per experiment, a child run per cell and seed. The files are the truth.

Only this module imports mlflow; import it only where it is used, mlflow takes seconds to load.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from mlflow.entities import Metric, Param, Run, ViewType  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID  # noqa: E402

from harness.metrics.manifest import RunIdentity  # noqa: E402
from harness.metrics.safe_files import Lock  # noqa: E402

Status = Literal["FINISHED", "FAILED", "KILLED"]

_BATCH = 1000  # MLflow's limit of metrics per log_batch
_PARAM_BATCH = 100  # and of params
_IS_PARENT = "cadence.parent"

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)


class Tracker:
    """Mirrors one run. `log` only takes note; a thread writes every `flush_seconds`, so that training never waits.

    As a context manager it ends the run as FINISHED, FAILED, or KILLED (interrupted). A failure of the thread is raised
    by the next call, whichever it is.
    """

    def __init__(
        self,
        results: Path,
        identity: RunIdentity,
        config: Mapping[str, Any],
        commit: str | None,
        *,
        flush_seconds: float = 3.0,
    ) -> None:
        """Create the child run in <results>/mlflow.db. config: nested mappings, logged flat as params; commit: of the
        code, None outside git. The caller must hold the run's folder: an earlier try of the same cell and seed that
        still counts as running is dead, and is marked KILLED."""
        results = results.resolve()
        results.mkdir(parents=True, exist_ok=True)
        with Lock(results / ".mlflow.lock", wait=True):  # two first runs must not both make the tables
            self._client = MlflowClient(tracking_uri=f"sqlite:///{results / 'mlflow.db'}")
            experiment_id = _experiment(self._client, identity.experiment, results / "mlflow-artifacts")
            parent = _parent(self._client, experiment_id, identity.experiment)
        _bury(self._client, experiment_id, parent, identity)
        tags = _tags(identity, commit) | {MLFLOW_PARENT_RUN_ID: parent}
        name = f"{identity.cell} seed={identity.seed}"
        self.run_id: str = self._client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in flatten(config).items()]
        for start in range(0, len(params), _PARAM_BATCH):
            self._client.log_batch(self.run_id, params=params[start : start + _PARAM_BATCH])

        self._pending: list[Metric] = []
        self._taking = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._write_now_and_then, args=(flush_seconds,), name="mlflow-mirror", daemon=True
        )
        self._thread.start()

    def log(self, metrics: Mapping[str, int | float]) -> None:
        """Take note of one iteration's object ("iteration" is the step) and return. NaN and None are left out."""
        self._raise_failure()
        now, step = int(time.time() * 1000), int(metrics["iteration"])
        noted = [
            Metric(name, float(value), now, step)
            for name, value in metrics.items()
            if name != "iteration" and value is not None and math.isfinite(value)
        ]
        with self._taking:
            self._pending += noted

    def flush(self) -> None:
        """Write what was noted so far, and wait for it."""
        self._raise_failure()
        self._write_pending()

    def finish(self, status: Status = "FINISHED", artifacts: Iterable[Path] = ()) -> None:
        """Stop the thread, write the rest, store `artifacts` (files), and end the run with this status.

        If the mirror failed, the run is ended as FAILED and the failure raised.
        """
        self._closing.set()
        self._thread.join()
        try:
            self.flush()
            for path in artifacts:
                self._client.log_artifact(self.run_id, str(path))
        except BaseException:
            self._client.set_terminated(self.run_id, "FAILED")
            raise
        self._client.set_terminated(self.run_id, status)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._closing.is_set():
            return
        if kind is None:
            self.finish()
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")

    def _write_now_and_then(self, seconds: float) -> None:
        """Consumes what `log` noted, every `seconds`; ends when the tracker closes or a write fails."""
        while not self._closing.wait(seconds):
            try:
                self._write_pending()
            except BaseException as failure:  # it is raised again by the next call, on the caller's thread
                self._failure = failure
                return

    def _write_pending(self) -> None:
        with self._writing:
            with self._taking:
                pending, self._pending = self._pending, []
            for start in range(0, len(pending), _BATCH):
                self._client.log_batch(self.run_id, metrics=pending[start : start + _BATCH])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the MLflow mirror failed: {self._failure}") from self._failure


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level, names joined by dots: {"schedule": {"eta": 1}} -> {"schedule.eta": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _tags(identity: RunIdentity, commit: str | None) -> dict[str, str]:
    return {
        "schedule": identity.schedule,
        "model": identity.model,
        "engine": identity.engine,
        "backend": identity.backend,
        "commit": commit or "unknown",
        "cell": identity.cell,
        "seed": str(identity.seed),
        "smoke": str(identity.smoke).lower(),
    }


def _experiment(client: MlflowClient, name: str, artifacts: Path) -> str:
    """The id of the MLflow experiment, made if it is not there, brought back if it was deleted."""
    try:
        return client.create_experiment(name, artifact_location=artifacts.as_uri())
    except MlflowException as error:
        found = client.get_experiment_by_name(name)
        if found is None:
            raise error
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _parent(client: MlflowClient, experiment_id: str, name: str) -> str:
    """The id of the run that stands for the experiment. It is a folder, not work: it is FINISHED from the start."""
    found = _search(client, experiment_id, f"tags.`{_IS_PARENT}` = 'true'")
    if found:
        return found[0].info.run_id
    run_id = client.create_run(experiment_id, tags={_IS_PARENT: "true"}, run_name=name).info.run_id
    client.set_terminated(run_id, "FINISHED")
    return run_id


def _bury(client: MlflowClient, experiment_id: str, parent: str, identity: RunIdentity) -> None:
    """Mark earlier tries of this cell and seed that died without a word as KILLED."""
    same = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}' and tags.seed = '{identity.seed}' and status = 'RUNNING'"
    for run in _search(client, experiment_id, same):
        if run.data.tags.get("cell") == identity.cell:
            client.set_terminated(run.info.run_id, "KILLED")


def _search(client: MlflowClient, experiment_id: str, condition: str) -> list[Run]:
    return list(client.search_runs([experiment_id], condition, run_view_type=ViewType.ACTIVE_ONLY))
