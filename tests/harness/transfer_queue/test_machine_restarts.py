"""The queue against its model, while it ends and is loaded again: rows, readiness, hand-outs and open leases go on."""

from __future__ import annotations

from harness.transfer_queue.storage.shm import ShmBackend
from tests.support.queue_machine import SPEC, TASKS, run_machine
from tests.support.queue_restarts import JournaledSide, SavedSide, SavedSocketSide


def test_a_queue_that_was_saved_and_loaded_goes_on_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "finished", "restarts"], 2)
    run_machine(lambda: SavedSide(SPEC), cases=25, steps=40, least=least)


def test_a_queue_that_died_and_had_a_journal_goes_on_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "finished", "restarts"], 2)
    run_machine(lambda: JournaledSide(SPEC), cases=25, steps=40, least=least)


def test_a_server_that_was_saved_and_loaded_goes_on_as_its_model() -> None:
    least = dict.fromkeys([*TASKS, "deaths", "restarts"], 1)
    backend = ShmBackend(inline_bytes=256, mapped_bytes=1024)
    run_machine(lambda: SavedSocketSide(SPEC, backend), cases=10, steps=40, least=least)
