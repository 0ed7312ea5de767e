"""Loggers of a run: what hears its metrics besides its folder, by the same names and steps. The files are the truth; a
logger that fails is said, left alone from then on, and ends no run."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness.config.files import yaml_text
from harness.config.registries import find
from harness.driver.listeners import RunListener
from harness.metrics.definitions import logged
from harness.metrics.formatting import redacted
from harness.metrics.manifest import RunIdentity
from harness.metrics.run_files import RunDirectory, load_faults, load_summary, metrics_so_far, mirrored_files
from harness.metrics.system import Sample, SystemSampler

_FLUSH_S = 10  # of TensorBoard's files


@dataclass(frozen=True)
class LoggedRun:
    """The run that is logged. config, manifest: as in its folder, which the caller holds; results: the results folder;
    say: prints a line for the user, on any thread."""

    folder: RunDirectory
    results: Path
    identity: RunIdentity
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    say: Callable[[str], None]


class Logger(RunListener):
    """Logs one attempt at a run, from its first iteration on: made, maybe in seconds, while roles start, and on another
    thread. A subclass takes a LoggedRun, and logs what `metrics_so_far` has of earlier attempts."""

    def system(self, sample: Sample) -> None:
        """Hear how busy the machine is, on another thread, every ten seconds."""

    def finish(self) -> None:
        """Hear that every file is there."""

    def ended(self, failure: type[BaseException] | None) -> None:
        """Hear that the attempt is over; with what ended it early."""


class Loggers(Logger):
    """All loggers of a run, by the names of `loggers`. As a context manager it samples the machine, also for the run's
    folder, until `finish`, or until the run fails."""

    def __init__(self, names: tuple[str, ...], run: LoggedRun) -> None:
        self._say = run.say
        self._loggers: dict[str, Logger] = {}
        for name in names:
            self._try(name, lambda name=name: self._loggers.update({name: find("loggers", name)(run)}))  # type: ignore[misc]
        self._sampler = SystemSampler([run.folder.append_system, self.system])

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self._tell(lambda logger: logger.iteration(metrics))

    def system(self, sample: Sample) -> None:
        self._tell(lambda logger: logger.system(sample))

    def finish(self) -> None:
        """Take the last sample, and tell all that every file is there."""
        self._sampler.close()
        self._tell(lambda logger: logger.finish())

    def __enter__(self) -> Self:
        self._sampler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._sampler.close()
        finally:
            self._tell(lambda logger: logger.ended(kind))

    def _tell(self, what: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            self._try(name, lambda logger=logger: what(logger))  # type: ignore[misc]

    def _try(self, name: str, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as failure:  # of whatever package
            self._loggers.pop(name, None)
            why = str(failure).partition("\n")[0] or type(failure).__name__
            self._say(f"loggers={name} failed: {redacted(why)}; the run goes on without it")


class MlflowLogger(Logger):
    """The run in MLflow, as it goes on: the mirror of harness/metrics/mlflow_mirror.py, whose loss is said once, on the
    console and in the run's folder."""

    def __init__(self, run: LoggedRun) -> None:
        """Create the run in MLflow, which takes seconds to load."""
        from harness.metrics.mlflow_mirror import Tracker

        self._folder, self._say = run.folder, run.say
        before = metrics_so_far(run.folder.path)  # MLflow has a run for each attempt, the last one whole
        self._tracker = Tracker(
            run.results, run.identity, run.config, run.manifest, on_lost=self._report_loss, before=before
        )

    def iteration(self, metrics: Mapping[str, float]) -> None:
        self._tracker.log(metrics)

    def system(self, sample: Sample) -> None:
        self._tracker.log_system(sample)

    def finish(self) -> None:
        self._tracker.log_summary(self._folder.path)
        self._tracker.log_faults(self._folder.path)
        self._tracker.finish(artifacts=mirrored_files(self._folder.path))

    def ended(self, failure: type[BaseException] | None) -> None:
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


class TensorBoardLogger(Logger):
    """Writes `tensorboard/` in the run's folder, for `tensorboard --logdir results`: an earlier attempt's files are
    replaced by what it measured."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboardX import SummaryWriter

        self._path, self._samples = run.folder.path, 0
        folder = self._path / "tensorboard"
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_S)
        self._text("config", yaml_text(run.config))
        for metrics in metrics_so_far(self._path):
            self.iteration(metrics)

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Write an iteration, whose number is the step."""
        for name, value in logged(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["iteration"]))

    def system(self, sample: Sample) -> None:
        """Write a sample of the machine, whose number is the step."""
        for name in sample.keys() - {"time"}:
            self._writer.add_scalar(name, sample[name], self._samples, walltime=sample["time"])
        self._samples += 1

    def finish(self) -> None:
        for name, value in load_summary(self._path).items():
            self._writer.add_scalar(f"summary/{name}", value, 0)
        for fault in load_faults(self._path):
            self._text(f"warning/{fault.name}", fault.text)

    def ended(self, failure: type[BaseException] | None) -> None:
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))


class WandbLogger(Logger):
    """Writes `wandb/` in the run's folder, for `wandb sync`: a run for each attempt, the last one whole, and offline,
    unless WANDB_MODE says otherwise. Metrics have `iteration` as their step, samples of the machine `system_sample`."""

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
        self._log(logged(metrics), "iteration", int(metrics["iteration"]))

    def system(self, sample: Sample) -> None:
        self._log({name: value for name, value in sample.items() if name != "time"}, "system_sample", self._samples)
        self._samples += 1

    def finish(self) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in load_summary(self._path).items()})
        self._run.summary.update({f"warning/{fault.name}": fault.text for fault in load_faults(self._path)})

    def ended(self, failure: type[BaseException] | None) -> None:
        self._run.finish(exit_code=0 if failure is None else 1)

    def _log(self, values: Mapping[str, float], step: str, at: int) -> None:
        for name in sorted(values.keys() - self._defined):
            self._run.define_metric(name, step_metric=step)
        self._defined.update(values)
        self._run.log({**values, step: at})
