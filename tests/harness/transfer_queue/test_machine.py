"""Every implementation that needs no other server, against the one model in plain Python: any order of calls, exactly
once."""

import pytest

from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.queue_machine import TASKS, TIMED, UNTIMED, run_machine
from tests.support.queue_sides import LocalSide, SavedSide, SavedSocketSide, SocketSide

SMALL = ShmBackend(inline_bytes=256, mapped_bytes=1024)
"""Of puts as small as the machine's, some travel inline, some are copied, and some are mapped."""


def test_the_queue_in_one_event_loop_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "first", "limited", "dropped", "finished", "expired"], 20)
    run_machine(lambda: LocalSide(TIMED), cases=100, steps=50, least=least)


@pytest.mark.slow
def test_a_queue_that_was_saved_and_loaded_goes_on_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "first", "finished", "expired", "restarts"], 2)
    run_machine(lambda: SavedSide(TIMED), cases=40, steps=40, least=least)


def test_the_queue_in_shared_memory_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "finished", "deaths"], 2)
    run_machine(lambda: SocketSide(UNTIMED, SMALL), cases=25, steps=40, least=least)


@pytest.mark.slow
def test_the_queue_over_tcp_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "deaths"], 1)
    run_machine(lambda: SocketSide(UNTIMED, InlineBackend(), "tcp:127.0.0.1:0"), cases=10, steps=30, least=least)


@pytest.mark.slow
def test_a_server_that_was_saved_and_loaded_goes_on_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "deaths", "restarts"], 1)
    run_machine(lambda: SavedSocketSide(UNTIMED, SMALL), cases=10, steps=40, least=least)
