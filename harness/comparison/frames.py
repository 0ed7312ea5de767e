"""A comparison as tables for other programs: what every seed measured, and what every cell is against the baseline."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from harness.comparison.comparison import Comparison
from harness.comparison.measures import Measure
from harness.comparison.runs import Cell
from harness.comparison.statistics import Interval
from harness.metrics.atomic_files import replacing
from harness.metrics.tables import write_csv


def measures_frame(comparison: Comparison) -> pd.DataFrame:
    """A row per measure, cell and seed. value: float64, missing where the seed never got there."""
    return pd.DataFrame(
        {**_named(measure, cell), "seed": seed, "value": _finite(value)}
        for measure in comparison.measures
        for cell, values in zip(comparison.cells, measure.cells, strict=True)
        for seed, value in values.per_seed.items()
    )


def comparison_frame(comparison: Comparison) -> pd.DataFrame:
    """A row per measure and cell. low, high: of the 95 % interval of the mean; compared: by `ratio` or `difference`, to
    the baseline, paired by seed; p: before, and significant: after Holm's correction; equal: within the margin. What
    there is not, or is not judged, is missing."""
    rows: list[dict[str, Any]] = []
    for measure in comparison.measures:
        for index, (cell, values) in enumerate(zip(comparison.cells, measure.cells, strict=True)):
            found = measure.against_baseline(index)
            rows.append(
                {
                    **_named(measure, cell),
                    "baseline": index == comparison.baseline,
                    "seeds": len(values.per_seed),
                    **_bounds("mean", "", values.interval),
                    "compared": measure.compared,
                    **_bounds("against", "against_", found.interval if found else None),
                    "p": found.p if found else math.nan,
                    "significant": found.distinguishable if found and found.judged else None,
                    "equal": found.equal if found and found.judged else None,
                }
            )
    return pd.DataFrame(rows).astype({"significant": "boolean", "equal": "boolean"})


def write_frames(comparison: Comparison, folder: Path) -> list[Path]:
    """measures and comparison, each as CSV and as Parquet, into `folder`; returns their paths."""
    paths = []
    for name, frame in (("measures", measures_frame(comparison)), ("comparison", comparison_frame(comparison))):
        paths += [write_csv(folder / f"{name}.csv", frame, digits=12), folder / f"{name}.parquet"]
        with replacing(paths[-1]) as temporary:
            frame.to_parquet(temporary, index=False)
    return paths


def _named(measure: Measure, cell: Cell) -> dict[str, Any]:
    of_measure = {"measure": measure.key, "unit": measure.unit or None, "better": measure.better}
    return of_measure | {"cell": cell.name, "label": cell.label, "schedule": cell.runs[0].identity.schedule}


def _bounds(value: str, start: str, interval: Interval | None) -> dict[str, float]:
    values = (math.nan,) * 3 if interval is None else (interval.value, interval.low, interval.high)
    return dict(zip((value, f"{start}low", f"{start}high"), map(_finite, values), strict=True))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
