"""Rows, drawings without a script, samples and shades that the page's template shows besides the comparison itself."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import CorrectionMatrix, Entry
from harness.comparison.measures import CellMeasure, Measure
from harness.metrics.definitions import LATENCIES
from harness.metrics.formatting import number
from harness.metrics.samples import latencies_by_engine, percentiles
from harness.report.drawing import inline_svg
from harness.report.page.pictures import COLORS, draw_lags, draw_profile, profiles
from harness.report.page.text import SAMPLE_KINDS, histogram_text, profile_text
from harness.report.palette import names_of, of_cells
from harness.report.samples import RunSamples, ShownSample

_SAMPLES, _ALL_SAMPLES = 4, 160  # of each kind in a run, and in the page; so it grows by some 600 kilobytes at most
_ENGINES = 8  # of a cell that are listed
_DARK = 0.45  # of the colour scale: above it black is easier to read than white
_PANEL = (260, 164)


def breakable(label: str) -> list[str]:
    """A label in the parts between which a line may be broken: where a setting's name has joints."""
    return re.split(r"(?<==)|(?<=\.)(?!\d)", label)


def shades(matrix: CorrectionMatrix) -> Callable[[Entry], tuple[str, str]]:
    """The colours of each entry's field, by its mean among all: of the ground, and of what is written on it."""
    values = [entry.measured.value for entry in matrix.entries.values() if math.isfinite(entry.measured.value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)

    def shade(entry: Entry) -> tuple[str, str]:
        value = entry.measured.value
        place = (value - low) / (high - low) if high > low and math.isfinite(value) else 1.0
        return to_hex(colormaps[COLORS](place)), "#000" if place > _DARK else "#fff"

    return shade


def chosen_samples(comparison: Comparison) -> list[tuple[int, str, ShownSample]]:
    """Some samples of the first run of each cell that kept any: which cell, what it was chosen for, the sample."""
    firsts = {index: cell.runs[0] for index, cell in enumerate(comparison.cells)}
    kept = {index: run for index, run in firsts.items() if (run.path / "problems.parquet").is_file()}
    each = max(1, min(_SAMPLES, _ALL_SAMPLES // max(1, len(kept) * len(SAMPLE_KINDS))))
    found = []
    for index, run in kept.items():
        samples = RunSamples(run.path, run.samples)
        chosen = {
            "worst": samples.chosen(each, best=False),
            "best": samples.chosen(each, best=True),
            "dropped": samples.chosen(each, dropped=True),
            "held": samples.chosen(each, best=False, held_out=samples.versions[-1]) if samples.versions else [],
        }
        found += [(index, kind, one) for kind, of_kind in chosen.items() for one in of_kind]
    return found


def staleness_drawings(comparison: Comparison) -> list[Markup]:
    """A histogram for each cell, all on one scale, so that they can be compared."""
    return _drawings(
        comparison,
        lambda panel, index, colour: draw_lags(panel, comparison.staleness[index], colour),
        list(map(histogram_text, comparison.staleness)),
    )


def profile_drawings(comparison: Comparison) -> list[Markup]:
    """Likewise: one axis of scores for all; none where nothing was rewarded."""
    if (drawn := profiles(comparison)) is None:
        return []
    cells = zip(comparison.cells, comparison.profiles, strict=True)
    of_cell = [drawn[drawn["label"] == cell.label] for cell in comparison.cells]
    return _drawings(
        comparison,
        lambda panel, index, colour: draw_profile(panel, of_cell[index], drawn, colour),
        [f"{cell.label}: {profile_text(profile)}" for cell, profile in cells],
    )


def _drawings(comparison: Comparison, draw: Callable[[Axes, int, str], None], labels: Sequence[str]) -> list[Markup]:
    """A drawing of each cell: what `draw` draws into a panel. labels: the same in words."""
    colours = of_cells(cell.label for cell in comparison.cells).values()
    return [
        Markup(
            inline_svg(
                lambda figure, index=index, colour=colour: draw(figure.subplots(), index, colour),  # type: ignore[misc]
                _PANEL,
                "histogram",
                label,
                {colour: name},
            )
        )
        for index, (label, colour, name) in enumerate(zip(labels, colours, names_of(comparison.cells), strict=True))
    ]


def latency_rows(comparison: Comparison) -> Iterator[tuple[int, str, str, list[str]]]:
    """Rows of all requests of a cell, and of its slowest engines: the cell, the engine, how many have no row, and
    percentiles of each of `LATENCIES`."""
    for index, cell in enumerate(comparison.cells):
        engines = latencies_by_engine(run.samples for run in cell.runs)
        every = {part: np.concatenate([of[part] for of in engines.values()]) for part in LATENCIES}
        slowest = sorted(engines, key=lambda engine: -np.nanmedian(engines[engine]["request"]))[:_ENGINES]
        left = f"the {_ENGINES} slowest engines of {len(engines)}" if len(engines) > _ENGINES else ""
        yield index, "", left, [_percentiles(every[part]) for part in LATENCIES]
        for one in sorted(slowest, key=int) if len(engines) > 1 else ():
            yield index, one, "", [_percentiles(engines[one][part]) for part in LATENCIES]


def _percentiles(seconds: np.ndarray) -> str:
    return " / ".join(number(value, 3) for value in percentiles(seconds).values()) or "–"


def seeds_of(measure: Measure) -> list[int]:
    """Seeds of any of its cells."""
    return list(dict.fromkeys(seed for cell in measure.cells for seed in cell.per_seed))


def span_of(cells: Sequence[CellMeasure]) -> tuple[float, float]:
    """The range that an axis must cover to show every seed and every bounded interval of one measure."""
    shown = [value for cell in cells for value in cell.per_seed.values() if math.isfinite(value)]
    for cell in cells:
        if cell.interval is not None and cell.interval.bounded:
            shown += [cell.interval.low, cell.interval.high]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    spare = 0.5 * abs(low) or 0.5
    return (low, high) if high > low else (low - spare, high + spare)
