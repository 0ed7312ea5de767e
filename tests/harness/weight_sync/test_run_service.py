"""The engines of a run over HTTP, in the event loop of the run."""

import asyncio
from typing import Any

import pytest

from harness.runtime.handles import WorkerDied
from harness.weight_sync.client import Refused, ServiceClient
from harness.weight_sync.fleet import Fleet, LostEngine, OnLost
from harness.weight_sync.run_service import make_fleet_app, serving


class Engine:
    """Answers but for what it is told to raise; who waits in `busy` does not answer at all."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.ended = name, error, False
        self.asked: list[str] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        self.asked.append(method)
        if self.error is not None:
            raise self.error
        return []

    async def is_dead(self, within_s: float = 5.0) -> bool:
        return self.error is not None

    async def end(self) -> None:
        self.ended = True


def fleet_of(*engines: Engine, on_lost: OnLost = "go_on") -> tuple[Fleet, list[str]]:
    told: list[str] = []
    return Fleet(engines, on_lost=on_lost, tell=lambda name, what, why: told.append(f"{name} {what}")), told


async def test_an_engine_is_asked_to_leave_and_to_come_back_and_is_seen_on_its_way() -> None:
    engines = [Engine("rollout[0]"), Engine("rollout[1]"), Engine("rollout[2]", TimeoutError())]
    fleet, told = fleet_of(*engines)
    async with serving(make_fleet_app(fleet, "secret", now=lambda: 7.0)) as url:
        client = ServiceClient(url, "secret")

        async def ask(*arguments: Any) -> dict[str, Any]:
            return await asyncio.to_thread(client.ask, *arguments)

        async def health() -> list[str]:
            return [member["health"] for member in (await asyncio.to_thread(client.topology))["members"]]

        assert await health() == ["well", "well", "silent"]
        assert (await ask("rollout[1]", "leave"))["wish"] == "leave"
        await fleet.turn()
        await asyncio.sleep(0)
        assert [engine.name for engine in fleet.working] == ["rollout[0]", "rollout[2]"]
        assert engines[1].asked[-1] == "retire"
        assert await health() == ["well", "away", "silent"]
        await ask("rollout[1]", "join")
        await fleet.turn()
        assert await health() == ["well", "joining", "silent"] and len(fleet.receivers) == 3
        fleet.enter(fleet.receivers)
        assert await health() == ["well", "well", "silent"]
        assert told == [f"rollout[1] {what}" for what in ("leaves", "left", "joins", "works")]
        for name, wish, status in (
            ("rollout[1]", "join", 409),
            ("rollout[9]", "leave", 404),
            ("rollout[1]", "go", 422),
        ):
            with pytest.raises(Refused) as refused:
                await ask(name, wish)
            assert refused.value.status == status
        with pytest.raises(Refused, match="the token is wrong"):
            await asyncio.to_thread(ServiceClient(url, "guess").topology)
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(client.topology)


async def test_who_comes_back_and_is_dead_is_lost() -> None:
    engines = [Engine("a"), Engine("b")]
    fleet, told = fleet_of(*engines)
    fleet.membership.ask("b", "leave")
    await fleet.turn()
    await asyncio.sleep(0)
    engines[1].error = WorkerDied("b died before rejoin")
    fleet.membership.ask("b", "join")
    await fleet.turn()
    assert told == ["b leaves", "b left", "b lost"] and engines[1].ended and fleet.receivers == [engines[0]]


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
