"""The processes that tests run functions in."""

import ctypes
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.processes import run_in_processes


def threads_of_the_server() -> list[str]:
    return [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{os.getppid()}/task").iterdir()]


def test_they_are_forked_where_no_other_thread_runs() -> None:
    """Of a lock that another thread held at a fork, nobody is left to let go."""
    (threads,) = run_in_processes(threads_of_the_server, [()], timeout_s=60)
    assert len(threads) == 1, threads


def end_by_a_thread_without_python() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(30)


def test_of_one_that_a_native_thread_ended_it_is_told_why_and_where() -> None:
    """As Gloo's own ends its process where a peer sends a tensor of another size."""
    with pytest.raises(RuntimeError) as caught:
        run_in_processes(end_by_a_thread_without_python, [()], timeout_s=60)
    said = str(caught.value)
    assert "process 0 died without a word, exit code -6" in said
    assert re.search(r"frame #\d+: abort", said), said  # the thread that ended the process
    assert re.search(r"Fatal Python error: Aborted.* in end_by_a_thread_without_python", said, re.DOTALL)
