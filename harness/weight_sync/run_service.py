"""The engines of a run over HTTP, for as long as it lasts: how they are, and who is to leave or come back.

Served by the event loop of the run itself, on loopback; every request carries the run's token
(`Authorization: Bearer ...`).

    GET    /topology                 epoch, members with version, health, rank and what they were asked to do
    POST   /members/{name}/leave     finish what it runs and get no more weights, from the next transfer on
    POST   /members/{name}/join      come back with the weights of the next transfer
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from harness.weight_sync.fleet import Fleet
from harness.weight_sync.membership import MemberRequest
from harness.weight_sync.service import LOOPBACK, authenticated_app, told, topology


def make_fleet_app(fleet: Fleet, token: str, *, now: Callable[[], float]) -> FastAPI:
    """The HTTP layer around the engines of a run. An engine is asked how it is when somebody wants to know: one that
    computes does not answer at once, and counts as silent."""
    app, membership = authenticated_app(token), fleet.membership

    @app.get("/topology")
    async def everybody() -> dict[str, Any]:
        await fleet.look(now)
        return topology(membership, now())

    @app.post("/members/{name}/{wish}")
    async def ask(name: str, wish: MemberRequest) -> dict[str, Any]:
        membership.ask(name, wish)
        return told(membership, name, now())

    return app


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the run that it belongs to."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Serve it in this event loop meanwhile; its address. Port 0 takes a free one. Raises OSError where it is taken."""
    listening = socket.create_server((host, port))
    server = _EmbeddedServer(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()
