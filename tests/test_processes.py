"""The processes that tests run functions in."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore, all_reduce, init_process_group

from tests.support.processes import run_in_processes


def threads_of_the_server() -> list[str]:
    return [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{os.getppid()}/task").iterdir()]


def test_they_are_forked_where_no_other_thread_runs() -> None:
    """Of a lock that another thread held at a fork, nobody is left to let go."""
    (threads,) = run_in_processes(threads_of_the_server, [()], timeout_s=60)
    assert len(threads) == 1, threads


def sum_unequal_tensors(rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    init_process_group("gloo", store=store, rank=rank, world_size=2)
    all_reduce(torch.ones(10 if rank else 100_000))


def test_of_one_that_a_thread_of_gloo_ended_it_is_told_why_and_where() -> None:
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as caught:
        run_in_processes(sum_unequal_tensors, [(rank, store.port) for rank in range(2)], timeout_s=60)
    said = str(caught.value)
    assert "process 1 died without a word, exit code -6\nterminate called after throwing" in said
    assert "Received data size doesn't match expected size" in said
    assert "gloo::transport::tcp::Loop::run()" in said  # the thread that ended the process
    assert re.search(r"Fatal Python error: Aborted.* in sum_unequal_tensors", said, re.DOTALL)
