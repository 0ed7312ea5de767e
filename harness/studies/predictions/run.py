"""`make predict`: a table in, its asynchronous rows out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config import ConfigError
from harness.runtime.parallel import parallel_map
from harness.studies.predictions.fit import Fit, fit
from harness.studies.predictions.phases import Given, Scaling, scalings, training_phases
from harness.studies.predictions.prediction import Case, Prediction, predict
from harness.studies.predictions.settings import TableSettings, read_table_settings
from harness.studies.predictions.table import Row, read_table

_TIMEOUT_S = 3600.0  # longest wait for all rows


@dataclass(frozen=True)
class Predicted:
    """A table, as it was predicted."""

    fits: list[Fit]
    predictions: list[Prediction]


def predict_table(
    path: Path,
    given: Given,
    arguments: Sequence[str] = (),
    *,
    processes: int = 1,
    progress: Callable[[str], None] = lambda said: None,
) -> Predicted:
    """Calibrate on the synchronous rows of a table, predict the others.

    arguments: settings of the job, over those of the table. processes: how many simulate rows side by side. progress:
    hears what is being done. Raises ConfigError where the table, or a job of it, cannot be.
    """
    settings, rows = read_table_settings(path), read_table(path)
    synchronous = _synchronous(path, rows)
    others = [row for row in rows if row not in synchronous]
    if not others:
        raise ConfigError(f"{path} has no row to predict: all of them are synchronous, and calibrate")
    by_engine: dict[str, tuple[Fit, dict[str, Scaling]]] = {}
    for engine in dict.fromkeys(row.engine for row in synchronous):
        alike = [row for row in synchronous if row.engine == engine]
        progress(f"fitting {', '.join(map(str, alike))}")
        config = settings.job(alike[0], arguments)
        sync = scalings(alike, settings.scoring_fixed_s_per_sample * config.algorithm.batch_samples)
        by_engine[engine] = fit(alike, config, sync, batches=settings.batches), sync
    progress(f"simulating {len(others)} rows")
    cases = [_case(row, others, by_engine, settings, given, arguments) for row in others]
    fits = [its for its, _ in by_engine.values()]
    made = parallel_map(predict, cases, processes=processes, timeout_s=_TIMEOUT_S, what="rows to be simulated")
    return Predicted(fits, made)


def _synchronous(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Rows to calibrate on: colocated ones, or, where there are none, separate pools that never overlap."""
    colocated = [row for row in rows if row.colocated]
    separated = [row for row in rows if row.mode == "separated_sync" and row.options.get("streaming") == "false"]
    if not colocated and not separated:
        raise ConfigError(
            f"{path} has no synchronous row to calibrate on; add one of mode colocate_sync, or separated_sync with a "
            "column `streaming` that says false"
        )
    return colocated or separated


def _case(
    row: Row,
    others: Sequence[Row],
    by_engine: Mapping[str, tuple[Fit, Mapping[str, Scaling]]],
    settings: TableSettings,
    given: Given,
    arguments: Sequence[str],
) -> Case:
    """A row, calibrated on the rows of its engine, or, where it has none, of the first engine."""
    its, sync = by_engine.get(row.engine) or next(iter(by_engine.values()))
    phases = training_phases(row, others, sync, settings, given)
    return Case(row, its, settings.job(row, arguments), phases, settings)
