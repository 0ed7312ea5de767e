"""A run in Weights & Biases: offline, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from harness.driver.loggers import LoggedRun, Logger
from harness.metrics.definitions import logged
from harness.metrics.run_files import load_faults, load_summary, metrics_so_far
from harness.metrics.system import Sample


class WandbLogger(Logger):
    """Writes `wandb/` in the run's folder, for `wandb sync`: a run for each attempt, the last one whole. Metrics have
    `iteration` as their step, samples of the machine `system_sample`."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        identity = run.identity
        self._path, self._samples, self._defined = run.folder.path, 0, set[str]()
        self._run = wandb.init(
            project=identity.experiment,
            group=identity.cell,
            name=f"{identity.cell} seed={identity.seed}",
            tags=[identity.schedule, identity.model, identity.backend],
            config=dict(run.config),
            dir=str(self._path),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        for metrics in metrics_so_far(self._path):
            self.iteration(metrics)

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Log an iteration."""
        self._log(logged(metrics), "iteration", int(metrics["iteration"]))

    def system(self, sample: Sample) -> None:
        """Log a sample of the machine."""
        self._log({name: value for name, value in sample.items() if name != "time"}, "system_sample", self._samples)
        self._samples += 1

    def finish(self) -> None:
        """Log the summary, and what went wrong."""
        self._run.summary.update({f"summary/{name}": value for name, value in load_summary(self._path).items()})
        self._run.summary.update({f"warning/{fault.name}": fault.text for fault in load_faults(self._path)})

    def ended(self, failure: type[BaseException] | None) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if failure is None else 1)

    def _log(self, values: Mapping[str, float], step: str, at: int) -> None:
        self._define(values.keys() - self._defined, step)
        self._run.log({**values, step: at})

    def _define(self, names: Iterable[str], step: str) -> None:
        """Say that metrics are to be drawn along this step."""
        for name in sorted(names):
            self._run.define_metric(name, step_metric=step)
        self._defined.update(names)
