"""Whether workers answer: each is asked again and again, and one that says nothing for too long is ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from harness.runtime.runtime import WaitingRole, WorkerDied
from harness.runtime.worker_client import RemoteRole
from harness.transfer_queue.remote.client import RemoteQueue

_MOST_S = 5.0  # between two questions
_PARTS = 10  # of the limit; the end comes at most so much late
_FREED_S = 3.0  # that those who waited for a silent one have to answer, once no more is waited


class QueueBeat:
    """The queue as heartbeats see it, as if it were a role of its process. end: kills that."""

    name = worker = "queue"

    def __init__(self, queue: RemoteQueue, end: Callable[[], None]) -> None:
        self.role = self.connection = self
        self.ended: str | None = None
        self._queue, self._end = queue, end

    @property
    def is_open(self) -> bool:
        """Whether it is still asked."""
        return self.ended is None

    async def waiting(self) -> list[str]:
        """No lines: what waits there are calls of others, which say so themselves."""
        await self._queue.waiting()
        return []

    def give_up(self, why: str) -> None:
        """Kill the queue; every call of it ends, those of this process for this reason."""
        self.ended = why
        self._queue.end(why)
        self._end()


Beating = RemoteRole[WaitingRole] | QueueBeat


class Heartbeats:
    """Watches roles in other processes, and the queue. One that computes answers when it is done: `limit_s` has to be
    more than the longest computation of one piece. A process that is stopped, or whose event loop hangs, never answers;
    it is ended, as if it had died, and every call of it. tell: is told why. free: ends what one worker waits in for
    another, as both ends of a transfer do, before any is ended: it is not the one that waited.

    Time counts in questions without an answer, so that a pause of this process ends nobody.
    """

    def __init__(
        self,
        handles: Sequence[Beating],
        limit_s: float,
        tell: Callable[[str], None] = lambda why: None,
        now: Callable[[], float] = time.monotonic,
        free: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._handles, self._limit_s, self._tell, self._now, self._free = handles, limit_s, tell, now, free
        self._every_s = min(limit_s / _PARTS, _MOST_S)
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._silent_s: dict[str, float] = {}
        self._freed = False  # since the first of those that are silent was so for the limit
        self._heard: dict[str, tuple[float, list[str]]] = {}  # when, and what its loops waited for

    async def watch(self) -> NoReturn:
        """Ask them all until it is cancelled."""
        try:
            while True:
                for handle in self._handles:
                    self._ask(handle)
                await asyncio.sleep(self._every_s)
                for handle in self._handles:
                    self._count(handle)
                await self._judge()
        finally:
            for asked in self._asked.values():
                asked.cancel()
            self._asked.clear()
            self._silent_s.clear()

    def states(self) -> list[dict[str, Any]]:
        """State of each role: its name; `answers`, `computes` (it has not answered the newest question yet), `starts`,
        or how it ended; seconds since it was last heard, None where it never was; and what its loops waited for
        then."""
        return [self._state(handle) for handle in self._handles]

    def _ask(self, handle: Beating) -> None:
        before = self._asked.get(handle.name)
        if before is None or before.done():
            self._asked[handle.name] = asyncio.create_task(self._beat(handle))

    async def _beat(self, handle: Beating) -> None:
        with suppress(WorkerDied, TimeoutError, ConnectionError):  # whoever needs it says so
            waits = await handle.role.waiting()
            self._heard[handle.name] = self._now(), waits
        self._silent_s[handle.name] = 0.0

    def _count(self, handle: Beating) -> None:
        connection = handle.connection
        if self._asked[handle.name].done() or not connection.is_open:  # one that starts has a limit of its own
            self._silent_s[handle.name] = 0.0
            return
        self._silent_s[handle.name] = self._silent_s.get(handle.name, 0.0) + self._every_s

    async def _judge(self) -> None:
        """End those that are silent for too long."""
        late = [handle for handle in self._handles if self._silent_s[handle.name] >= self._limit_s]
        silent = {handle.connection.worker for handle in self._handles if self._silent_s[handle.name]}
        if late and len(silent) > 1 and self._free is not None and not self._freed:
            await self._free()
            self._freed = True
        for handle in late:
            if self._silent_s[handle.name] >= self._limit_s + (_FREED_S if self._freed else 0.0):
                self._end(handle)
        self._freed = self._freed and bool(late)

    def _end(self, handle: Beating) -> None:
        connection = handle.connection
        if not connection.is_open:  # ended with another role of its worker
            return
        why = (
            f"{connection.worker} did not answer for {self._limit_s:g} s (cluster.heartbeat_timeout_s), and was "
            f"ended{self._last_words(handle.name)}"
        )
        self._tell(why)
        connection.give_up(why)

    def _last_words(self, name: str) -> str:
        _, waits = self._heard.get(name, (0.0, []))
        return f"; when it last did, {'; '.join(waits)}" if waits else ""

    def _state(self, handle: Beating) -> dict[str, Any]:
        at, waits = self._heard.get(handle.name, (None, []))
        ended = handle.connection.ended
        asked = self._asked.get(handle.name)
        if ended is not None:
            state = f"ended: {ended}"
        elif not handle.connection.is_open:
            state = "starts"
        else:
            state = "computes" if asked is not None and not asked.done() else "answers"
        return {
            "name": handle.name,
            "state": state,
            "heard_s_ago": None if at is None else round(self._now() - at, 3),
            "waits_for": waits,
        }
