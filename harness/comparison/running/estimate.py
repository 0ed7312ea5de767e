"""How long runs take, from those that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean

from harness.comparison.running.cells import JobCell
from harness.metrics.run_files import is_done, load_manifest, load_metrics

START_S = 12.0
"""About what a run takes besides its iterations: imports, processes that start, plots. Scaling leaves it out."""


class Estimate:
    """Seconds per run of each cell: means over its finished runs, those of the same job elsewhere before there are any.

    A cell of which nothing is known is taken to be like the others.
    """

    def __init__(self, cells: Sequence[JobCell], seeds: Iterable[int], results: Path) -> None:
        self._own = {
            cell.label: [_spent(folder) for seed in seeds if is_done(folder := cell.folder(seed, results))]
            for cell in cells
        }
        self._elsewhere = {cell.label: None if self._own[cell.label] else _like(cell, results) for cell in cells}

    def took(self, cell: JobCell, seconds: float) -> None:
        """A run of this cell has ended well."""
        self._own[cell.label].append(seconds)

    def of(self, cell: JobCell) -> float | None:
        """Of one run of this cell; None where nothing is known of any."""
        known = {label: guess for label in self._own if (guess := self._guess(label)) is not None}
        return known.get(cell.label, mean(known.values()) if known else None)

    def left(self, todo: Iterable[JobCell], running: Iterable[tuple[JobCell, float]], at_once: int) -> float | None:
        """Until runs of the cells of `todo` and those that have been `running` for so many seconds are done."""
        whole = [(cell, 0.0) for cell in todo]
        guesses = [(self.of(cell), spent) for cell, spent in (*whole, *running)]
        seconds = [max(0.0, guess - spent) for guess, spent in guesses if guess is not None]
        return sum(seconds) / at_once if len(seconds) == len(guesses) else None

    def _guess(self, label: str) -> float | None:
        return mean(self._own[label]) if self._own[label] else self._elsewhere[label]


def told(seconds: float | None) -> str:
    """`a moment`, `about 40 s`, `about 12 min`, `about 2.5 h`; or that nothing is known."""
    if seconds is None:
        return "unknown until a run is done"
    if seconds < 3:
        return "a moment"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _spent(folder: Path) -> float:
    """From its manifest to DONE. Imports come before, a few seconds."""
    ended = datetime.fromisoformat((folder / "DONE").read_text(encoding="utf-8").strip())
    return (ended - datetime.fromisoformat(load_manifest(folder)["started_at"])).total_seconds()


def _like(cell: JobCell, results: Path) -> float | None:
    """The latest finished run of this schedule, model, task and backend anywhere, scaled to as many samples."""
    config = cell.config
    names = f"*/{config.schedule.name}-{config.model.name}-{config.task.name}-*/seed=*/DONE"
    for done in sorted(results.glob(names), key=lambda path: path.stat().st_mtime, reverse=True):
        manifest = load_manifest(done.parent)
        if manifest["backend"] == cell.plan.backend and not manifest["smoke"]:
            samples = load_metrics(done.parent)[-1]["samples"]
            scale = config.iterations * config.algorithm.batch_samples / samples
            return START_S + max(0.0, _spent(done.parent) - START_S) * scale
    return None
