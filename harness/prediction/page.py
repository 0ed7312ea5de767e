"""Forecasts beside published figures: for people, as CSV, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from harness.metrics.atomic_files import write_text
from harness.metrics.tables import Table
from harness.prediction.forecast import SURE, Forecast, interval
from harness.prediction.prediction import Predicted
from harness.report.drawing import legend_below, save_figure
from harness.report.palette import BLUE, ORANGE, OTHER

READ = {"train": "synchronous rows, and the training phases of the others", "sync": "synchronous rows only"}
"""Rows that a prediction reads, by GIVEN."""

COLUMNS = (
    *("line", "mode", "options", "engine", "rollout_gpus", "train_gpus", "step_s", "step_predicted_s", "step_low_s"),
    *("step_high_s", "reference", "reference_s", "speedup", "speedup_predicted", "speedup_low", "speedup_high"),
    *("p_faster", "verdict", "wait_s", "wait_predicted_s", "generate_sequences_s", "generation_predicted_s", "draws"),
    *("model_difference", "given", "assumed", "settles", "implausible"),
)


def print_predictions(predicted: Predicted, console: Console) -> None:
    """A row for each forecast; below, what it stands on and what would settle it."""
    rows = [
        (
            str(one.row),
            _figure(one.row.step_s, 1),
            f"{one.median:,.1f}\n{_range(one.interval(), 0)}",
            _figure(published_speedup(one), 2),
            f"{np.median(one.speedup):.2f}\n{_range(interval(one.speedup), 2)}",
            f"{one.verdict}\n{one.p_faster:.0%}",
        )
        for one in predicted.forecasts
    ]
    step, speedup = (f"{what}, median\n{what}, {SURE:.0%}" for what in ("step s", "speed-up"))
    columns = ("row", "step s, published", step, "speed-up, published", speedup, "verdict\nP(faster)")
    console.print(Table(f"simulated; given: {READ[predicted.given]}", columns, rows))
    for one in predicted.forecasts:
        texts = [f"given: {', '.join(one.given)}", f"assumed: {', '.join(one.assumed)}"]
        if one.verdict == "cannot be told":
            texts.append(f"settled most by: {one.settles or 'nothing alone'}")
        if one.row.label in predicted.checks:
            texts.append(f"the schedule's own file differs by {predicted.checks[one.row.label]:.2%} of a step at most")
        if one.implausible:
            texts.insert(0, one.implausible)
        console.print(f"{one.row}, beside {one.reference}", style="bold", highlight=False, markup=False)
        for text in texts:
            console.print(f"  {text}", highlight=False, markup=False)


def published_speedup(forecast: Forecast) -> float | None:
    """Published step of the reference over that of the row; None where one of them is missing."""
    of, own = forecast.reference.step_s, forecast.row.step_s
    return of / own if of and own else None


def write_csv(path: Path, predicted: Predicted) -> None:
    """A line per row. Seconds per step; *_low and *_high bound 80 % of the draws; empty where nothing was published."""
    text = io.StringIO()
    text.write(
        f"# simulated; given: {READ[predicted.given]}. Seconds per step; low and high: {SURE:.0%} of the draws.\n"
    )
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in predicted.forecasts:
        row, step, speedup = one.row, one.interval(), interval(one.speedup)
        options = " ".join(f"{name}={value}" for name, value in row.options.items())
        writer.writerow(
            [row.label.rpartition(":")[2], row.schedule, options, row.engine, row.rollout_devices, row.train_devices]
            + [_text(value, 2) for value in (row.step_s, one.median, *step)]
            + [str(one.reference), f"{np.median(one.reference_s):.2f}"]
            + [_text(value, 4) for value in (published_speedup(one), float(np.median(one.speedup)), *speedup)]
            + [f"{one.p_faster:.3f}", one.verdict, _text(row.wait_s, 2), f"{np.median(one.wait_s):.2f}"]
            + [_text(row.generate_s, 2), f"{np.median(one.generation_s):.2f}", len(one.step_s)]
            + [_text(predicted.checks.get(row.label), 6), *map("; ".join, (one.given, one.assumed))]
            + [one.settles, one.implausible]
        )
    write_text(path, text.getvalue())


def draw(path: Path, name: str, predicted: Predicted) -> None:
    """Step of each row: median and interval, beside what was published and the step of its reference."""
    title = f"{name} · simulated, given {READ[predicted.given]}"
    save_figure(path, title, lambda figure: _intervals(figure, predicted.forecasts))


def _intervals(figure: Figure, forecasts: Sequence[Forecast]) -> None:
    figure.set_size_inches(10, 1 + 0.6 * len(forecasts))
    axes, right = figure.add_subplot(), 0.0
    for place, one in enumerate(forecasts):
        low, high = one.interval()
        reference = float(np.median(one.reference_s))
        axes.barh(place, high - low, 0.4, left=low, color=BLUE, alpha=0.35, label=f"{SURE:.0%} of draws")
        axes.plot([one.median], [place], "o", color=BLUE, label="median")
        axes.plot([reference] * 2, [place - 0.35, place + 0.35], color=OTHER, label="synchronous")
        if one.row.step_s:
            axes.plot([one.row.step_s], [place], "D", color=ORANGE, label="published")
        end = max(high, reference, one.row.step_s or 0.0)
        text = f"{one.verdict}, P {one.p_faster:.0%}"
        axes.annotate(text, (end, place), xytext=(8, 0), textcoords="offset points", va="center")
        right = max(right, 1.35 * end)  # room for verdicts
    axes.set(yticks=range(len(forecasts)), yticklabels=[str(one.row) for one in forecasts], xlim=(0, right))
    axes.set(ylim=(len(forecasts) - 0.5, -0.5), xlabel="seconds per step")
    axes.grid(axis="y", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    legend_below(figure, [*dict(zip(labels, handles, strict=True)).values()])


def _range(ends: tuple[float, float], digits: int) -> str:
    return f"{ends[0]:,.{digits}f} to {ends[1]:,.{digits}f}"


def _figure(value: float | None, digits: int) -> str:
    return _text(value, digits) or "-"


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
