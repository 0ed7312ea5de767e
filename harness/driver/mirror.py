"""What is written down beside a run: its mirror in MLflow, and how busy the machine is. Loading it takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli.arguments import own_arguments
from harness.config import ConfigError
from harness.metrics.manifest import RunIdentity
from harness.metrics.mlflow_store import MlflowException, first_line, tracking_uri
from harness.metrics.mlflow_sync import Filled, sync
from harness.metrics.run_files import RunDirectory, mirrored_files
from harness.metrics.system import SystemSampler
from harness.metrics.tracking import Tracker


class Mirror:
    """As a context manager it samples the machine until `finish`, or until the run fails.

    A mirror that is lost is told once on the console and in the run's folder, and the run goes on.
    """

    def __init__(
        self,
        folder: RunDirectory,
        results: Path,
        identity: RunIdentity,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        console: Console,
    ) -> None:
        """Creates the run in MLflow. config, manifest: as in the folder, which the caller holds."""
        self._folder, self._console = folder, console
        self._tracker = Tracker(results, identity, config, manifest, on_lost=self._tell_loss)
        self._sampler = SystemSampler([folder.append_system, self._tracker.log_system])
        self.log = self._tracker.log

    def finish(self) -> None:
        """Every other file is there: store them, and end the run in MLflow."""
        self._sampler.close()
        self._tracker.finish(artifacts=mirrored_files(self._folder.path))

    def __enter__(self) -> Mirror:
        self._sampler.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._sampler.close()
        finally:
            self._tracker.__exit__(*exception)

    def _tell_loss(self, why: str) -> None:
        self._folder.mirror_is_incomplete(why)
        told = f"MLflow mirror incomplete: {why}; the run goes on, and `make mlflow-sync` catches up from its files"
        self._console.print(told, style="yellow", highlight=False, soft_wrap=True, markup=False)


def catch_up(arguments: Sequence[str], results: Path, console: Console) -> None:
    """`make mlflow-sync`: bring MLflow up to date with the finished runs, of all experiments or of `experiment=name`,
    and say what was lacking. Raises ConfigError where it cannot."""
    own, others = own_arguments(arguments, "experiment")
    if others:
        raise ConfigError(f"{others[0]} changes nothing here; choose runs with EXPERIMENT=bench")
    uri, folder = tracking_uri(results), results / "".join(own["experiment"][-1:])
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there; run `make bench` first")
    runs: list[Filled] = []
    try:
        for filled in sync(results, folder):
            runs.append(filled)
            if filled.changed:
                what = f"{'made' if filled.created else 'filled'}: {filled.metrics:,} metrics, {filled.files} files"
                console.print(f"{filled.path} {what}", highlight=False, soft_wrap=True, markup=False)
    except MlflowException as failure:
        raise ConfigError(f"{uri}: {first_line(failure)}; start the server, or set MLFLOW_TRACKING_URI") from failure
    changed = sum(filled.changed for filled in runs)
    console.print(f"{len(runs)} finished runs, {changed} brought up to date in {uri}", highlight=False, soft_wrap=True)
