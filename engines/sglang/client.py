"""The HTTP protocol of an SGLang server, and the two dialects in which it takes weights. Knows no model."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

_LINE_BYTES = 64 << 20
"""Longest line of a stream: every one repeats all that came before."""
_IDLE_S = 2.0
"""Longest rest of a connection that is used again. Servers end it sooner or later (SGLang after 5 s, unless told
otherwise), and a request that comes just then is lost."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SGLangClient:
    """Requests to the server at `url` (without a slash at its end), each of which shows `token`.

    `owner` begins every message. Whatever goes wrong is a RuntimeError that names owner, server and path.
    """

    def __init__(self, url: str, token: str, *, owner: str, timeout_s: float) -> None:
        self.url, self.owner, self.timeout_s = url, owner, timeout_s
        self._headers = {"Authorization": f"Bearer {token}"}
        self._open: aiohttp.ClientSession | None = None

    def wait_until_ready(self, timeout_s: float, require_alive: Callable[[], None]) -> None:
        """Blocks until the server answers. `require_alive` raises if it never will.

        Raises TimeoutError after timeout_s; PermissionError if the token is wrong.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self._status("GET", "/model_info")) != 200:
            require_alive()
            if status == 401:
                raise PermissionError(f"{self.owner}: the SGLang server at {self.url} refuses the token it was shown")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.owner}: no SGLang server answered at {self.url} within {timeout_s:.0f} s")
            time.sleep(0.2)

    def brackets_updates(self) -> bool:
        """Whether weight updates stand between begin and end, as from SGLang 0.5.21 on; blocks.

        Asked by ending an update that never began: older servers do not know the path, newer ones refuse.
        """
        status = self._status("POST", "/end_weight_update")
        if status is None:
            raise RuntimeError(f"{self.owner}: the SGLang server at {self.url} does not answer /end_weight_update")
        return status != 404

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None) -> None:
        """Returns when the server has done it."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self.timeout_s)
        try:
            async with self._session.post(self.url + path, json=body or {}, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(self._told(path, f"refused: {response.status} {text[:500].strip()}"))
        except TimeoutError as error:
            raise RuntimeError(self._told(path, f"did not answer within {timeout.total} s")) from error
        except aiohttp.ClientError as error:
            raise RuntimeError(self._told(path, f"broke off: {error!r}")) from error

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The server's messages about one sample, as they come. A pause may keep them waiting for as long as it likes;
        who calls has to watch the server."""
        path, timeout = "/generate", aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s)
        told = {**body, "stream": True}
        try:
            async with self._session.post(self.url + path, json=told, timeout=timeout) as response:
                if response.status != 200:
                    text = await response.text()
                    raise RuntimeError(self._told(path, f"refused: {response.status} {text[:500].strip()}"))
                async for line in response.content:
                    if line == b"data: [DONE]\n":
                        return
                    if line.startswith(b"data: "):
                        yield self._message(path, json.loads(line[len(b"data: ") :]))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(self._told(path, f"broke off: {error!r}")) from error
        raise RuntimeError(self._told(path, "ended without saying so"))

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Made where it is used first: it belongs to that event loop."""
        if self._open is None:
            connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            self._open = aiohttp.ClientSession(
                headers=self._headers, connector=connections, read_bufsize=_LINE_BYTES, trust_env=False
            )
        return self._open

    def _message(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        if "error" in message:
            raise RuntimeError(self._told(path, f"failed: {message['error']}"))
        return message

    def _told(self, path: str, what: str) -> str:
        return f"{self.owner}: the SGLang server at {self.url}: {path} {what}"

    def _status(self, method: str, path: str) -> int | None:
        """Of a blocking request; None where nobody answers."""
        headers = self._headers | {"Content-Type": "application/json"}
        data = b"{}" if method == "POST" else None
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with _DIRECT.open(request, timeout=self.timeout_s) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except (urllib.error.URLError, OSError):
            return None


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
