"""The membership over HTTP: who may ask, what is told, and what a restart loses (nothing)."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from harness.runtime.clock import RealClock
from harness.weight_sync.client import Refused, ServiceClient, send_heartbeats
from harness.weight_sync.service import Service

TOKEN = "a token"


class Time:
    now = 0.0


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(TOKEN, silent_after_s=10.0, now=lambda: Time.now) as service:
        Time.now = 0.0
        yield service


@pytest.fixture
def client(service: Service) -> ServiceClient:
    return ServiceClient(service.url, TOKEN, timeout_s=60.0)


def members(client: ServiceClient) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in client.topology()["members"]}


def test_members_have_ranks_versions_places_and_health(client: ServiceClient) -> None:
    client.join("rollout[0]", 3, place="node 1")
    client.join("actor_fwd[0]", 4, kind="scorer")
    client.heartbeat("rollout[0]", 5)
    told = members(client)
    assert list(told) == ["rollout[0]", "actor_fwd[0]"]
    first = told["rollout[0]"]
    assert (first["rank"], first["version"], first["place"], first["health"]) == (1, 5, "node 1", "well")
    assert (told["actor_fwd[0]"]["rank"], told["actor_fwd[0]"]["kind"]) == (2, "scorer")


def test_who_leaves_takes_no_part_in_the_next_epoch(client: ServiceClient) -> None:
    client.join("a", 0)
    client.join("b", 0)
    epoch = client.topology()["epoch"]
    assert client.leave("a")["epoch"] > epoch
    assert members(client)["b"]["rank"] == 1 and "a" not in members(client)
    with pytest.raises(Refused, match="'a' is no member; join first") as refused:
        client.leave("a")
    assert refused.value.status == 404


def test_who_is_not_heard_of_is_silent(client: ServiceClient) -> None:
    client.join("a", 0)
    Time.now = 10.5
    assert members(client)["a"]["health"] == "silent" and members(client)["a"]["seen_s_ago"] == 10.5
    client.heartbeat("a", 1)
    assert members(client)["a"]["health"] == "well"


@pytest.mark.parametrize("token", ["", "another token"])
def test_a_wrong_token_is_told_so_and_changes_nothing(service: Service, client: ServiceClient, token: str) -> None:
    client.join("a", 2)
    stranger = ServiceClient(service.url, token, timeout_s=60.0)
    for ask in (
        lambda: stranger.join("b", 0),
        lambda: stranger.heartbeat("a", 9),
        lambda: stranger.leave("a"),
        stranger.topology,
    ):
        with pytest.raises(Refused, match="the token is wrong or missing") as refused:
            ask()
        assert refused.value.status == 401
    assert members(client).keys() == {"a"} and members(client)["a"]["version"] == 2


def test_what_makes_no_sense_is_refused(client: ServiceClient) -> None:
    for join in (lambda: client.join("", 0), lambda: client.join("a", -1)):
        with pytest.raises(Refused) as refused:
            join()
        assert refused.value.status == 422


def test_it_binds_loopback_and_wants_a_token(service: Service) -> None:
    assert service.url.startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="wants a token"):
        Service("")


def test_a_service_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"no weight sync service at http://127.0.0.1:{port}"):
        ServiceClient(f"http://127.0.0.1:{port}", TOKEN).topology()


async def test_a_restarted_service_knows_everybody_again_with_the_versions_that_they_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, held, warned = RealClock.starting_now(), {"a": 1, "b": 2}, asyncio.Event()
    caplog.handler.addFilter(lambda record: warned.set() is None)
    first = Service(TOKEN)
    port = int(first.url.rpartition(":")[2])
    client = ServiceClient(first.url, TOKEN, timeout_s=60.0)

    async def until_it_knows(expected: dict[str, int]) -> None:
        async with asyncio.timeout(60):
            while True:
                topology = await asyncio.to_thread(client.topology)
                if {member["name"]: member["version"] for member in topology["members"]} == expected:
                    return

    async with asyncio.TaskGroup() as tasks:
        with first:
            beats = [
                tasks.create_task(send_heartbeats(client, name, lambda name=name: held[name], clock, every_s=0.01))
                for name in held
            ]
            await until_it_knows(held)
        async with asyncio.timeout(60):
            await warned.wait()
        held["a"] = 3  # an update while nobody kept the books
        with Service(TOKEN, port=port) as second:
            await until_it_knows({"a": 3, "b": 2})
            assert sorted(second.membership.ranks.values()) == [1, 2]
            for beat in beats:
                beat.cancel()
    assert "goes on without the service: no weight sync service" in caplog.text


async def test_who_is_refused_stops_telling(service: Service) -> None:
    stranger = ServiceClient(service.url, "another token", timeout_s=60.0)
    with pytest.raises(Refused, match="token is wrong"):
        await send_heartbeats(stranger, "a", lambda: 0, RealClock.starting_now(), every_s=0.01)
