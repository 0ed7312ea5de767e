"""What is promised of every schedule (tests/support/invariants.py), read from the files of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.compose import choices
from harness.report.summary import summarize
from schedules import SCHEDULES
from tests.integration.conftest import FIRST_TIMEOUT_S
from tests.support.invariants import check_run, read_run

pytestmark = pytest.mark.timeout(FIRST_TIMEOUT_S)

FRESH = ["colocated", "separated", "separated_streaming", "async_0"]
AHEAD = {
    "one_step_off": 1,
    "k_step_off": 3,
    "delayed_update": 1,
    "half_step": 1,
    "completion_wait": 1,
    "completion_drop": 1,
    "drained": 1,
}
"""The worst lag that is possible under the settings of these runs."""


@pytest.mark.parametrize("name", FRESH)
def test_a_real_run_without_staleness_keeps_what_its_schedule_promises(fresh: dict[str, Path], name: str) -> None:
    check_run(read_run(fresh[name]))
    assert summarize(fresh[name]).lag_worst == 0


@pytest.mark.parametrize("name", AHEAD)
def test_a_real_run_ahead_of_training_keeps_what_its_schedule_promises(ahead: dict[str, Path], name: str) -> None:
    check_run(read_run(ahead[name]))
    assert summarize(ahead[name]).lag_worst <= AHEAD[name]


@pytest.mark.parametrize(("name", "worst"), [("one_step_off", 1), ("k_step_off", 3), ("delayed_update", 1)])
def test_schedules_of_a_fixed_lag_have_it_for_real(ahead: dict[str, Path], name: str, worst: int) -> None:
    assert summarize(ahead[name]).lag_worst == worst


def test_every_schedule_ran(fresh: dict[str, Path], ahead: dict[str, Path]) -> None:
    ran = {read_run(folder).config.schedule.name for folder in (*fresh.values(), *ahead.values())}
    assert ran == set(SCHEDULES) == set(choices("schedule"))
