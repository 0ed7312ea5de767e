"""HTTP for those who have the token: what strangers may take of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from harness.runtime import http_server
from harness.runtime.http_server import LOOPBACK, authenticated_app, serving

WAIT_S = 30.0
WITHOUT_TOKEN = b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def port_of_a_server() -> AsyncIterator[int]:
    """Once it takes connections."""
    async with serving(authenticated_app("Nothing", "a token", {})) as url, asyncio.timeout(WAIT_S):
        port = int(url.rpartition(":")[2])
        answer, stranger = await asyncio.open_connection(LOOPBACK, port)
        stranger.write(WITHOUT_TOKEN)
        assert (await answer.readline()).split()[1] == b"401"
        stranger.close()
        yield port


async def test_of_strangers_who_come_all_at_once_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STRANGERS", 4)
    monkeypatch.setattr(http_server, "_REQUEST_S", 3600.0)
    loop = asyncio.get_running_loop()
    async with port_of_a_server() as port:
        strangers = [socket.create_connection((LOOPBACK, port)) for _ in range(12)]  # the server does not run meanwhile
        for stranger in strangers:
            stranger.setblocking(False)
        for oldest in strangers[:-4]:
            assert await loop.sock_recv(oldest, 1) == b""
        for newest in strangers[-4:]:
            await loop.sock_sendall(newest, WITHOUT_TOKEN)
            assert (await loop.sock_recv(newest, 12)).endswith(b"401")
        for stranger in strangers:
            stranger.close()
