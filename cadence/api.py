"""Runs from Python: `cadence.run` makes runs, `cadence.load` reads finished ones; both give pandas tables.

A run is made by a process of its own, `python -m harness bench`: it does the same in a script and in a notebook cell,
whose event loop and `__main__` it leaves alone, and its manifest has a command that makes it again."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.campaigns.process import RunProcess
from harness.config import ConfigError
from harness.config.job import flatten
from harness.metrics.done import is_done
from harness.metrics.manifest import identity_of
from harness.metrics.run_files import (
    finished_runs,
    load_config,
    load_kept,
    load_ledger,
    load_manifest,
    load_metrics,
    load_samples,
    load_summary,
)
from harness.metrics.samples import FATES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from harness.comparison.comparison import Comparison
    from harness.report.samples import ShownSample

_POLL_S = 0.2
_TAIL = 40  # lines of output that the error of a failed run has
_PLAIN = re.compile(r"[\w/.:%+@-]+")  # strings that need no quotes in a setting


@dataclass(frozen=True)
class Results:
    """Finished runs. Tables are read when they are first asked for; those of single runs, but `runs`, begin with the
    columns `experiment`, `cell`, `schedule` and `seed`."""

    paths: tuple[Path, ...]  # the folder of each run

    @property
    def path(self) -> Path:
        """The folder of the only run. Raises ValueError where there are several."""
        if len(self.paths) != 1:
            raise ValueError(f"{len(self.paths)} runs have {len(self.paths)} folders: see paths")
        return self.paths[0]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.jsonl: a row per run and iteration."""
        return _table([label | line for label, path in self._labelled() for line in load_metrics(path)])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """summary.json: a row per run, with what a comparison measures of it, rates without warm-up."""
        return _table([label | load_summary(path) for label, path in self._labelled()])

    @cached_property
    def samples(self) -> pd.DataFrame:
        """samples.parquet: a row per run and sample ever admitted."""
        return self._joined(load_samples)

    @cached_property
    def problems(self) -> pd.DataFrame:
        """problems.parquet: a row per run and admitted group, with its prompt (token ids) and answer."""
        return self._kept("problems")

    @cached_property
    def held_out(self) -> pd.DataFrame:
        """eval_responses.parquet: a row per run and response to a held-out problem."""
        return self._kept("eval_responses")

    def sample(self, sample_id: int) -> ShownSample:
        """One sample of the only run, with problem, response and what became of it; `print` shows it. Raises KeyError
        where there is none, ValueError where there are several runs."""
        from harness.report.samples import RunSamples

        if not (found := RunSamples(self.path).chosen(1, sample=sample_id)):
            raise KeyError(sample_id)
        return found[0]

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """ledger.json: a row per run, how many samples were admitted and what became of them."""
        counts = ("admitted", *FATES)
        ledgers = ((label, load_ledger(path)) for label, path in self._labelled())
        return _table([label | {name: ledger.get(name, 0) for name in counts} for label, ledger in ledgers])

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per run: which it is, its folder, and every setting by its path, such as `schedule.max_staleness`."""
        identities = [asdict(identity_of(load_manifest(path))) | {"path": path} for path in self.paths]
        settings = [flatten(load_config(path)) for path in self.paths]
        return _table([one | flat | one for one, flat in zip(identities, settings, strict=True)])

    @cached_property
    def measures(self) -> pd.DataFrame:
        """A row per measure, cell and seed, of the runs that may be compared; `label` tells their cells apart. Raises
        ConfigError where none may, as smoke runs."""
        from harness.comparison.frames import measures_frame

        return measures_frame(self._compared)

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """The same over seeds: mean with its interval, and against the baseline: the ratio or difference, paired by
        seed, with its interval, and whether it is significant."""
        from harness.comparison.frames import comparison_frame

        return comparison_frame(self._compared)

    @cached_property
    def _compared(self) -> Comparison:
        """The comparison that `cadence report` of the folder shows, where that is a comparison's."""
        from harness.comparison.experiment import CAMPAIGN, comparison_in, comparison_over, labelled
        from harness.comparison.runs import read_run

        folder = Path(os.path.commonpath(self.paths))
        if (folder / CAMPAIGN).exists():
            return comparison_in(folder)
        return comparison_over(labelled([read_run(path) for path in self.paths]))

    def _kept(self, name: str) -> pd.DataFrame:
        return self._joined(lambda path: load_kept(path, name))

    def _joined(self, read: Callable[[Path], pa.Table]) -> pd.DataFrame:
        """A table of each run, below each other, with their labels."""
        import pyarrow as pa

        tables = []
        for label, path in self._labelled():
            table = read(path)
            for place, (name, value) in enumerate(label.items()):
                table = table.add_column(place, name, pa.array([value] * table.num_rows))
            tables.append(table)
        return pa.concat_tables(tables, promote_options="default").to_pandas()

    def _labelled(self) -> list[tuple[dict[str, Any], Path]]:
        names = ("experiment", "cell", "schedule", "seed")
        return [({name: load_manifest(path)[name] for name in names}, path) for path in self.paths]


def run(*settings: str, results: str | Path | None = None, quiet: bool = False, **named: Any) -> Results:
    """Run a job over its seeds, and return its runs. Blocks until they are done; a seed that is done already is not run
    again unless `force=True`.

    settings, named: as on the command line, `run("schedule.max_staleness=1", schedule="fully_async", seeds=3)`; what
    has a dot in its name may also be given as `**{"schedule.max_staleness": 1}`. results: the results folder,
    CADENCE_RESULTS or `results` by default. quiet: do not print what the run says meanwhile.

    Raises ConfigError for a setting that cannot work, RuntimeError with the last lines of its output where a run fails.
    An interrupt ends the run, and leaves no process."""
    given = [*settings, *(f"{name}={_written(name, value)}" for name, value in named.items())]
    command = [sys.executable, "-m", "harness", "bench", *given]
    with tempfile.TemporaryDirectory(prefix="cadence-run-") as temporary:
        folders = Path(temporary) / "folders"
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CADENCE_FOLDERS": str(folders)}
        if results is not None:
            environment["CADENCE_RESULTS"] = str(results)
        process = RunProcess.spawn("the run", command, Path(temporary) / "output", environment)
        try:
            code = _wait(process, quiet)
        finally:
            process.end()
        if code:
            process.clear()
            raise _failure(code, given, process.log.read_text(encoding="utf-8", errors="replace").splitlines())
        if not folders.exists():
            raise ConfigError("a dry run has no results: `cadence bench --dry-run` says what would be run")
        return Results(tuple(Path(line).resolve() for line in folders.read_text(encoding="utf-8").splitlines()))


def load(path: str | Path) -> Results:
    """All finished runs in a folder: of one run, of a cell, of an experiment, or the whole results folder. Raises
    FileNotFoundError where there is none, ConfigError, which names it, for a file that is not as it was written."""
    path = Path(path).resolve()
    found = [path] if is_done(path) else [run for run in finished_runs(path) if is_done(run)]
    if not found:
        raise FileNotFoundError(f"{path} holds no finished run: no folder seed=<n> with DONE in it")
    return Results(tuple(found))


def _wait(process: RunProcess, quiet: bool) -> int:
    """Wait for the process to end and print its output meanwhile; returns its exit code."""
    with process.log.open(encoding="utf-8", errors="replace") as output:
        while True:
            code = process.ended()
            if not quiet and (text := output.read()):
                print(text, end="", flush=True)
            if code is not None:
                return code
            time.sleep(_POLL_S)


def _failure(code: int, settings: Sequence[str], output: Sequence[str]) -> Exception:
    if code == 2 and output:
        return ConfigError(output[-1])
    last = "\n".join(output[-_TAIL:])
    return RuntimeError(f"python -m harness bench {shlex.join(settings)} ended with exit code {code}:\n{last}")


def _written(name: str, value: Any) -> str:
    """A value as the command line has it. What has no dot in its name is a choice of a group, a number or a switch."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written('.', each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(_written(".", each) for each in value) + "]"
    text = str(value)
    if "." not in name or not isinstance(value, str | Path) or _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)
