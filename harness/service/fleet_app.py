"""Membership over HTTP: the engines of a run, a membership by itself, and a client of both.

Every request carries the token (`Authorization: Bearer ...`); of one without nothing but its headers is read. A body
has at most 64 KiB, and 10 s to come. A run serves its engines as long as it lasts, in its own event loop, on
loopback:

    GET    /health                     of each role its state, when it was last heard, what it does, its version
    GET    /metrics                    the same, and the newest iteration, for Prometheus
    GET    /topology                   epoch, members with version, health, rank and what was requested of them
    POST   /members/{name}/leave       finish what it runs and get no more weights, from the next transfer on
    POST   /members/{name}/join        come back with the weights of the next transfer

A membership for processes outside of a job, on loopback by default:

    CADENCE_TOKEN=... python -m harness.service.fleet_app --port 8766

    GET    /topology                   epoch, members with version, health and rank
    POST   /members                    {"name", "kind", "version", "place"}: join, or join again
    POST   /members/{name}/heartbeat   {"version"}: it is there, and holds this version
    DELETE /members/{name}             leave before the next transfer

It holds nothing that its members do not report again: after a restart it answers 404 to the heartbeat of a member that
it does not know yet, which joins again with its version.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import quote

import httpx2
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel, Field

from harness.rpc.http_server import LOOPBACK, authenticated_app, serving
from harness.weight_sync.membership import Fleet, Kind, MemberRequest, Membership, MembershipConflict, UnknownMember

_KEEP_ALIVE_S = 2.0  # less than the server's 5 s: a connection that it just closed loses the request


_REFUSALS = {UnknownMember: 404, MembershipConflict: 409}
_Version = Annotated[int, Field(ge=0, lt=1 << 53)]  # what every reader of JSON can hold


class JoinRequest(BaseModel):
    """Texts of limited length are looked at, and half a character is refused; without one it would be believed."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    kind: Kind = "engine"
    version: _Version = 0
    place: Annotated[str, Field(max_length=1000)] = ""


class _Heartbeat(BaseModel):
    version: _Version


def fleet_app(
    fleet: Fleet,
    token: str,
    *,
    now: Callable[[], float],
    health: Callable[[], dict[str, Any]] = dict,
    metrics: Callable[[], bytes] = bytes,
) -> FastAPI:
    """The engines of a run. Their health is checked when the topology is asked for: an engine that computes does not
    answer at once, and counts as silent. health: of all roles, as is known without asking; metrics: for Prometheus."""
    app, membership = authenticated_app("Cadence weight sync", token, _REFUSALS), fleet.membership

    @app.get("/health")
    async def get_health() -> dict[str, Any]:
        return health()

    @app.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/topology")
    async def get_topology() -> dict[str, Any]:
        await fleet.check_health(now)
        return topology(membership, now())

    @app.post("/members/{name}/{requested}")
    async def request(name: str, requested: MemberRequest) -> dict[str, Any]:
        membership.request(name, requested)
        return member_status(membership, name, now())

    return app


def membership_app(
    membership: Membership, token: str, *, silent_after_s: float = 30.0, now: Callable[[], float] = time.monotonic
) -> FastAPI:
    """A membership by itself. silent_after_s: seconds without a heartbeat after which a member counts as silent."""
    app = authenticated_app("Cadence weight sync", token, _REFUSALS)

    @app.post("/members")
    async def join(member: JoinRequest) -> dict[str, Any]:
        membership.join(member.name, kind=member.kind, version=member.version, place=member.place, now=now())
        return member_status(membership, member.name, now())

    @app.post("/members/{name}/heartbeat")
    async def heartbeat(name: str, beat: _Heartbeat) -> dict[str, Any]:
        membership.seen(name, beat.version, now())
        return member_status(membership, name, now())

    @app.delete("/members/{name}")
    async def leave(name: str) -> dict[str, Any]:
        membership.leave(name)
        return {"epoch": membership.epoch}

    @app.get("/topology")
    async def get_topology() -> dict[str, Any]:
        membership.mark_silent(now(), silent_after_s)
        return topology(membership, now())

    return app


def member_status(membership: Membership, name: str, now: float) -> dict[str, Any]:
    """All that is known of a member."""
    member = asdict(membership.of(name))
    seen_at = member.pop("seen_at")
    return member | {"seen_s_ago": now - seen_at, "rank": membership.ranks.get(name), "epoch": membership.epoch}


def topology(membership: Membership, now: float) -> dict[str, Any]:
    """Members that take part in the next transfer, under which rank, and those that do not."""
    members = [member_status(membership, member.name, now) for member in membership.members]
    return {"epoch": membership.epoch, "sender": 0, "members": members}


class Refused(RuntimeError):
    """The service refused a request. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceClient:
    """An asynchronous context manager. Requests take at most `timeout_s`; they raise Refused, or ConnectionError where
    the service does not answer."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0) -> None:
        self.url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            limits=httpx2.Limits(keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # no proxy: the token is for this address
        )

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def join(self, name: str, version: int, *, kind: Kind = "engine", place: str = "") -> dict[str, Any]:
        """Add a member that has this version of the weights."""
        return await self._send("POST", "/members", {"name": name, "kind": kind, "version": version, "place": place})

    async def heartbeat(self, name: str, version: int) -> dict[str, Any]:
        """Joins anew where the service does not know the member: then it was restarted."""
        try:
            return await self._send("POST", f"/members/{quote(name)}/heartbeat", {"version": version})
        except Refused as refused:
            if refused.status != 404:
                raise
            return await self.join(name, version)

    async def leave(self, name: str) -> dict[str, Any]:
        """Take a member out."""
        return await self._send("DELETE", f"/members/{quote(name)}")

    async def request(self, name: str, requested: MemberRequest) -> dict[str, Any]:
        """Have an engine of a run leave, or come back, before the next transfer."""
        return await self._send("POST", f"/members/{quote(name)}/{requested}")

    async def topology(self) -> dict[str, Any]:
        """All members, and under which rank each takes part in the next transfer."""
        return await self._send("GET", "/topology")

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx2.TransportError as error:
            raise ConnectionError(f"no weight sync service at {self.url}: {error!r}") from error
        if response.is_error:
            detail = response.json().get("detail", response.reason_phrase) if response.content else ""
            raise Refused(response.status_code, f"weight sync service at {self.url}: {detail}")
        return response.json()


async def _serve(app: FastAPI, host: str, port: int) -> None:
    async with serving(app, host, port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve a membership by itself until interrupted."""
    parser = argparse.ArgumentParser(description="Keeps the membership of weight transfers, over HTTP.")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--silent-after-s", type=float, default=30.0)
    options = parser.parse_args()
    token = os.environ.get("CADENCE_TOKEN", "")
    if not token:
        parser.error("set CADENCE_TOKEN to the token that members will send")
    app = membership_app(Membership(), token, silent_after_s=options.silent_after_s)
    asyncio.run(_serve(app, options.host, options.port))


if __name__ == "__main__":
    main()
