"""Membership over HTTP: who may ask, and what is answered."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from harness.rpc.http_server import LOOPBACK, serving
from harness.runtime.runtime import WorkerDied
from harness.service.fleet_app import fleet_app
from harness.weight_sync.membership import Fleet, LostEngine, OnLost
from tests.support.proxies import Proxy

TOKEN = "a token"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    fleet, _ = fleet_of(Engine("a"), Engine("b"))
    async with serving(fleet_app(fleet, TOKEN, now=lambda: 7.0)) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(url) as client:
        yield client


def client_of(url: str, token: str = TOKEN) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=60.0,
        limits=httpx2.Limits(max_keepalive_connections=0),
        trust_env=False,
    )


async def members(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
    return (await client.get("/topology")).json()["members"]


async def requested(client: httpx2.AsyncClient) -> list[str | None]:
    return [member["requested"] for member in await members(client)]


async def test_it_binds_loopback_and_refuses_who_has_no_token(url: str, client: httpx2.AsyncClient) -> None:
    async with client_of(url, "another token") as stranger:
        for answer in (await stranger.get("/topology"), await stranger.post("/members/a/leave")):
            assert answer.status_code == 401 and "the token is wrong or missing" in answer.text
    assert await requested(client) == [None, None]
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="needs a token"):
        fleet_app(fleet_of(Engine("a"))[0], "", now=lambda: 7.0)


async def test_connections_without_a_request_do_not_keep_members_out(url: str, client: httpx2.AsyncClient) -> None:
    port = int(url.rpartition(":")[2])
    strangers = [await asyncio.open_connection(LOOPBACK, port) for _ in range(70)]
    assert await requested(client) == [None, None]
    assert await strangers[0][0].read() == b"", "the oldest was sent away"
    for _, writer in strangers:
        writer.close()


# --- the engines of a run --------------------------------------------------------------------------------------------


class Engine:
    """Answers, unless it has an error to raise."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.ended = name, error, False
        self.asked: list[str] = []

    @property
    def role(self) -> Any:
        return Proxy(self._call)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.asked.append(method)
        if self.error is not None:
            raise self.error
        return []

    async def death(self, within_s: float = 5.0) -> str | None:
        return "it died" if isinstance(self.error, WorkerDied) else None

    async def end(self) -> None:
        self.ended = True


async def test_the_health_of_all_roles_is_told_to_who_has_the_token_and_to_nobody_else() -> None:
    fleet, _ = fleet_of(Engine("rollout[0]"))
    known = {"version": 3, "roles": [{"name": "actor[0]", "state": "computes", "heard_s_ago": 0.5}]}
    asked: list[int] = []

    def health() -> dict[str, object]:
        asked.append(1)
        return known

    async with serving(fleet_app(fleet, TOKEN, now=lambda: 7.0, health=health)) as url:
        async with httpx2.AsyncClient(trust_env=False) as http:
            for headers in ({}, {"Authorization": "Bearer guess"}):
                for path in ("/health", "/nothing"):
                    assert (await http.get(f"{url}{path}", headers=headers)).status_code == 401
            assert not asked
            given = await http.get(f"{url}/health", headers={"Authorization": f"Bearer {TOKEN}"})
            assert given.json() == known
            broken = await http.post(f"{url}/members/x/leave", content=b"{" * 100)
            assert broken.status_code == 401


def fleet_of(*engines: Engine, on_lost: OnLost = "go_on") -> tuple[Fleet, list[str]]:
    events: list[str] = []
    return Fleet(engines, on_lost=on_lost, notify=lambda name, what, why: events.append(f"{name} {what}")), events


async def test_an_engine_is_asked_to_leave_and_to_come_back_and_every_state_shows() -> None:
    engines = [Engine("rollout[0]"), Engine("rollout[1]"), Engine("rollout[2]", TimeoutError())]
    fleet, events = fleet_of(*engines)
    async with serving(fleet_app(fleet, TOKEN, now=lambda: 7.0)) as url, client_of(url) as client:

        async def health() -> list[str]:
            return [member["health"] for member in await members(client)]

        assert await health() == ["well", "well", "silent"]
        assert (await client.post("/members/rollout[1]/leave")).json()["requested"] == "leave"
        await fleet.begin_transfer()
        await asyncio.sleep(0)
        assert [engine.name for engine in fleet.working] == ["rollout[0]", "rollout[2]"]
        assert engines[1].asked[-1] == "retire"
        assert await health() == ["well", "away", "silent"]
        await client.post("/members/rollout[1]/join")
        await fleet.begin_transfer()
        assert await health() == ["well", "joining", "silent"] and len(fleet.receivers) == 3
        fleet.received(fleet.receivers, 1)
        assert await health() == ["well", "well", "silent"]
        assert events == [f"rollout[1] {what}" for what in ("leaves", "left", "joins", "works")]
        for asked, status in (("rollout[1]/join", 409), ("rollout[9]/leave", 404), ("rollout[1]/go", 422)):
            assert (await client.post(f"/members/{asked}")).status_code == status


async def test_an_engine_that_comes_back_and_is_dead_is_lost() -> None:
    engines = [Engine("a"), Engine("b")]
    fleet, events = fleet_of(*engines)
    fleet.membership.request("b", "leave")
    await fleet.begin_transfer()
    await asyncio.sleep(0)
    engines[1].error = WorkerDied("b died before rejoin")
    fleet.membership.request("b", "join")
    await fleet.begin_transfer()
    assert events == ["b leaves", "b left", "b lost"] and engines[1].ended and fleet.receivers == [engines[0]]


async def test_an_engine_is_lost_once_and_all_who_notice_wait_until_others_have_what_it_had() -> None:
    clearing, cleared = asyncio.Event(), list[str]()

    async def clear_up(engine: Any) -> None:
        await clearing.wait()
        cleared.append(engine.name)

    fleet = Fleet([Engine("a"), Engine("b")], on_lost="go_on", clear_up=clear_up)
    noticed = [asyncio.create_task(fleet.lose({"b": "b died"})) for _ in range(2)]
    await asyncio.sleep(0)
    assert [engine.name for engine in fleet.working] == ["a"] and not any(task.done() for task in noticed)
    clearing.set()
    await asyncio.gather(*noticed)
    assert cleared == ["b"]
    with pytest.raises(LostEngine, match="a died; no engine is left to generate"):
        await fleet.lose({"a": "a died"})
