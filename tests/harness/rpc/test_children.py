"""Processes that end with who they work for."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from harness.rpc.children import parallel_as_completed, parallel_map
from harness.rpc.process_id import descendants, end_within, left_after, process_id

STUCK = """
import socket, sys, time
from harness.rpc.children import end_with_peer
peer = socket.socket(fileno=int(sys.argv[1]))
end_with_peer(lambda: [peer], 0.0)
print("stuck", flush=True)
time.sleep(600)
"""


def test_a_process_whose_event_loop_is_stuck_ends_with_its_peer_and_not_before() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", STUCK, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True) as process:
        theirs.close()
        try:
            assert process.stdout is not None and process.stdout.readline() == "stuck\n"
            ours.sendall(b"what nobody reads is no end")
            assert process.poll() is None
            ours.close()
            assert process.wait(60) == 1
        finally:
            process.kill()


def test_all_that_a_process_started_is_found_and_ended_and_no_process_that_got_its_number() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True) as parent:
        until = time.monotonic() + 60
        while len(found := descendants(parent.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        every = [process_id(parent.pid), *found]
        assert [one.alive for one in every] == 3 * [True]
        later = replace(every[0], started=every[0].started + 1)
        later.kill()
        assert not later.alive and every[0].alive
        end_within(0.01, every)
        assert not left_after(60, every)  # on a machine that does much else
        with pytest.raises(ProcessLookupError):  # nor is it left as a zombie
            process_id(parent.pid)
    assert descendants(parent.pid) == []


def twice(number: int) -> tuple[int, int]:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number, os.getpid()


@pytest.mark.parametrize("processes", [1, 2])
def test_every_result_comes_with_the_number_of_its_argument(processes: int) -> None:
    made = dict(parallel_as_completed(twice, [5, 6, 7], processes=processes, timeout_s=60, what="numbers"))
    assert [made[i][0] for i in range(3)] == [10, 12, 14]
    assert all((pid == os.getpid()) == (processes == 1) for _, pid in made.values())


def test_results_come_in_order_and_a_failure_is_raised_here() -> None:
    made = parallel_map(twice, [7, 5, 6], processes=2, timeout_s=60, what="numbers")
    assert [number for number, _ in made] == [14, 10, 12]
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
