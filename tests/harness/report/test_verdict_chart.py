"""The chart of the verdict: every cell where its figures are, filled for whom the sentence names, none without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.comparison.comparison import Comparison, compare
from harness.comparison.measures import SPEED
from harness.comparison.runs import Cell
from harness.report.page import pictures
from harness.report.page.document import document, write_report
from harness.report.page.verdict_chart import NARROW, WIDE, Box, chart_of, places
from tests.support.fabricated_cells import Made, make_cell

STEPS = {"colocate_sync": 1.0, "separated_sync": 1.4, "one_step_off": 0.502, "delayed_update": 0.5}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two of about twice the baseline's speed, and one that is slower."""
    root = tmp_path_factory.mktemp("made_up")
    made = {name: Made(schedule=name, step_s=step, draw=len(name)) for name, step in STEPS.items()}
    return compare([make_cell(root, name, replace(one, lag=index)) for index, (name, one) in enumerate(made.items())])


def drawn(comparison: Comparison, size: tuple[float, float] = WIDE) -> Axes:
    chart = chart_of(comparison)
    assert chart is not None
    figure = Figure()
    chart.draw(size, figure)
    return figure.axes[0]


def marks(comparison: Comparison, size: tuple[float, float] = WIDE) -> dict[int, Line2D]:
    """By the number of their cell, in the order in which they are drawn."""
    of = {str(line.get_gid()): line for line in drawn(comparison, size).lines}
    return {int(name.removeprefix("mark ")): line for name, line in of.items() if name.startswith("mark ")}


def bars(comparison: Comparison, size: tuple[float, float] = WIDE) -> list[Line2D]:
    return [line for line in drawn(comparison, size).lines if line.get_gid() == "bar"]


def notes(comparison: Comparison) -> list[str]:
    return [text.get_text() for text in drawn(comparison).texts if text.get_gid() == "note"]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_every_cell_is_where_its_means_are_and_its_bars_are_the_intervals(
    comparison: Comparison, size: tuple[float, float]
) -> None:
    found = marks(comparison, size)
    for axis, key, factor in ((0, SPEED, 1), (1, "eval/sampled", 100)):
        measure = comparison.measure(key)
        assert measure is not None
        for index, (cell, bar) in enumerate(zip(measure.cells, bars(comparison, size)[axis::2], strict=True)):
            assert cell.interval is not None
            assert found[index].get_data()[axis] == pytest.approx([factor * cell.value])
            assert bar.get_data()[axis] == pytest.approx([factor * cell.interval.low, factor * cell.interval.high])
            assert bar.get_data()[1 - axis] == pytest.approx([found[index].get_data()[1 - axis][0]] * 2)
    axes = drawn(comparison, size)
    for line in axes.lines:
        assert line.get_gid() is None or axes.viewLim.contains(*np.mean(line.get_data(), axis=1))


def filled(found: dict[int, Line2D]) -> list[int]:
    return [index for index, mark in found.items() if mark.get_markerfacecolor() != "white"]


def test_filled_are_the_cells_for_which_the_sentence_is(comparison: Comparison) -> None:
    first, tied = comparison.verdict.split(" trains ")[0], re.findall(r"different from (\w+) \(", comparison.verdict)
    found = marks(comparison)
    assert len(tied) == 1 and sorted(comparison.cells[index].label for index in filled(found)) == sorted([first, *tied])
    assert [index for index, mark in found.items() if mark.get_marker() == "s"] == [0]
    sizes = [mark.get_markersize() for mark in found.values()]
    assert sizes == sorted(sizes, reverse=True), "small ones over"
    assert notes(comparison)[0] == "baseline · lag 0.00"
    assert all(re.fullmatch(r"[\d.]+x · lag [\d.]+", note) for note in notes(comparison)[1:])


def test_the_front_joins_what_no_other_cell_is_ahead_of_in_both_means(tmp_path: Path) -> None:
    of = {
        "colocate_sync": (1.0, 0.9),
        "separated_sync": (1.4, 0.8),
        "one_step_off": (0.6, 0.7),
        "half_step": (0.5, 0.5),
    }
    made = {
        name: Made(schedule=name, step_s=step, exact_match=match, noise=(0.0, 0.0))
        for name, (step, match) in of.items()
    }
    found = compare([make_cell(tmp_path, name, one) for name, one in made.items()])
    (front,) = [line for line in drawn(found).lines if line.get_gid() == "front"]
    at = marks(found)
    assert [*zip(*front.get_data(), strict=True)] == [
        pytest.approx(tuple(float(value[0]) for value in at[index].get_data())) for index in (0, 2, 3)
    ]


def test_of_what_the_seeds_cannot_tell_apart_nothing_is_called(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, name, Made(schedule=name, noise=(0.3, 0.1), draw=len(name))) for name in STEPS]
    found = compare(cells)
    assert "does not differ significantly" in found.verdict and not filled(marks(found))
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
    axes = drawn(found)
    assert axes.get_xlabel() == "samples per second, simulated: faster →"
    assert axes.get_ylabel() == "mean lag of a sample (iterations):\nhow stale samples are"


def test_there_is_none_where_nothing_may_be_claimed_and_none_is_left(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_blank(folder: Path, name: str, title: str, draw: object) -> list[Path]:
        (path := folder / f"{name}.png").touch()
        return [path]

    monkeypatch.setattr(pictures, "save_in_every_format", left_blank)
    write_report(comparison, tmp_path)
    assert (tmp_path / "verdict.png").exists() and "(verdict.png)" in (tmp_path / "report.md").read_text()
    refused = replace(comparison, missing=("a run is not there",))
    write_report(refused, tmp_path)
    assert not list(tmp_path.glob("verdict.*")) and "verdict.png" not in (tmp_path / "report.md").read_text()
    assert "<figure" not in document(refused)
    alone = make_cell(tmp_path, "alone", Made(iterations=4), range(2))
    assert chart_of(compare([alone])) is None


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
