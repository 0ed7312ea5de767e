"""Calls in processes of their own: all results, and nothing that outlives the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from harness.rpc.children import parallel_as_completed, parallel_map


def twice(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number, os.getpid()


@pytest.mark.parametrize("processes", [1, 2])
def test_every_result_comes_with_the_number_of_its_argument(processes: int) -> None:
    made = dict(parallel_as_completed(twice, [5, 6, 7], processes=processes, timeout_s=60, what="numbers"))
    assert [made[i][0] for i in range(3)] == [10, 12, 14]
    assert all((pid == os.getpid()) == (processes == 1) for _, pid in made.values())


def test_results_come_in_the_order_of_their_arguments() -> None:
    made = parallel_map(twice, [7, 5, 6], processes=2, timeout_s=60, what="numbers")
    assert [number for number, _ in made] == [14, 10, 12]


def test_a_failure_is_raised_here() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        list(parallel_as_completed(twice, [-1, 1], processes=2, timeout_s=60, what="numbers"))


ASKS = """
import time
from harness.rpc.children import parallel_as_completed
if __name__ == "__main__":
    list(parallel_as_completed(time.sleep, [600.0, 600.0], processes=2, timeout_s=900, what="sleepers"))
"""


def test_no_process_outlives_one_that_is_killed(tmp_path: object) -> None:
    script = os.path.join(str(tmp_path), "asks.py")
    with open(script, "w") as file:
        file.write(ASKS)
    with subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": os.getcwd()}) as asking:
        until = time.monotonic() + 60
        while len(children := psutil.Process(asking.pid).children(recursive=True)) < 3:  # and multiprocessing's own
            assert time.monotonic() < until, "waited 60 s for two processes to begin"
            time.sleep(0.05)
        asking.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
