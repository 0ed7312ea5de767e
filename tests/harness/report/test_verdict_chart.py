"""The chart of the verdict: every cell by its paired differences, bold whom the sentence names, none without one."""

import re
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.comparison.comparison import Comparison, compare
from harness.comparison.measures import LAG, SPEED
from harness.comparison.runs import Cell
from harness.report.page import pictures
from harness.report.page.document import document, write_report
from harness.report.page.verdict_chart import NARROW, WIDE, draw_panels, verdict_table
from tests.support.fabricated_cells import Made, make_cell

STEPS = {"colocate_sync": 1.0, "separated_sync": 1.4, "one_step_off": 0.502, "delayed_update": 0.5}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two of about twice the baseline's speed, and one that is slower."""
    root = tmp_path_factory.mktemp("made_up")
    made = {name: Made(schedule=name, step_s=step, draw=len(name)) for name, step in STEPS.items()}
    return compare([make_cell(root, name, replace(one, lag=index)) for index, (name, one) in enumerate(made.items())])


def drawn(comparison: Comparison, width: float = WIDE[0]) -> list[Axes]:
    """Panels, as on a page of this width."""
    data = verdict_table(comparison)
    figure = Figure((width / 72, width / 72))
    draw_panels(figure, data)
    return figure.axes


def lines(panel: Axes, gid: str) -> dict[int, Line2D]:
    """Marks or intervals by their row."""
    return {int(np.ravel(line.get_ydata())[0]): line for line in panel.lines if line.get_gid() == gid}


@pytest.mark.parametrize("width", [WIDE[0], NARROW[0]])
def test_every_cell_is_drawn_by_its_paired_differences_from_the_baseline(comparison: Comparison, width: float) -> None:
    panels = drawn(comparison, width)
    for panel, (key, factor) in zip(panels, ((SPEED, 1), ("eval/sampled", 100), (LAG, 1)), strict=True):
        measure = comparison.measure(key)
        means, intervals, values = lines(panel, "mean"), lines(panel, "interval"), []
        assert list(means) == list(intervals) == [1, 2, 3], "but the baseline"
        for row in means:
            found = measure.against_baseline(row)
            assert found is not None and found.paired
            values += found.per_seed.values()
            mean, *ends = (factor * value for value in astuple(found.interval))
            assert means[row].get_xdata() == pytest.approx([mean])
            assert intervals[row].get_xdata() == pytest.approx(ends)
            assert (means[row].get_markerfacecolor() != "white") == found.distinguishable
        (none,) = [line for line in panel.lines if line.get_gid() == "none"]
        assert none.get_xdata()[0] == lines(panel, "baseline")[0].get_xdata()[0] == (key == SPEED)
        dots = sorted(float(x) for of_cell in panel.collections for x in of_cell.get_offsets()[:, 0])
        assert dots == pytest.approx(sorted(factor * value for value in values))
        assert panel.viewLim.x0 < dots[0] and dots[-1] < panel.viewLim.x1
    apart = {panel.get_position().x0 for panel in panels}
    assert len(apart) == (3 if width == WIDE[0] else 1), "below each other where it is narrow"


def names(panel: Axes) -> dict[str, bool]:
    """Whether it is bold, by name."""
    return {name.get_text(): name.get_fontweight() == "bold" for name in panel.get_yticklabels()}


@pytest.mark.slow
def test_bold_are_the_cells_of_the_sentence_and_no_ties(comparison: Comparison, tmp_path: Path) -> None:
    first, tied = comparison.verdict.split(" trains ")[0], re.findall(r"told apart from (\w+) \(", comparison.verdict)
    bold = names(drawn(comparison)[0])
    assert list(bold) == list(STEPS) and len(tied) == 1
    assert {name for name, is_bold in bold.items() if is_bold} == {first, *tied}
    values = [text.get_text() for text in drawn(comparison)[0].texts]
    assert len(values) == 3 and all(re.fullmatch(r"[\d.]+x", value) for value in values)
    cells = [make_cell(tmp_path, name, Made(schedule=name, noise=(0.3, 0.1), draw=len(name))) for name in STEPS]
    found = compare(cells)
    speed = drawn(found)[0]
    assert "is not told apart" in found.verdict and not any(names(speed).values())
    assert all(mark.get_markerfacecolor() == "white" for mark in lines(speed, "mean").values())
    assert "Bold" not in document(found)
    cells = [make_cell(tmp_path, "first", Made(step_s=0.5)), make_cell(tmp_path, "second", Made(draw=1))]
    found = compare(cells)
    assert found.verdict.startswith("first trains most") and found.best == (0,)


def test_where_algorithms_differ_learning_is_drawn_and_without_rewards_lag(tmp_path: Path) -> None:
    def cell(label: str, exact_match: float, step_s: float) -> Cell:
        settings = (f"algorithm.correction={label}",)
        return make_cell(tmp_path, label, Made(exact_match=exact_match, step_s=step_s, settings=settings))

    axes = ("algorithm.correction", "algorithm.token_clip", "algorithm.learning_rate")
    found = compare([cell("none", 0.6, 0.5), cell("tis", 0.9, 1.0)], axes)
    assert found.best == (1,) and "higher: tis" in found.verdict and names(drawn(found)[0])["tis"]
    made = [
        Made(exact_match=None, backend="virtual", lag=lag, step_s=1 - lag / 4, schedule=name)
        for lag, name in enumerate(("colocate_sync", "one_step_off"))
    ]
    found = compare([make_cell(tmp_path, one.schedule, one) for one in made])
    speed, lag = drawn(found)
    assert "samples per second (ratio), simulated, higher is better" == " ".join(speed.get_xlabel().split())
    assert " ".join(lag.get_xlabel().split()) == "mean lag of a sample (iterations)"


@pytest.mark.slow
def test_there_is_none_where_nothing_may_be_claimed_and_none_is_left(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_blank(folder: Path, name: str, *_: object) -> list[Path]:
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
    assert verdict_table(compare([alone])) is None
