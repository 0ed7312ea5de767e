"""The chart of the verdict: every cell where its figures are, filled for whom the sentence names, none without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.comparison.comparison import Comparison, compare
from harness.comparison.measures import EXACT_MATCH, SPEED
from harness.comparison.runs import Cell
from harness.report.page.document import document, write_report
from harness.report.page.labels import Box, places
from harness.report.page.verdict_chart import NARROW, WIDE, Layout, chart_of
from tests.support.fabricated_cells import Made, make_cell

STEPS = {"colocate_sync": 1.0, "separated_sync": 1.4, "one_step_off": 0.502, "delayed_update": 0.5}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two of about twice the baseline's speed, and one that is slower."""
    root = tmp_path_factory.mktemp("made_up")
    made = {name: Made(schedule=name, step_s=step, draw=len(name)) for name, step in STEPS.items()}
    return compare([make_cell(root, name, replace(one, lag=index)) for index, (name, one) in enumerate(made.items())])


def laid_out(comparison: Comparison, size: tuple[float, float] = WIDE) -> Layout:
    chart = chart_of(comparison)
    assert chart is not None
    return chart.layout(size)


def notes(comparison: Comparison) -> list[str]:
    return [words.text for words in laid_out(comparison).words if words.kind == "note"]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_every_cell_is_where_its_means_are_and_its_bars_are_the_intervals(
    comparison: Comparison, size: tuple[float, float]
) -> None:
    layout = laid_out(comparison, size)
    for axis, key in (("x", SPEED), ("y", EXACT_MATCH)):
        measure = comparison.measure(key)
        assert measure is not None
        ends = [[getattr(m, axis) for m in sorted(layout.marks, key=lambda mark: mark.cell)]]
        bars = [line for line in layout.lines if line.kind == "bar"]
        ends += [[bar.ends[at] for bar in bars[axis == "y" :: 2]] for at in ((0, 2) if axis == "x" else (1, 3))]
        intervals = [cell.interval for cell in measure.cells]
        values = [[i.value, i.low, i.high] for i in intervals if i is not None]
        places, figures = np.array(ends).ravel(), np.array(values).T.ravel()
        slope, offset = np.polyfit(figures, places, 1)
        assert places == pytest.approx(slope * figures + offset, abs=1e-6)
        assert (slope > 0) == (axis == "x")


def test_filled_are_the_cells_for_which_the_sentence_is(comparison: Comparison) -> None:
    first, tied = comparison.verdict.split(" trains ")[0], re.findall(r"different from (\w+) \(", comparison.verdict)
    marks = laid_out(comparison).marks
    filled = [comparison.cells[mark.cell].label for mark in marks if mark.filled]
    assert len(tied) == 1 and sorted(filled) == sorted([first, *tied])
    assert [mark.cell for mark in marks if mark.square] == [0]
    assert [mark.radius for mark in marks] == sorted([mark.radius for mark in marks], reverse=True), "small ones over"
    assert notes(comparison)[0] == "baseline · lag 0.00"
    assert all(re.fullmatch(r"[\d.]+x · lag [\d.]+", note) for note in notes(comparison)[1:])


def test_of_what_the_seeds_cannot_tell_apart_nothing_is_called(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, name, Made(schedule=name, noise=(0.3, 0.1), draw=len(name))) for name in STEPS]
    found = compare(cells)
    assert "does not differ significantly" in found.verdict and not any(mark.filled for mark in laid_out(found).marks)
    assert all(note.startswith("no significant difference · ") for note in notes(found)[1:])
    assert "none is significantly faster than colocate_sync" in document(found)


def test_where_the_baseline_is_fastest_it_is_filled(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, "first", Made(step_s=0.5)), make_cell(tmp_path, "second", Made(draw=1))]
    found = compare(cells)
    assert found.verdict.startswith("first trains most") and found.best == (0,)


def test_where_algorithms_differ_it_is_about_what_is_learnt(tmp_path: Path) -> None:
    def cell(label: str, exact_match: float, step_s: float) -> Cell:
        settings = (f"algorithm.correction={label}",)
        return make_cell(tmp_path, label, Made(exact_match=exact_match, step_s=step_s, settings=settings))

    axes = ("algorithm.correction", "algorithm.token_clip", "algorithm.learning_rate")
    found = compare([cell("none", 0.6, 0.5), cell("tis", 0.9, 1.0)], axes)
    assert found.best == (1,) and "higher: tis" in found.verdict
    assert re.match(r"\+\d+\.\d points · lag", notes(found)[1]), "how fast they are is no question"


def test_without_rewards_lag_stands_against_speed(tmp_path: Path) -> None:
    made = [
        Made(exact_match=None, backend="virtual", lag=lag, step_s=1 - lag / 4, schedule=name)
        for lag, name in enumerate(("colocate_sync", "one_step_off"))
    ]
    found = compare([make_cell(tmp_path, one.schedule, one) for one in made])
    titles = [words.text for words in laid_out(found).words if words.kind == "title"]
    assert titles == [
        "samples per second, simulated: faster →",
        "mean lag of a sample (iterations): how stale samples are",
    ]


def test_there_is_none_where_nothing_may_be_claimed_and_none_is_left(comparison: Comparison, tmp_path: Path) -> None:
    write_report(comparison, tmp_path)
    assert (tmp_path / "verdict.png").exists() and "(verdict.png)" in (tmp_path / "report.md").read_text()
    refused = replace(comparison, missing=("a run is not there",))
    write_report(refused, tmp_path)
    assert not list(tmp_path.glob("verdict.*")) and "verdict.png" not in (tmp_path / "report.md").read_text()
    assert "<figure" not in document(refused)
    alone = make_cell(tmp_path, "alone", Made(iterations=4), range(2))
    assert chart_of(compare([alone])) is None


def test_one_seed_has_no_bars(tmp_path: Path) -> None:
    found = compare([make_cell(tmp_path, name, Made(schedule=name, iterations=4), (0,)) for name in STEPS])
    assert not [line for line in laid_out(found).lines if line.kind == "bar"]
    assert "One seed has no interval." in document(found)


@pytest.mark.parametrize("seed", range(8))
def test_labels_of_a_crowd_hide_neither_marks_nor_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    frame = Box(0, 0, 820, 290)
    middles = rng.uniform((300, 90), (520, 200), (7, 2)).tolist()
    marks = [Box.around(x, y, 9) for x, y in middles]
    boxes = places(marks, [(100.0, 28.0)] * len(marks), frame, [])
    for number, box in enumerate(boxes):
        assert box.inside(frame)
        assert not any(box.overlap(other) for other in (*marks, *boxes[:number]))
