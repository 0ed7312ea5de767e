"""Every backend that needs no other server, against the model in plain Python: any order of calls, exactly once."""

from __future__ import annotations

from harness.transfer_queue.storage.inline import InlineBackend
from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.queue_machine import SPEC, TASKS, run_machine
from tests.support.queue_sides import LocalSide, SocketSide

SMALL = ShmBackend(inline_bytes=256, mapped_bytes=1024)
"""Of puts as small as the machine's, some travel inline, some are copied, and some are mapped."""


def test_the_local_queue_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "finished"], 5)
    run_machine(lambda: LocalSide(SPEC), cases=60, steps=40, least=least)


def test_the_queue_in_shared_memory_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "finished", "deaths"], 2)
    run_machine(lambda: SocketSide(SPEC, SMALL), cases=25, steps=40, least=least)


def test_the_queue_over_tcp_behaves_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "deaths"], 1)
    run_machine(lambda: SocketSide(SPEC, InlineBackend(), "tcp:127.0.0.1:0"), cases=10, steps=30, least=least)
