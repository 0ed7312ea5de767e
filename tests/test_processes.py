"""The processes that tests run functions in."""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_in_processes


def threads_of_the_server() -> list[str]:
    return [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{os.getppid()}/task").iterdir()]


def test_they_are_forked_where_no_other_thread_runs() -> None:
    """Of a lock that another thread held at a fork, nobody is left to let go."""
    (threads,) = run_in_processes(threads_of_the_server, [()], timeout_s=60)
    assert len(threads) == 1, threads


def die(number: int) -> None:
    if number == 1:
        os.write(2, b"terminate called\n")
        os.abort()


def test_one_that_dies_is_told_with_what_it_said_last() -> None:
    with pytest.raises(RuntimeError, match=r"process 1 died .* -6\nterminate called\nFatal Python error: Aborted"):
        run_in_processes(die, [(0,), (1,)], timeout_s=60)
