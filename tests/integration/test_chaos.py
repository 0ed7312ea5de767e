"""Faults on real runs: one is of a connection, one is followed by a damaged checkpoint. The same command goes on, and
what is promised holds. `make chaos REAL=` has those of every kind; what a run overcomes by itself: test_restarts."""

from pathlib import Path

import pytest

from harness.acceptance.chaos import real
from harness.acceptance.chaos.real import RealFault, feel
from tests.support.real_runs import RUN_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * RUN_TIMEOUT_S)]

ENDS_IN_A_LINE = {
    "torn": (RealFault(4, "k_step_off", "torn", "host", 4, 0.0), "reward[0] died"),
    "damage": (RealFault(6, "colocate_sync", "damage", "random bytes", 6, 0.0), "killed by signal 9"),
}


@pytest.mark.parametrize("fault", ENDS_IN_A_LINE)
def test_a_run_ends_in_a_line_and_the_same_command_finishes_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "_JOB", [*real._JOB, "loggers=[]"])
    struck, said = ENDS_IN_A_LINE[fault]
    felt = feel(struck, tmp_path)
    assert felt.problems == [] and said in felt.happened[0]
