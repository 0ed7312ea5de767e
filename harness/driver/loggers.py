"""Loggers of a run: what hears its metrics besides its folder, by the same names and steps. The files are the truth; a
logger that fails is said, left alone from then on, and ends no run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.registries import find
from harness.driver.observer import RunListener
from harness.metrics.formatting import redacted
from harness.metrics.manifest import RunIdentity
from harness.metrics.run_files import RunDirectory
from harness.metrics.system import Sample, SystemSampler


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
        """Tell all of an iteration."""
        self._tell(lambda logger: logger.iteration(metrics))

    def system(self, sample: Sample) -> None:
        """Tell all how busy the machine is."""
        self._tell(lambda logger: logger.system(sample))

    def finish(self) -> None:
        """Take the last sample, and tell all that every file is there."""
        self._sampler.close()
        self._tell(lambda logger: logger.finish())

    def __enter__(self) -> Loggers:
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
