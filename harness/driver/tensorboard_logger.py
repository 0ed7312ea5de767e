"""A run in TensorBoard: event files in its folder, `tensorboard --logdir results`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from harness.config.files import yaml_text
from harness.driver.loggers import LoggedRun, Logger
from harness.metrics.definitions import logged
from harness.metrics.run_files import load_faults, load_summary, metrics_so_far
from harness.metrics.system import Sample

_FLUSH_S = 10


class TensorBoardLogger(Logger):
    """Writes `tensorboard/` in the run's folder: an earlier attempt's files are replaced by what it measured."""

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
        """Write the summary, and what went wrong."""
        for name, value in load_summary(self._path).items():
            self._writer.add_scalar(f"summary/{name}", value, 0)
        for fault in load_faults(self._path):
            self._text(f"warning/{fault.name}", fault.text)

    def ended(self, failure: type[BaseException] | None) -> None:
        """Close the files."""
        self._writer.close()

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))
