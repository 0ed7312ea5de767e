"""Fitted and predicted figures beside published ones: for people, as CSV, and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from harness.metrics.atomic_files import write_text
from harness.prediction.fit import WorkloadFit, around_s, generated_s, host_s
from harness.prediction.phases import Given
from harness.prediction.prediction import Prediction
from harness.report.plots import BLUE, GRAY, ORANGE, save_figure

READ = {
    "train": "synchronous rows, and the training phases of the others",
    "sync": "synchronous rows only",
}
"""Rows that a prediction reads, by GIVEN."""


def print_fits(fits: Iterable[WorkloadFit], console: Console) -> None:
    """Print what was fitted, to which rows, and what is left over."""
    for fit in fits:
        console.print(f"fitted to {', '.join(str(row) for row in fit.rows)}:", highlight=False)
        lengths = fit.lengths
        console.print(
            f"  {fit.tokens / 1e6:.1f} million tokens a batch, read off {fit.tokens_from}; responses log-normal, mean "
            f"{lengths.mean:,.0f} and sigma {lengths.sigma:.2f} under a cap of {lengths.cap:,}; decoding x "
            f"{fit.scale:.2f} and {1e3 * fit.step_s:.1f} ms a step more than the roofline",
            highlight=False,
        )
        for row in fit.rows:
            text = f"  {row}: {around_s(row):.0f} s around generation, {host_s(row):.0f} s on the host"
            if seconds := generated_s(row):
                fitted = fit.generated_s[row.number]
                text += f"; generates in {fitted:.0f} s as fitted, {seconds:.0f} s as published"
                text += f" ({fitted / seconds - 1:+.0%})"
            console.print(text, highlight=False)


def print_predictions(predictions: Sequence[Prediction], given: Given, console: Console) -> None:
    """A row for each prediction, its figures above what was published: narrow enough for 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False, title_justify="left")
    table.title = f"simulated; given: {READ[given]}"
    table.add_column("row")
    for heading in (
        "step s\npublished\nerror",
        "wait s\npublished\nerror s",
        "generation s\npublished",
        "speed-up\npublished",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for prediction in predictions:
        row = prediction.row
        error, error_s = prediction.step_error, prediction.wait_error_s
        table.add_row(
            str(row),
            _beside(prediction.step_s, row.step_s) + ("" if error is None else f"\n{error:+.1%}"),
            _beside(prediction.wait_s, row.wait_s) + ("" if error_s is None else f"\n{error_s:+.1f}"),
            _beside(prediction.generation_s, row.generate_sequences_s),
            _beside(prediction.speedup, prediction.published_speedup, digits=2),
        )
    console.print(table)


def _beside(predicted: float | None, published: float | None, digits: int = 1) -> str:
    """One above the other; a dash for what is not known."""
    return "\n".join("-" if value is None else f"{value:,.{digits}f}" for value in (predicted, published))


def write_csv(path: Path, predictions: Sequence[Prediction], given: Given) -> None:
    """A line per row: published, predicted, error. Seconds per step; empty where nothing was published."""
    text = io.StringIO()
    text.write(f"# simulated; given: {READ[given]}. Seconds per step; *_error relative, *_error_s in seconds.\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["line", "mode", "engine", "rollout_gpus", "train_gpus", "step_s", "step_predicted_s", "step_error", "wait_s"]
        + ["wait_predicted_s", "wait_error_s", "generate_sequences_s", "generation_predicted_s", "dropped_share"]
    )
    for prediction in predictions:
        row = prediction.row
        writer.writerow(
            [row.number, row.mode, row.engine, row.rollout_gpus, row.train_gpus]
            + [_text(row.step_s, 2), f"{prediction.step_s:.2f}", _text(prediction.step_error, 4)]
            + [_text(row.wait_s, 2), f"{prediction.wait_s:.2f}", _text(prediction.wait_error_s, 2)]
            + [_text(row.generate_sequences_s, 2), f"{prediction.generation_s:.2f}", f"{prediction.dropped:.4f}"]
        )
    write_text(path, text.getvalue())


def draw(path: Path, name: str, predictions: Sequence[Prediction], given: Given) -> None:
    """Step time, and the part of it that the trainer waits: published and predicted side by side."""
    save_figure(path, f"{name} · simulated, given {READ[given]}", lambda figure: _bars(figure, predictions))


def _bars(figure: Figure, predictions: Sequence[Prediction]) -> None:
    figure.set_size_inches(10, 1.6 + 0.7 * len(predictions))
    axes = figure.add_subplot()
    places = np.arange(len(predictions), dtype=float)
    for offset, widths, color, label in (
        (-0.2, [prediction.row.step_s or 0.0 for prediction in predictions], GRAY, "published step"),
        (-0.2, [prediction.row.wait_s or 0.0 for prediction in predictions], "0.25", "published wait"),
        (0.2, [prediction.step_s for prediction in predictions], BLUE, "predicted step"),
        (0.2, [prediction.wait_s for prediction in predictions], ORANGE, "predicted wait"),
    ):
        axes.barh(places + offset, widths, 0.36, color=color, label=label)
    for place, prediction in zip(places, predictions, strict=True):
        if prediction.step_error is not None:
            axes.annotate(
                f"{prediction.step_error:+.1%}",
                (prediction.step_s, place + 0.2),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
    axes.set_yticks(places, [str(prediction.row) for prediction in predictions])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22 - 0.3 / len(predictions)), ncols=4)


def _text(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
