"""A run in MLflow, as it goes on: the mirror of harness/metrics/mlflow_mirror.py."""

from __future__ import annotations

from collections.abc import Mapping

from harness.driver.loggers import LoggedRun, Logger
from harness.metrics.run_files import metrics_so_far, mirrored_files
from harness.metrics.system import Sample


class MlflowLogger(Logger):
    """Mirrors a run to MLflow. The loss of the mirror is said once, on the console and in the run's folder."""

    def __init__(self, run: LoggedRun) -> None:
        """Create the run in MLflow, which takes seconds to load."""
        from harness.metrics.mlflow_mirror import Tracker

        self._folder, self._say = run.folder, run.say
        before = metrics_so_far(run.folder.path)  # MLflow has a run for each attempt, the last one whole
        self._tracker = Tracker(
            run.results, run.identity, run.config, run.manifest, on_lost=self._report_loss, before=before
        )

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Buffer an iteration."""
        self._tracker.log(metrics)

    def system(self, sample: Sample) -> None:
        """Buffer a sample of the machine."""
        self._tracker.log_system(sample)

    def finish(self) -> None:
        """Store all files, and end the run in MLflow."""
        self._tracker.log_summary(self._folder.path)
        self._tracker.log_faults(self._folder.path)
        self._tracker.finish(artifacts=mirrored_files(self._folder.path))

    def ended(self, failure: type[BaseException] | None) -> None:
        """End the run in MLflow, where that has not been done."""
        self._tracker.__exit__(failure)

    def _report_loss(self, why: str) -> None:
        """Report, on the mirror's thread, that the mirror was lost: that the disk has no room is said here, and raised
        where the run itself writes."""
        message = (
            f"MLflow mirror incomplete: {why}; the run goes on, and `cadence mlflow-sync` catches up from its files"
        )
        try:
            self._folder.mirror_is_incomplete(why)
        except OSError as error:
            message += f"; its folder does not say so: {error}"
        self._say(message)
