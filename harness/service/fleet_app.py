"""Membership over HTTP: the engines of a run.

Every request carries the token (`Authorization: Bearer ...`); of one without nothing but its headers is read. A body
has at most 64 KiB, and 10 s to come. A run serves its engines as long as it lasts, in its own event loop, on
loopback:

    GET    /health                     of each role its state, when it was last heard, what it does, its version
    GET    /metrics                    the same, and the newest iteration, for Prometheus
    GET    /topology                   epoch, members with version, health, rank and what was requested of them
    POST   /members/{name}/leave       finish what it runs and get no more weights, from the next transfer on
    POST   /members/{name}/join        come back with the weights of the next transfer"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from harness.rpc.http_server import authenticated_app
from harness.weight_sync.membership import Fleet, MemberRequest, Membership, MembershipConflict, UnknownMember

_REFUSALS = {UnknownMember: 404, MembershipConflict: 409}


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


def member_status(membership: Membership, name: str, now: float) -> dict[str, Any]:
    """All that is known of a member."""
    member = asdict(membership.of(name))
    seen_at = member.pop("seen_at")
    return member | {"seen_s_ago": now - seen_at, "rank": membership.ranks.get(name), "epoch": membership.epoch}


def topology(membership: Membership, now: float) -> dict[str, Any]:
    """Members that take part in the next transfer, under which rank, and those that do not."""
    members = [member_status(membership, member.name, now) for member in membership.members]
    return {"epoch": membership.epoch, "sender": 0, "members": members}
