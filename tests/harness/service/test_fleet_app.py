"""Membership over HTTP: who may ask, what is answered, and what a restart loses (nothing)."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from harness.rpc import http_server
from harness.rpc.http_server import LOOPBACK, serving
from harness.runtime.runtime import WorkerDied
from harness.service.fleet_app import Refused, ServiceClient, fleet_app, membership_app
from harness.weight_sync.membership import Fleet, LostEngine, Membership, OnLost
from tests.support.proxies import Proxy

TOKEN = "a token"


class Time:
    now = 0.0


@pytest.fixture
async def url() -> AsyncIterator[str]:
    Time.now = 0.0
    app = membership_app(Membership(), TOKEN, silent_after_s=10.0, now=lambda: Time.now)
    async with serving(app) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[ServiceClient]:
    async with ServiceClient(url, TOKEN, timeout_s=60.0) as client:
        yield client


async def members(client: ServiceClient) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in (await client.topology())["members"]}


async def test_members_have_ranks_versions_places_and_health(client: ServiceClient) -> None:
    await client.join("rollout[0]", 3, place="node 1")
    await client.join("actor_fwd[0]", 4, kind="scorer")
    await client.heartbeat("rollout[0]", 5)
    known = await members(client)
    assert list(known) == ["rollout[0]", "actor_fwd[0]"]
    first = known["rollout[0]"]
    assert (first["rank"], first["version"], first["place"], first["health"]) == (1, 5, "node 1", "well")
    assert (known["actor_fwd[0]"]["rank"], known["actor_fwd[0]"]["kind"]) == (2, "scorer")


async def test_a_member_that_leaves_takes_no_part_in_the_next_epoch(client: ServiceClient) -> None:
    await client.join("a", 0)
    await client.join("b", 0)
    epoch = (await client.topology())["epoch"]
    assert (await client.leave("a"))["epoch"] > epoch
    left = await members(client)
    assert left["b"]["rank"] == 1 and "a" not in left
    with pytest.raises(Refused, match="'a' is no member; join first") as refused:
        await client.leave("a")
    assert refused.value.status == 404


async def test_a_member_without_heartbeats_is_silent(client: ServiceClient) -> None:
    await client.join("a", 0)
    Time.now = 10.5
    silent = (await members(client))["a"]
    assert silent["health"] == "silent" and silent["seen_s_ago"] == 10.5
    await client.heartbeat("a", 1)
    assert (await members(client))["a"]["health"] == "well"


async def test_a_request_without_the_token_is_refused_and_changes_nothing(url: str, client: ServiceClient) -> None:
    await client.join("a", 2)
    async with ServiceClient(url, "another token", timeout_s=60.0) as stranger:
        for ask in (stranger.join("b", 0), stranger.heartbeat("a", 9), stranger.leave("a"), stranger.topology()):
            with pytest.raises(Refused, match="the token is wrong or missing") as refused:
                await ask
            assert refused.value.status == 401
    async with httpx2.AsyncClient(trust_env=False) as bare:
        assert (await bare.get(f"{url}/topology")).status_code == 401
    known = await members(client)
    assert known.keys() == {"a"} and known["a"]["version"] == 2


async def test_what_makes_no_sense_is_refused(client: ServiceClient) -> None:
    for join in (client.join("", 0), client.join("a", -1)):
        with pytest.raises(Refused) as refused:
            await join
        assert refused.value.status == 422


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "a", "version": NaN}',
        b'{"name": "a", "version": 1e400}',
        b'{"name": "\\ud800", "version": 0}',
        b'{"name": "a", "place": "\\udfff"}',
        b'{"name": "a", "version": %s}' % (b"9" * 4000),
        b"NaN",
    ],
)
async def test_numbers_that_are_none_and_halves_of_characters_are_refused(
    url: str, client: ServiceClient, body: bytes
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(trust_env=False, headers=headers) as http:
        answer = await http.post(f"{url}/members", content=body)
        assert await members(client) == {}
        assert answer.status_code == 422 and answer.json()["detail"][0]["loc"][0] == "body"


def request(*headers: str, token: str = TOKEN) -> bytes:
    head = ["POST /members HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*head, "", ""]).encode()


async def answered(url: str, said: bytes) -> int:
    """The status of the answer, after which the connection has ended; 0 without one."""
    reader, writer = await asyncio.open_connection(LOOPBACK, int(url.rpartition(":")[2]))
    try:
        writer.write(said)
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


async def test_a_body_is_not_read_without_the_token_and_never_beyond_its_limit(url: str) -> None:
    huge = f"Content-Length: {1 << 40}"
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    assert await answered(url, request(huge, token="guess")) == 401
    assert await answered(url, request("Transfer-Encoding: chunked", token="guess")) == 401
    assert await answered(url, request(huge)) == 413
    assert await answered(url, request("Transfer-Encoding: chunked") + chunk + b"1\r\nx\r\n") == 413


async def test_a_request_that_does_not_come_is_not_waited_for(
    url: str, client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.01)
    assert await answered(url, b"") == 0
    assert await answered(url, request()[:-1]) == 0
    assert await answered(url, request("Content-Length: 5") + b"{") == 408
    monkeypatch.undo()
    assert await members(client) == {}


async def test_connections_without_a_request_do_not_keep_members_out(url: str, client: ServiceClient) -> None:
    port = int(url.rpartition(":")[2])
    strangers = [await asyncio.open_connection(LOOPBACK, port) for _ in range(70)]
    assert await members(client) == {}
    assert await strangers[0][0].read() == b"", "the oldest was sent away"
    for _, writer in strangers:
        writer.close()


async def test_it_binds_loopback_and_needs_a_token(url: str) -> None:
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="needs a token"):
        membership_app(Membership(), "")


async def test_a_service_that_is_not_there_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    async with ServiceClient(f"http://{LOOPBACK}:{port}", TOKEN) as client:
        with pytest.raises(ConnectionError, match=f"no weight sync service at http://127.0.0.1:{port}"):
            await client.topology()


async def test_a_restarted_service_knows_all_members_again_with_the_versions_that_they_hold() -> None:
    async with serving(membership_app(Membership(), TOKEN)) as url:
        async with ServiceClient(url, TOKEN, timeout_s=60.0) as client:
            for name, version in {"a": 1, "b": 2}.items():
                await client.heartbeat(name, version)
    membership = Membership()
    async with serving(membership_app(membership, TOKEN)) as url:
        async with ServiceClient(url, TOKEN, timeout_s=60.0) as client:
            for name, version in {"a": 3, "b": 2}.items():  # an update while the service was away
                await client.heartbeat(name, version)
            assert {name: member["version"] for name, member in (await members(client)).items()} == {"a": 3, "b": 2}
            assert sorted(membership.ranks.values()) == [1, 2]


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
    async with (
        serving(fleet_app(fleet, TOKEN, now=lambda: 7.0)) as url,
        ServiceClient(url, TOKEN) as client,
        ServiceClient(url, "guess") as stranger,
    ):

        async def health() -> list[str]:
            return [member["health"] for member in (await client.topology())["members"]]

        assert await health() == ["well", "well", "silent"]
        assert (await client.request("rollout[1]", "leave"))["requested"] == "leave"
        await fleet.begin_transfer()
        await asyncio.sleep(0)
        assert [engine.name for engine in fleet.working] == ["rollout[0]", "rollout[2]"]
        assert engines[1].asked[-1] == "retire"
        assert await health() == ["well", "away", "silent"]
        await client.request("rollout[1]", "join")
        await fleet.begin_transfer()
        assert await health() == ["well", "joining", "silent"] and len(fleet.receivers) == 3
        fleet.received(fleet.receivers, 1)
        assert await health() == ["well", "well", "silent"]
        assert events == [f"rollout[1] {what}" for what in ("leaves", "left", "joins", "works")]
        for name, requested, status in (
            ("rollout[1]", "join", 409),
            ("rollout[9]", "leave", 404),
            ("rollout[1]", "go", 422),
        ):
            with pytest.raises(Refused) as refused:
                await client.request(name, requested)  # type: ignore[arg-type]
            assert refused.value.status == status
        with pytest.raises(Refused, match="the token is wrong"):
            await stranger.topology()


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
