"""HTTP for those who have the token: nothing of a request is read without it, and of one with it no more than the
application takes, no slower than it comes from somebody who sends."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = "127.0.0.1"
SMALL_BODY = 64 << 10
"""Bytes of a request that holds no tensors."""

_REQUEST_S = 10.0  # that its headers may take, and then its body, and a second more for each
_LEAST_RATE = 1 << 20  # bytes of it
_CONNECTIONS = 256
_STRANGERS = 4  # one in so many of them may be without a request yet
_GOODBYE_S = 1.0  # that somebody may take to end TLS
_GRACE_S = 2  # that requests may take once the server ends


class _Refused(BaseModel):
    """The body of a refusal: why, in a sentence."""

    detail: str


def authenticated_app(
    title: str,
    token: str,
    refusals: Mapping[type[Exception], int],
    *,
    largest_body: int = SMALL_BODY,
    larger: Mapping[str, int] = MappingProxyType({}),
) -> FastAPI:
    """An application without routes yet. Refuses requests without the token (401), before anything else of them is
    looked at; with a body that is too long (413; largest_body: in bytes; larger: of paths that take more) or does not
    come (408); and, with the status that `refusals` has for it, in the words of an error that a route raises.
    ValueError without a token."""
    if not token:
        raise ValueError("the service needs a token: anybody who reaches it could do as its members do")
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": _Refused} for status in sorted({401, 408, 413, *refusals.values()})
    }
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, responses=described)

    def refuse(status: int) -> Callable[[Request, Exception], JSONResponse]:
        return lambda request, error: JSONResponse({"detail": str(error)}, status_code=status)

    def not_understood(_: Request, error: Exception) -> JSONResponse:
        """Answer with what is wrong, without what was sent: NaN and half a character have no place in an answer."""
        assert isinstance(error, RequestValidationError)
        told = [{"loc": one["loc"], "msg": one["msg"], "type": one["type"]} for one in error.errors()]
        return JSONResponse({"detail": told}, status_code=422)

    app.add_middleware(_Guard, token=token, largest_body=largest_body, larger=larger)
    app.add_exception_handler(RequestValidationError, not_understood)
    for kind, status in refusals.items():
        app.add_exception_handler(kind, refuse(status))
    return app


class _Guard:
    """A guard before an application, which gets requests with the token only, and of their bodies what is not too long,
    in time. Where it refuses, the connection ends."""

    def __init__(self, app: ASGIApp, token: str, largest_body: int, larger: Mapping[str, int]) -> None:
        self._app, self._largest, self._larger = app, largest_body, larger
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            told = "the token is wrong or missing; send it as `Authorization: Bearer <token>`"
            return await _refusal(401, told)(scope, receive, send)
        largest = self._larger.get(scope["path"], self._largest)
        if int(headers.get(b"content-length", b"0")) > largest:
            return await _refusal(413, _too_long(largest))(scope, receive, send)
        with suppress(ClientDisconnect):  # there is nobody to answer
            await self._app(scope, self._limited(receive, largest), send)

    def _limited(self, receive: Receive, largest: int) -> Receive:
        began, length, whole = asyncio.get_running_loop().time(), 0, False

        async def limited() -> Message:
            nonlocal length, whole
            if whole:
                return await receive()  # until the client is gone
            due = began + _REQUEST_S + length / _LEAST_RATE
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                told = f"the request was not whole within {_REQUEST_S} s, and a second for each {_LEAST_RATE} bytes"
                raise HTTPException(408, told, {"connection": "close"}) from None
            length += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if length > largest:
                raise HTTPException(413, _too_long(largest), {"connection": "close"})
            return message

        return limited


def _too_long(largest: int) -> str:
    return f"a body has at most {largest} bytes here"


def _refusal(status: int, told: str) -> JSONResponse:
    return JSONResponse({"detail": told}, status_code=status, headers={"connection": "close"})


def _impatient_protocol(most: int) -> type[H11Protocol]:
    """The protocol of one server: a request's headers come within `_REQUEST_S`, and where more than `most` connections
    have not sent theirs, the oldest goes."""
    strangers: dict[Impatient, asyncio.TimerHandle] = {}

    class Impatient(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():  # over TLS that takes as long as its other end likes
                self.connections.discard(self)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                return self._forget()
            if self not in strangers:
                strangers[self] = self.loop.call_later(_REQUEST_S, self.transport.abort)
                if len(strangers) > most:
                    next(iter(strangers))._go()

        def _go(self) -> None:
            """Abort the connection, and forget it at once: it hears so later, when others may have come."""
            self._forget()
            self.transport.abort()

        def _forget(self) -> None:
            if self in strangers:
                strangers.pop(self).cancel()

    return Impatient


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the program that it runs in, and waits no longer for the beginning and end of TLS than for a
    request."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        protocol: Any = self.config.http_protocol_class
        connection = partial(protocol, self.config, self.server_state, {})
        limits = {"ssl_handshake_timeout": _REQUEST_S, "ssl_shutdown_timeout": _GOODBYE_S} if self.config.ssl else {}
        listen = partial(asyncio.get_running_loop().create_server, connection, backlog=self.config.backlog)
        self.servers = [await listen(sock=sock, ssl=self.config.ssl, **limits) for sock in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; who waits for longer loses the connection. uvicorn would cancel the request, and tell that as an
        error."""
        cut = asyncio.get_running_loop().call_later(_GRACE_S, self._cut_off)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    app: FastAPI,
    host: str = LOOPBACK,
    port: int = 0,
    *,
    certificate: tuple[Path, Path] | None = None,
    connections: int = _CONNECTIONS,
) -> AsyncIterator[str]:
    """Serve it in this event loop meanwhile; its address. Port 0 takes a free one. certificate: of TLS and its key, PEM
    files; connections: fewer than so many at a time. Raises OSError where the port is taken or the files hold no such
    thing."""
    listening = socket.create_server((host, port))
    # asyncio leaves it out on sockets that it did not make; then answers in two pieces wait 40 ms for each other
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app,
        http=_impatient_protocol(connections // _STRANGERS),
        limit_concurrency=connections,
        log_level="error",
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=2 * _GRACE_S,
        ssl_certfile=certificate[0] if certificate else None,
        ssl_keyfile=certificate[1] if certificate else None,
    )
    config.load()  # the files of TLS, before anybody is told
    scheme = "http" if certificate is None else "https"
    server = _EmbeddedServer(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"{scheme}://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()
