"""The HTTP protocol of an SGLang server, and the two dialects in which it takes weights. Knows no model."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

_IDLE_S = 2.0
"""Longest rest of a connection that is used again. Servers end it sooner or later (SGLang after 5 s, unless set
otherwise), and a request that comes just then is lost."""


class Refused(RuntimeError):
    """The server lives, and did not do what it was asked to. said: its own words."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class SGLangClient:
    """Requests to the server at `url` (without a slash at its end), each of which shows `token`.

    `owner` begins every message. Whatever goes wrong is a RuntimeError that names owner, server and path; `Refused`
    where the server says why.
    """

    def __init__(self, url: str, token: str, *, owner: str, timeout_s: float) -> None:
        self.url, self.owner, self.timeout_s = url, owner, timeout_s
        # No proxy: the token is for this address.
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {token}"},
            "trust_env": False,
        }
        self._open: httpx2.AsyncClient | None = None

    def wait_until_ready(self, timeout_s: float, require_alive: Callable[[], None]) -> None:
        """Blocks until the server answers. `require_alive` raises if it never will.

        Raises TimeoutError after timeout_s; PermissionError if the token is wrong.
        """
        deadline = time.monotonic() + timeout_s
        with self._blocking() as http:
            while (status := self._status(http, "GET", "/model_info")) != 200:
                require_alive()
                if status == 401:
                    raise PermissionError(f"{self.owner}: the SGLang server at {self.url} refuses the token")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.owner}: no SGLang server answered at {self.url} within {timeout_s:.0f} s"
                    )
                time.sleep(0.2)

    def brackets_updates(self) -> bool:
        """Whether weight updates stand between begin and end, as from SGLang 0.5.21 on; blocks.

        Asked by ending an update that never began: older servers do not know the path, newer ones refuse.
        """
        with self._blocking() as http:
            status = self._status(http, "POST", "/end_weight_update")
        if status is None:
            raise RuntimeError(f"{self.owner}: the SGLang server at {self.url} does not answer /end_weight_update")
        return status != 404

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None) -> None:
        """Send a request; returns when the server has carried it out."""
        timeout_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.post(path, json=body or {})
        except TimeoutError as error:
            raise RuntimeError(self._message(path, f"did not answer within {timeout_s} s")) from error
        except httpx2.TransportError as error:
            raise RuntimeError(self._message(path, f"broke off: {error!r}")) from error
        self._require_success(path, response)

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The server's messages about one sample, as they come. A pause may keep them waiting for as long as it likes;
        who calls has to watch the server."""
        path = "/generate"
        try:
            async with self._session.stream("POST", path, json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._require_success(path, response)
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        message = json.loads(line.removeprefix("data: "))
                        if "error" in message:
                            raise RuntimeError(self._message(path, f"failed: {message['error']}"))
                        yield message
        except httpx2.TransportError as error:
            raise RuntimeError(self._message(path, f"broke off: {error!r}")) from error
        raise RuntimeError(self._message(path, "ended without saying so"))

    async def close(self) -> None:
        """Close the open connection, if there is one; the next call opens another."""
        if self._open is not None:
            await self._open.aclose()
            self._open = None

    @property
    def _session(self) -> httpx2.AsyncClient:
        """The open session, made where it is used first: it belongs to that event loop."""
        if self._open is None:
            self._open = httpx2.AsyncClient(
                **self._options,
                timeout=httpx2.Timeout(None, connect=self.timeout_s),
                limits=httpx2.Limits(keepalive_expiry=_IDLE_S),
            )
        return self._open

    def _blocking(self) -> httpx2.Client:
        return httpx2.Client(**self._options, timeout=self.timeout_s)

    def _require_success(self, path: str, response: httpx2.Response) -> None:
        if response.status_code != 200:
            said = response.text.strip()
            raise Refused(self._message(path, f"refused: {response.status_code} {said[:500]}"), _words(said))

    def _message(self, path: str, what: str) -> str:
        return f"{self.owner}: the SGLang server at {self.url}: {path} {what}"

    def _status(self, http: httpx2.Client, method: str, path: str) -> int | None:
        """HTTP status of a blocking request; None where the server does not answer."""
        try:
            return http.request(method, path, json={} if method == "POST" else None).status_code
        except httpx2.TransportError:
            return None


def _words(said: str) -> str:
    """The message of a refusal."""
    try:
        return str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        return said


async def both(post: asyncio.Task[None], other: asyncio.Task[Any]) -> None:
    """Wait for a request and for what it needs at our end. The first to fail ends the wait: without its partner the
    other one may hang until its own timeout."""
    done, pending = await asyncio.wait({post, other}, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    errors = [task.exception() for task in (post, other) if task in done]
    for error in errors:
        if error is not None:
            raise error  # the server's own words first: a broken broadcast follows from them


_MEMORY = ("kv_cache", "weights")
"""The memory that a sleeping server gives back, by the server's names."""


class ServerControl:
    """Pauses the server, flushes its cache and releases its memory; each once, and in an order that it survives.

    A server that has to flush, or to release memory, with requests in their slots fails or dies. A paused one can
    put its requests back into its queue first: they keep their tokens, and their cache is recomputed.
    """

    def __init__(self, client: SGLangClient, make_room: Callable[[str], None] = lambda part: None) -> None:
        """make_room: called before the server takes a part of its memory back."""
        self._client, self._make_room = client, make_room
        self.paused = False
        self._stale_cache = False
        self._released: list[str] = []

    @property
    def asleep(self) -> bool:
        """Whether the server has released memory that it has not taken back."""
        return bool(self._released)

    async def hold(self) -> None:
        """Stop between two tokens; requests stay where they are, with their cache, and new ones wait outside."""
        if not self.paused:
            self.paused = True
            await self._client.post("/pause_generation", {"mode": "in_place"})

    async def go_on(self) -> None:
        """Let a paused server generate again, with an empty cache where `drop_cache` was called."""
        if self.paused:
            if self._stale_cache:
                await self.empty_slots()
                await self._flush()
            await self._client.post("/continue_generation")
            self.paused = False

    def drop_cache(self) -> None:
        """Have the cache of a paused or idle server emptied before it generates again."""
        self._stale_cache = True

    async def before_a_request(self) -> None:
        """Empty a stale cache of an idle server; a paused one does so when it goes on, and takes no request before."""
        if self._stale_cache and not self.paused:
            await self._flush()

    async def sleep(self) -> None:
        """Let the server release the memory of its cache and weights; does nothing where it is asleep."""
        if not self._released:
            if self.paused:
                await self.empty_slots()
            await self._flush()
            await self._client.post("/release_memory_occupation", {"tags": list(_MEMORY)})
            self._released = list(_MEMORY)

    async def make_room_for_weights(self) -> None:
        """Take the memory of the weights again where the server sleeps: it must be there to load them."""
        if "weights" in self._released:
            await self._take("weights")

    async def wake(self) -> None:
        """Take back all memory that the server has released."""
        while self._released:
            await self._take(self._released[-1])

    async def _take(self, memory: str) -> None:
        self._make_room(memory)
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
