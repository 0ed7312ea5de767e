"""HTTP for those who have the token: what strangers may take of it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from harness.rpc import http_server
from harness.rpc.http_server import LOOPBACK, authenticated_app, serving
from tests.support.certificates import certificate_in, needs_openssl

WAIT_S = 25.0  # less than asyncio waits for the end of TLS
TOKEN = "a token"
WITHOUT_TOKEN = b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def port_of_a_server(**how: Any) -> AsyncIterator[int]:
    """Once it takes connections."""
    app = authenticated_app("Nothing", TOKEN, {})
    async with serving(app, **how) as url, asyncio.timeout(WAIT_S):
        port = int(url.rpartition(":")[2])
        assert await status(port, b"", tls="certificate" in how) == b"401"
        yield port


@asynccontextmanager
async def port_of_a_reader() -> AsyncIterator[int]:
    """It reads the bodies of requests."""
    app = authenticated_app("Reader", TOKEN, {})

    @app.post("/read")
    async def read(asked: Request) -> int:
        return len(await asked.body())

    async with serving(app) as url:
        yield int(url.rpartition(":")[2])


async def status(port: int, token: bytes, *, tls: bool = False) -> bytes:
    """Of the answer to somebody who sends it."""
    answer, asking = await asyncio.open_connection(LOOPBACK, port, ssl=trusting() if tls else None)
    asking.write(WITHOUT_TOKEN[:-2] + b"Authorization: Bearer %b\r\n\r\n" % token)
    first = await answer.readline()
    asking.transport.abort()
    return first.split()[1]


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def refused_over_tls(port: int) -> socket.socket:
    """Below TLS, whose end it does not answer."""
    connection = trusting().wrap_socket(socket.create_connection((LOOPBACK, port), timeout=WAIT_S))
    connection.sendall(WITHOUT_TOKEN)
    assert connection.recv(12).endswith(b"401")
    return socket.socket(fileno=connection.detach())


async def test_of_strangers_who_come_all_at_once_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 3600.0)
    loop = asyncio.get_running_loop()
    async with port_of_a_server(connections=16) as port:
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


@needs_openssl
async def test_who_begins_no_tls_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 1.0)
    async with port_of_a_server(certificate=certificate_in(tmp_path)) as port:
        answer, silent = await asyncio.open_connection(LOOPBACK, port)
        assert await answer.read() == b""
        silent.close()


@needs_openssl
async def test_strangers_who_were_refused_and_do_not_end_tls_keep_nobody_out(tmp_path: Path) -> None:
    async with port_of_a_server(certificate=certificate_in(tmp_path), connections=4) as port:
        refused = [await asyncio.to_thread(refused_over_tls, port) for _ in range(6)]
        assert await status(port, TOKEN.encode(), tls=True) == b"404"
        for stranger in refused:
            stranger.settimeout(WAIT_S)
            while await asyncio.to_thread(stranger.recv, 1 << 10):
                pass
            stranger.close()


def request(*headers: str, token: str = TOKEN) -> bytes:
    head = ["POST /read HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*head, "", ""]).encode()


async def answered(port: int, said: bytes) -> int:
    """The status of the answer, after which the connection has ended; 0 without one."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(said)
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


async def test_a_body_is_not_read_without_the_token_and_never_beyond_its_limit() -> None:
    async with port_of_a_reader() as port:
        huge = f"Content-Length: {1 << 40}"
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        assert await answered(port, request(huge, token="guess")) == 401
        assert await answered(port, request("Transfer-Encoding: chunked", token="guess")) == 401
        assert await answered(port, request(huge)) == 413
        assert await answered(port, request("Transfer-Encoding: chunked") + chunk + b"1\r\nx\r\n") == 413


async def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with port_of_a_reader() as port:
        monkeypatch.setattr(http_server, "_REQUEST_S", 0.01)
        assert await answered(port, b"") == 0
        assert await answered(port, request()[:-1]) == 0
        assert await answered(port, request("Content-Length: 5") + b"{") == 408
        monkeypatch.undo()
        assert await answered(port, request("Content-Length: 5", "Connection: close") + b"12345") == 200
