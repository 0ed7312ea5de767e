"""The membership over HTTP, for engines and for whoever wants to see how they are: loopback unless told otherwise.

    CADENCE_TOKEN=... python -m harness.weight_sync.service --port 8766

Every request carries the token (`Authorization: Bearer ...`). The service holds nothing that engines do not tell again:
after a restart it answers 404 to the heartbeat of one that it does not know yet, which joins again with its version.

    POST   /members                    {"name", "kind", "version", "place"}: join, or join again
    POST   /members/{name}/heartbeat   {"version"}: it is there, and holds this version
    DELETE /members/{name}             leave before the next transfer
    GET    /topology                   epoch, members with version, health and rank
"""

from __future__ import annotations

import argparse
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from harness.weight_sync.membership import Kind, Membership, MembershipConflict, UnknownMember

LOOPBACK = "127.0.0.1"


class JoinRequest(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    kind: Kind = "engine"
    version: Annotated[int, Field(ge=0)] = 0
    place: str = ""


class Heartbeat(BaseModel):
    version: Annotated[int, Field(ge=0)]


def authenticated_app(token: str) -> FastAPI:
    """Without a route yet: every request has to carry the token, and what members cannot do is told."""

    async def authorised(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "the token is wrong or missing; send it as `Authorization: Bearer <token>`")

    app = FastAPI(
        title="Cadence weight sync", dependencies=[Depends(authorised)], docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.exception_handler(UnknownMember)
    async def unknown(request: Request, error: UnknownMember) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    @app.exception_handler(MembershipConflict)
    async def unwilling(request: Request, error: MembershipConflict) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=409)

    return app


def told(membership: Membership, name: str, now: float) -> dict[str, Any]:
    """What is known of a member."""
    member = asdict(membership.of(name))
    seen_at = member.pop("seen_at")
    return member | {"seen_s_ago": now - seen_at, "rank": membership.ranks.get(name), "epoch": membership.epoch}


def topology(membership: Membership, now: float) -> dict[str, Any]:
    """Who takes part in the next transfer, under which number, and who does not."""
    members = [told(membership, member.name, now) for member in membership.members]
    return {"epoch": membership.epoch, "sender": 0, "members": members}


def make_app(membership: Membership, token: str, *, silent_after_s: float, now: Callable[[], float]) -> FastAPI:
    """The HTTP layer around a membership. silent_after_s: how long a member may not be heard of and count as well."""
    app = authenticated_app(token)

    @app.post("/members")
    async def join(joining: JoinRequest) -> dict[str, Any]:
        membership.join(joining.name, kind=joining.kind, version=joining.version, place=joining.place, now=now())
        return told(membership, joining.name, now())

    @app.post("/members/{name}/heartbeat")
    async def heartbeat(name: str, beat: Heartbeat) -> dict[str, Any]:
        membership.seen(name, beat.version, now())
        return told(membership, name, now())

    @app.delete("/members/{name}")
    async def leave(name: str) -> dict[str, Any]:
        membership.leave(name)
        return {"epoch": membership.epoch}

    @app.get("/topology")
    async def everybody() -> dict[str, Any]:
        membership.note_silence(now(), silent_after_s)
        return topology(membership, now())

    return app


class Service:
    """A running service, in a thread of this process; use as a context manager. Port 0 takes a free one.

    Raises OSError where the port is taken.
    """

    def __init__(
        self,
        token: str,
        *,
        membership: Membership | None = None,
        host: str = LOOPBACK,
        port: int = 0,
        silent_after_s: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not token:
            raise ValueError("the service wants a token: anybody who reaches it could make engines leave")
        self.membership = membership or Membership()
        app = make_app(self.membership, token, silent_after_s=silent_after_s, now=now)
        self._socket = socket.create_server((host, port))
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Service:
        self._thread.start()  # requests wait in the socket until it listens
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def join(self) -> None:
        """Wait until it ends."""
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Keeps who takes part in weight transfers, over HTTP.")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--silent-after-s", type=float, default=30.0)
    options = parser.parse_args()
    token = os.environ.get("CADENCE_TOKEN", "")
    if not token:
        parser.error("set CADENCE_TOKEN to the token that members will send")
    with Service(token, host=options.host, port=options.port, silent_after_s=options.silent_after_s) as service:
        print(service.url, flush=True)
        service.join()


if __name__ == "__main__":
    main()
