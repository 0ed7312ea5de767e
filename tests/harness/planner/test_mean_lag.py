"""The mean lag in closed form, against the schedule's own file on the event model."""

from dataclasses import replace

import numpy as np
import pytest

from harness.planner.mean_lag import Flow, by_applied_compute, in_completion_order, in_fifo_order, newer
from harness.studies.staleness import BUSY, FIXED, flows, fully_async, page, simulated, study

APART = 0.15
"""Iterations: of 30 such jobs none was further off."""


def light(count: int, slower: tuple[float, float]) -> list[Flow]:
    """Random jobs as the formulas assume: light tails, one pool clearly slower."""
    random = np.random.default_rng(1)
    return [
        replace(flow, eta=8.0, train_s=flow.generate_s * random.uniform(*slower))
        for flow in flows(random, count, tails=(0.1, 0.3))
    ]


@pytest.mark.parametrize("flow", light(8, slower=(0.3, 0.8)), ids=str)
def test_where_rollout_is_slower_the_lag_is_that_of_littles_law(flow: Flow) -> None:
    first, of_all = simulated(flow, fully_async(flow))
    assert in_fifo_order(flow) == pytest.approx(first, abs=APART)
    assert in_fifo_order(flow) - newer(flow) == pytest.approx(of_all, abs=APART)
    completed, _ = simulated(flow, fully_async(flow, "schedule.order=completion"))
    assert in_completion_order(flow) == pytest.approx(completed, abs=APART)


@pytest.mark.parametrize("flow", light(4, slower=(1.3, 2.0)), ids=str)
def test_where_training_is_slower_the_lag_is_what_the_dispatch_rule_allows(flow: Flow) -> None:
    ahead = replace(flow, eta=1.5)
    assert in_fifo_order(ahead) == in_completion_order(ahead) == 1.5
    assert simulated(ahead, fully_async(ahead))[0] == pytest.approx(1.5, abs=0.02)


def test_the_page_and_littles_law_say_how_far_apart_they_are() -> None:
    for flow in light(8, slower=(0.3, 0.8)):
        rho = flow.train_s / flow.generate_s
        streams = in_completion_order(flow) - (flow.train_s / flow.batch + flow.transfer_s) / flow.period_s
        assert by_applied_compute(flow) == pytest.approx(streams + rho, abs=0.02)
    text = page(study(count=8), {"half_step": 0.5})
    assert "| half_step | 1/2 | 0.5 | 0.50 |" in text and "| sigma | jobs |" in text
    assert "nan" not in text.partition("## Where they part")[0]


@pytest.mark.parametrize("schedule", FIXED)
def test_a_schedule_lags_as_its_formula_says_where_training_is_slower(schedule: str) -> None:
    assert simulated(BUSY, f"schedule={schedule}".split())[0] == pytest.approx(FIXED[schedule][1], abs=0.1)
