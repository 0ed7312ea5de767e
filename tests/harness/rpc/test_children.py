"""Processes that end with who they work for."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

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
