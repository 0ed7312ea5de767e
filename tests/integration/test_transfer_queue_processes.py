"""Many processes on one queue, some of which are killed: see `tests/benchmarks/transfer_queue_stress.py`."""

import pytest

from tests.support.project import python


@pytest.mark.slow
def test_16_producers_and_64_consumers_do_each_row_once_though_some_are_killed_and_leave_nothing_behind() -> None:
    done = python("-W", "error", "-m", "tests.benchmarks.transfer_queue_stress", "--seconds", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    print(done.stdout)
