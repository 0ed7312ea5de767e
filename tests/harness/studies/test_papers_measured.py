"""Figures of measured cells: means over seeds and last iterations, and what they are relative to."""

from __future__ import annotations

import pytest

from harness.studies.papers.measured import MeasuredCell, MeasuredFigure, lines_of, value_of
from harness.studies.papers.scaling import ScalingVariation, Span, jobs_of, linearity
from harness.studies.planner.candidates import Candidate
from harness.studies.planner.explore import TrialResult

FIGURE = MeasuredFigure("accuracy", "reward/exact_match", 0.5, relative_to="fresh")


def metrics(*values: float) -> list[dict[str, float]]:
    return [{"reward/exact_match": value} for value in values]


def test_a_figure_is_the_mean_of_the_last_iterations() -> None:
    assert value_of(FIGURE, metrics(0.0, 0.0, 0.4, 0.6)) == pytest.approx(0.5)


def test_both_sides_are_relative_to_one_cell() -> None:
    cells = [MeasuredCell("fresh", []), MeasuredCell("stale", [])]
    read = {"fresh": [metrics(0.8, 0.8), metrics(0.6, 0.6)], "stale": [metrics(0.3, 0.3), metrics(0.4, 0.4)]}
    published = {("fresh", "accuracy"): 90.0, ("stale", "accuracy"): 81.0}
    fresh, stale = lines_of(FIGURE, cells, read, published)
    assert (fresh.measured, fresh.published) == (1.0, 1.0)
    assert stale.measured == pytest.approx(0.5) and stale.published == pytest.approx(0.9)
    assert stale.error is None  # what is published is of another model and task


def test_linearity_is_throughput_over_devices() -> None:
    candidate = Candidate(1, 1, 0, False, 1, 1, 1, False, 1)

    def outcome(samples_per_s: float) -> TrialResult:
        return TrialResult(1.0, 1.0, samples_per_s, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0)

    span = Span("7b", ["model=qwen1.5b"], (16, 64))
    assert linearity([(candidate, outcome(10.0)), (candidate, outcome(30.0))], span) == pytest.approx(0.75)


def test_a_batch_grows_with_the_devices_where_it_is_asked_to() -> None:
    span = Span("7b", ["model=qwen1.5b", "algorithm.batch_groups=32"], (16, 64))
    fixed = jobs_of(["schedule=delayed_update"], span, ScalingVariation("fixed"))
    grown = jobs_of(["schedule=delayed_update"], span, ScalingVariation("grown", grows=True))
    assert [(job.cluster.devices, job.algorithm.batch_groups) for job in fixed] == [(16, 32), (64, 32)]
    assert [(job.cluster.devices, job.algorithm.batch_groups) for job in grown] == [(16, 32), (64, 128)]
