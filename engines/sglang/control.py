"""What an SGLang server is told besides generating: to hold still, to forget its cache, to give memory back."""

from __future__ import annotations

from engines.sglang.client import SGLangClient

_MEMORY = ("kv_cache", "weights")
"""What a sleeping server gives back, by the server's names."""


class ServerControl:
    """Remembers what the server was told, so that it is told once and in an order that it survives.

    A server that is told to flush, or to give memory back, with requests in their slots fails or dies. A paused one can
    put its requests back into its queue first: they keep their tokens, and their cache is recomputed.
    """

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self.paused = False
        self._stale_cache = False
        self._released: list[str] = []

    @property
    def asleep(self) -> bool:
        return bool(self._released)

    async def hold(self) -> None:
        """Stop between two tokens; requests stay where they are, with their cache, and new ones wait at the door."""
        if not self.paused:
            self.paused = True
            await self._client.post("/pause_generation", {"mode": "in_place"})

    async def go_on(self) -> None:
        if self.paused:
            if self._stale_cache:
                await self.empty_slots()
                await self._flush()
            await self._client.post("/continue_generation")
            self.paused = False

    def drop_cache(self) -> None:
        """Of a server that is paused or idle, before it generates again."""
        self._stale_cache = True

    async def before_a_request(self) -> None:
        """A paused server sees to its cache when it goes on, and takes no request before; an idle one does so now."""
        if self._stale_cache and not self.paused:
            await self._flush()

    async def sleep(self) -> None:
        if not self._released:
            if self.paused:
                await self.empty_slots()
            await self._flush()
            await self._client.post("/release_memory_occupation", {"tags": list(_MEMORY)})
            self._released = list(_MEMORY)

    async def make_room_for_weights(self) -> None:
        """Where a sleeping server is to take weights, their memory has to be there."""
        if "weights" in self._released:
            await self._take("weights")

    async def wake(self) -> None:
        while self._released:
            await self._take(self._released[-1])

    async def _take(self, memory: str) -> None:
        await self._client.post("/resume_memory_occupation", {"tags": [memory]})
        self._released.remove(memory)

    async def empty_slots(self) -> None:
        """Put the requests of a paused server back into its queue."""
        await self._client.post("/pause_generation", {"mode": "retract"})

    async def _flush(self) -> None:
        # What ended a moment ago may still be in its slot: so an idle server gets time. A paused one would take all of
        # it, because requests wait in its queue.
        given_s = 0 if self.paused else self._client.timeout_s
        await self._client.post(f"/flush_cache?timeout={given_s:.0f}")
        self._stale_cache = False
