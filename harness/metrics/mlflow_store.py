"""Where in MLflow runs are mirrored to, and as what: an experiment, its parent run, a child for each cell and seed.

Only this module, its two neighbours `tracking` and `mlflow_sync`, and `system` import mlflow; import them only where
they are used, mlflow takes seconds to load.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

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

from mlflow.entities import Metric, Param, Run, ViewType  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402
from mlflow.utils.mlflow_tags import (  # noqa: E402
    MLFLOW_GIT_COMMIT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)

from harness.config.flat import flatten  # noqa: E402
from harness.metrics.manifest import RunIdentity  # noqa: E402
from harness.metrics.safe_files import Lock  # noqa: E402

_BATCH = 1000  # MLflow's limit of metrics per log_batch
_PARAM_BATCH = 100  # and of params
_IS_PARENT = "cadence.parent"
STARTED_AT = "started_at"
"""Tag: which try of a cell and seed it is, as in its manifest.json."""
COMPLETE = "cadence.mirrored"
"""Tag: set last, when everything that the run's folder holds is in MLflow."""

for _chatty in ("mlflow", "alembic", "urllib3.connectionpool"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)


def tracking_uri(results: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set, else a database in the results folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


class Store:
    """MLflow's side of a results folder. Every call may raise MlflowException: a server may be gone."""

    def __init__(self, results: Path) -> None:
        self.results = results.resolve()
        self.uri = tracking_uri(results)
        self.results.mkdir(parents=True, exist_ok=True)
        with self._lock():
            self.client = MlflowClient(tracking_uri=self.uri)

    def places(self, experiment: str) -> tuple[str, str]:
        """The ids of the MLflow experiment and of its parent run, made where they are not there."""
        with self._lock():  # two first runs must not both make them
            experiment_id = self._experiment(experiment)
            return experiment_id, self._parent(experiment_id, experiment)

    def create(self, identity: RunIdentity, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
        """A child run, RUNNING since the manifest's time, with tags, params and description; returns its id."""
        experiment_id, parent = self.places(identity.experiment)
        tags = run_tags(identity, manifest) | {MLFLOW_PARENT_RUN_ID: parent}
        name, start = f"{identity.cell} seed={identity.seed}", milliseconds(manifest["started_at"])
        run_id: str = self.client.create_run(experiment_id, start, tags, name).info.run_id
        self.log_params(run_id, flatten(config))
        return run_id

    def children(self, identity: RunIdentity) -> list[Run]:
        """Every child run of this cell and seed, whatever became of it."""
        experiment_id, parent = self.places(identity.experiment)
        same = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}' and tags.seed = '{identity.seed}'"
        return [run for run in self._search(experiment_id, same) if run.data.tags.get("cell") == identity.cell]

    def bury(self, identity: RunIdentity, but: str = "") -> None:
        """Mark tries of this cell and seed that died without a word as KILLED. The caller holds the run's folder, or
        knows that it is done: so none of them is alive, but for run `but`."""
        for run in self.children(identity):
            if run.info.status == "RUNNING" and run.info.run_id != but:
                self.client.set_terminated(run.info.run_id, "KILLED")

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        listed = [Param(key, str(value)) for key, value in params.items()]
        for start in range(0, len(listed), _PARAM_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + _PARAM_BATCH])

    def log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        for start in range(0, len(metrics), _BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + _BATCH])

    def log_files(self, run_id: str, files: Iterable[Path]) -> None:
        for path in files:
            self.client.log_artifact(run_id, str(path))

    def _lock(self) -> Lock:
        return Lock(self.results / ".mlflow.lock", wait=True)

    def _experiment(self, name: str) -> str:
        """The id of the MLflow experiment, made if it is not there, brought back if it was deleted. A server knows
        itself where to keep artifacts."""
        remote = self.uri.startswith(("http://", "https://"))
        where = None if remote else (self.results / "mlflow-artifacts").as_uri()
        try:
            return self.client.create_experiment(name, artifact_location=where)
        except MlflowException as error:
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise error
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _parent(self, experiment_id: str, name: str) -> str:
        """The id of the run that stands for the experiment. It is a folder, not work: it is FINISHED from the start."""
        found = self._search(experiment_id, f"tags.`{_IS_PARENT}` = 'true'")
        if found:
            return found[0].info.run_id
        told = f"Experiment `{name}`: a child run for each cell and seed. The files below `{name}/` in the results \
folder are the truth; `make mlflow-sync` brings what is missing here."
        tags = {_IS_PARENT: "true", MLFLOW_RUN_NOTE: told}
        run_id = self.client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        self.client.set_terminated(run_id, "FINISHED")
        return run_id

    def _search(self, experiment_id: str, condition: str) -> list[Run]:
        found: list[Run] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs([experiment_id], condition, ViewType.ACTIVE_ONLY, page_token=token or None)
            found += page
            token = page.token or None
        return found


def iteration_metrics(metrics: Mapping[str, int | float | None], at_ms: int) -> list[Metric]:
    """One object of metrics.jsonl, the iteration as step. NaN and None are left out."""
    step = int(metrics["iteration"] or 0)
    return [
        Metric(name, float(value), at_ms, step)
        for name, value in metrics.items()
        if name != "iteration" and value is not None and math.isfinite(value)
    ]


def system_metrics(sample: Mapping[str, float], step: int) -> list[Metric]:
    """One object of system.jsonl, at its own time."""
    at_ms = int(sample["time"] * 1000)
    return [Metric(name, value, at_ms, step) for name, value in sample.items() if name != "time"]


def run_tags(identity: RunIdentity, manifest: Mapping[str, Any]) -> dict[str, str]:
    """What to find a run by, and its description."""
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
    """What went wrong, without what MLflow tells after it: of a request that failed, which one."""
    line = str(failure).partition("\n")[0] or type(failure).__name__
    return re.sub(r" failed with (timeout )?exception .*", " failed", line)


def milliseconds(isotime: str) -> int:
    """A time as manifest.json and DONE hold it, since 1970."""
    return int(datetime.fromisoformat(isotime).timestamp() * 1000)
