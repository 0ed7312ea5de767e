"""A controller that records what changed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

from harness.transfer_queue.columns import Rows, as_integers
from harness.transfer_queue.control.asks import Answer, Ask
from harness.transfer_queue.control.restorable import RestorableController
from harness.transfer_queue.frames import Frame, Handout
from harness.transfer_queue.journal.journal import Journal
from harness.transfer_queue.journal.payload import Payload, at_hand


class JournaledController(RestorableController):
    """Every call that changed something is in the journal when it returns, as the call itself: made again in the same
    order, they lead to the same state. Until there is a `journal` nothing is recorded. Where a call cannot be recorded
    it fails with OSError, and so do all after it, which change nothing."""

    journal: Journal | None = None
    fetched: dict[int, Payload]
    """Of frames that are about to be put and do not carry their payload, by their `id`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fetched = {}

    def create(self, name: str, rows: Iterable[int], group_size: int) -> None:
        ids = as_integers(rows, "rows")
        self._always(super().create, "create", name, ids, group_size)

    def put(self, partition: str, rows: Rows, frame: Frame, lengths: Mapping[str, Rows], now: float) -> list[str]:
        self._check()
        tasks = super().put(partition, rows, frame, lengths, now)
        if self.journal is not None:
            payload = at_hand(frame) or self.fetched[id(frame)]
            call = ("put", partition, rows, lengths, now, frame.rows, payload.sizes)
            self.journal.record(*call, payload=payload.pieces)
        return tasks

    def request(self, ask: Ask, now: float) -> Handout | Answer:
        self._check()
        answer = super().request(ask, now)
        if isinstance(answer, Handout):
            self._record("request", ask, now, answer.lease, crc32(answer.rows.tobytes()))
        return answer

    def set_bound(self, task: str, consumer: str, below: int) -> None:
        self._always(super().set_bound, "set_bound", task, consumer, below)

    def drop(self, task: str, started: str, below: int) -> tuple[list[int], list[str]]:
        return self._always(super().drop, "drop", task, started, below)

    def clear(self, name: str) -> list[str]:
        return self._always(super().clear, "clear", name)

    def close(self) -> list[str]:
        return self._always(super().close, "close")

    def shift(self, seconds: float) -> None:
        self._always(super().shift, "shift", seconds)

    def acknowledge(self, number: int) -> list[str]:
        return self._if_it_did(super().acknowledge, "acknowledge", number)

    def give_back(self, number: int) -> list[str]:
        return self._if_it_did(super().give_back, "give_back", number)

    def release(self, consumer: str) -> list[str]:
        return self._if_it_did(super().release, "release", consumer)

    def lose(self, numbers: Iterable[int]) -> list[str]:
        return self._if_it_did(super().lose, "lose", list(numbers))

    def expire(self, now: float) -> list[str]:
        return self._if_it_did(super().expire, "expire", now)

    def _always(self, call: Callable[..., Any], verb: str, *args: Any) -> Any:
        self._check()
        answer = call(*args)
        self._record(verb, *args)
        return answer

    def _if_it_did(self, call: Callable[..., list[str]], verb: str, *args: Any) -> list[str]:
        """These calls say that nothing changed by naming no task."""
        self._check()
        tasks = call(*args)
        if tasks:
            self._record(verb, *args)
        return tasks

    def _check(self) -> None:
        if self.journal is not None:
            self.journal.check()

    def _record(self, *call: Any) -> None:
        if self.journal is not None:
            self.journal.record(*call)
