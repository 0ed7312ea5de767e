"""What is written down beside a run: its mirror in MLflow, and how busy the machine is. Loading it takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.metrics.manifest import RunIdentity
from harness.metrics.mlflow_mirror import Tracker
from harness.metrics.run_files import RunDirectory, mirrored_files
from harness.metrics.system import SystemSampler


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
