"""A fault of each kind on a real run: the same command goes on, and what is promised holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.acceptance.chaos.real import RealFault, feel
from tests.support.real_runs import RUN_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * RUN_TIMEOUT_S)]

GOES_ON = {
    "SIGSTOP": RealFault(1, "one_step_off", "SIGSTOP", "host", 4, 0.2),
    "delayed": RealFault(2, "fully_async", "delayed", "device", 4, 0.2),
    "SIGKILL": RealFault(3, "separated_sync", "SIGKILL", "queue", 4, 0.0),  # all go back to the last checkpoint
}
ENDS_IN_A_LINE = {
    "torn": (RealFault(4, "k_step_off", "torn", "host", 4, 0.0), "reward[0] died"),
    "refused": (RealFault(5, "delayed_update", "refused", "queue", 4, 0.0), "transfer queue"),
    "damage": (RealFault(6, "colocate_sync", "damage", "random bytes", 6, 0.0), "killed by signal 9"),
}


@pytest.mark.parametrize("fault", GOES_ON)
def test_a_run_goes_on(fault: str, tmp_path: Path) -> None:
    felt = feel(GOES_ON[fault], tmp_path)
    assert felt.problems == [] and felt.happened == [] and felt.seconds is not None


@pytest.mark.parametrize("fault", ENDS_IN_A_LINE)
def test_a_run_ends_in_a_line_and_the_same_command_finishes_it(fault: str, tmp_path: Path) -> None:
    struck, said = ENDS_IN_A_LINE[fault]
    felt = feel(struck, tmp_path)
    assert felt.problems == [] and said in felt.happened[0]
