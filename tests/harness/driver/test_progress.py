"""What a run looks like while it runs: a panel on a terminal, lines elsewhere."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from harness.driver.progress import ProgressDisplay


def metrics(iteration: int, *, seconds: float = 0.5, lag: float = 1.0, exact: float = 0.5) -> dict[str, float]:
    return {
        "iteration": float(iteration),
        "staleness/max": lag,
        "time/iteration_s": seconds,
        "throughput/samples_per_s": 128 / seconds,
        "reward/exact_match": exact,
        "reward/mean": exact + 0.25,
    }


def plain() -> tuple[Console, StringIO]:
    told = StringIO()
    return Console(file=told, width=120, force_terminal=False), told


def test_without_a_terminal_it_prints_plain_lines() -> None:
    console, told = plain()
    with ProgressDisplay(console, "a job | seed 0", 20, every_s=0.0) as display:
        display.doing("rollout", "batch 0")
        display.iteration(metrics(0))
        display.iteration(metrics(1, lag=2.0, exact=1.0))
    assert told.getvalue().splitlines() == [
        "a job | seed 0",
        "iteration 1/20  exact match 0.50  reward 0.75  256 samples/s  worst lag 1",
        "iteration 2/20  exact match 0.75  reward 1.00  256 samples/s  worst lag 2",
    ]


def test_lines_come_no_oftener_than_asked() -> None:
    console, told = plain()
    with ProgressDisplay(console, "a job", 20, every_s=3600.0) as display:
        for i in range(10):
            display.iteration(metrics(i))
    assert told.getvalue() == "a job\n"


def test_on_a_terminal_it_shows_iteration_figures_and_what_each_role_does() -> None:
    told = StringIO()
    with ProgressDisplay(Console(file=told, width=120, force_terminal=True, color_system=None), "a job", 20) as display:
        display.doing("rollout", "batch 7")
        display.doing("actor", "publishing version 7")
        display.iteration(metrics(6, lag=2.0))
    shown = told.getvalue()
    for text in ("a job", "7/20", "worst lag 2", "rollout", "batch 7", "actor", "publishing version 7"):
        assert text in shown


def test_a_terminal_without_an_iteration_says_that_it_waits() -> None:
    told = StringIO()
    with ProgressDisplay(Console(file=told, width=120, force_terminal=True), "a job", 20):
        pass
    assert "waiting for the first iteration" in told.getvalue()


def test_rates_are_those_of_recent_iterations_and_the_worst_lag_is_of_all() -> None:
    console, told = plain()
    with ProgressDisplay(console, "a job", 100, every_s=0.0) as display:
        display.iteration(metrics(0, seconds=100.0, lag=3.0, exact=0.0))
        for i in range(1, 11):
            display.iteration(metrics(i))
    assert told.getvalue().splitlines()[-1].endswith("exact match 0.50  reward 0.75  256 samples/s  worst lag 3")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failure_leaves_the_terminal_usable_and_goes_on(terminal: bool) -> None:
    told = StringIO()
    with (
        pytest.raises(RuntimeError, match="broken"),
        ProgressDisplay(Console(file=told, force_terminal=terminal), "a", 2),
    ):
        raise RuntimeError("broken")
    if terminal:
        assert told.getvalue().count("\x1b[?25h") == 1, "the cursor is back"
