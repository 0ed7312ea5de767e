"""Evidence and forecasts: what is not said stays open, and a verdict is given only where the draws agree."""

from __future__ import annotations

import numpy as np
import pytest

from harness.prediction.evidence import Evidence, StepRow, Workload
from harness.prediction.forecast import Forecast

ROW = StepRow("made.csv:3", "one_step_off", 2, 2)
SYNC = StepRow("made.csv:2", "colocate_sync", 4, 4)


def forecast(step_s: list[float]) -> Forecast:
    steps = np.array(step_s)
    return Forecast(ROW, SYNC, steps, np.full_like(steps, 10.0), 0 * steps, steps)


def test_a_row_says_its_own_workload_over_that_of_the_table() -> None:
    row = StepRow("made.csv:4", "fully_async", 2, 2, says=Workload(cap=100))
    evidence = Evidence("made.csv", Workload(model="qwen7b", cap=200), (SYNC,), (row,))
    assert evidence.of(row) == Workload(model="qwen7b", cap=100) and evidence.of(SYNC).cap == 200


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [([5.0] * 8 + [20.0] * 2, "faster"), ([20.0] * 9 + [5.0], "slower"), ([5.0] * 7 + [20.0] * 3, "cannot be told")],
)
def test_a_verdict_needs_four_draws_of_five(steps: list[float], verdict: str) -> None:
    assert forecast(steps).verdict == verdict


def test_a_step_as_long_as_the_reference_is_no_gain() -> None:
    assert forecast([10.0] * 5).p_faster == 0.5 and forecast([10.0] * 5).verdict == "tie"


def test_an_interval_leaves_out_as_much_above_as_below() -> None:
    assert forecast(list(np.arange(99.0) + 1)).interval() == pytest.approx((10.0, 90.0))
