"""Processes that end with who they work for."""

from __future__ import annotations

import socket
import subprocess
import sys

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
