"""Who is asked what, in which order, and who waits for whom."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.protocols import Span
from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.coordinator import Coordinator
from harness.weight_sync.ipc import SharedOffer, share_slots
from harness.weight_sync.membership import Fleet
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import Rendezvous
from harness.weight_sync.transports import (
    GroupTransport,
    stage_then_swap,
    write_then_read,
)
from schedules.base import Transport
from tests.support.role_setting import settle

PLAN = plan_transfer({"weight": torch.zeros(3)}.items(), 1 << 20)
OFFER = CollectiveOffer(PLAN, Rendezvous("127.0.0.1", 1, 4, 5.0))
KINDS = {
    "publish": "publish_weights",
    "load": "load_weights",
    "stage": "stage_weights",
    "swap": "load_weights",
}


class Worker:
    """Writes down what it is asked, in a log that all workers share; fails at `fails`, and waits for `gates`."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails
        self.heard: dict[str, tuple[Any, ...]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.offer: SharedOffer | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        self.log.append(f"{self.name}.{method}")
        self.heard[method] = arguments
        if method in self.gates:
            await self.gates[method].wait()
        if method == self.fails:
            raise RuntimeError(f"{self.name} fails to {method}")
        match method:
            case "plan":
                return PLAN
            case "open" if arguments[0] == "ipc":
                self.offer = share_slots(PLAN, Rendezvous("127.0.0.1", 1, 4, 5.0))
                return self.offer
            case "open":
                return OFFER
            case "publish" | "load" | "stage" | "swap":
                return [Span("role", self.name, KINDS[method], 0.0, 1.0, arguments[0], arguments[0] - 1)]
        return None

    def hold(self, method: str) -> asyncio.Event:
        """From now on this call waits for the event."""
        return self.gates.setdefault(method, asyncio.Event())


class Setting:
    def __init__(self, transport: Transport, fails: dict[str, str] | None = None) -> None:
        fails = fails or {}
        self.log: list[str] = []
        self.spans: list[Span] = []

        def workers(*names: str) -> list[Worker]:
            return [Worker(name, self.log, fails.get(name, "")) for name in names]

        self.trainers, self.engines = workers("trainer0", "trainer1"), workers("engine0", "engine1")
        (self.scorer,) = self.scorers = workers("scorer")
        self.coordinator = Coordinator(
            self.trainers,
            fleet=Fleet(self.engines),
            scorers=self.scorers,
            transport=GroupTransport(transport, "127.0.0.1", 5.0),
            bucket_bytes=1 << 20,
            observe=self.observe,
        )

    def observe(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def asked(self) -> list[str]:
        """What was asked since the last look."""
        asked, self.log[:] = list(self.log), []
        return asked

    @property
    def shared_path(self) -> Path:
        assert self.trainers[0].offer is not None
        return self.trainers[0].offer.path


RECEIVERS = ("engine0", "engine1", "scorer")


# --- connecting ------------------------------------------------------------------------------------------------------


async def test_through_shared_memory_all_join_and_then_the_file_is_unlinked() -> None:
    setting = Setting("ipc")
    await setting.coordinator.connect()
    assert setting.log[:3] == ["trainer0.plan", "trainer1.gather_only", "trainer0.open"]
    assert sorted(setting.log[3:]) == [*(f"{name}.join" for name in RECEIVERS), "trainer0.meet_receivers"]
    offer = setting.trainers[0].offer
    assert [worker.heard["join"] for worker in (*setting.engines, setting.scorer)] == [(offer, n) for n in range(3)]
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is PLAN


async def test_the_shared_file_is_unlinked_where_an_engine_fails_to_join() -> None:
    setting = Setting("ipc", fails={"engine1": "join"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to join"), flatten_subgroups=True):
        await setting.coordinator.connect()
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is None


@pytest.mark.parametrize("transport", ["collective", "host_staged"])
async def test_sender_and_receivers_of_a_process_group_meet_at_once(transport: Transport) -> None:
    setting = Setting(transport)
    meet = setting.trainers[0].hold("meet_receivers")
    connecting = asyncio.create_task(setting.coordinator.connect())
    await settle()
    assert setting.log[:3] == ["trainer0.plan", "trainer1.gather_only", "trainer0.open"]
    assert sorted(setting.log[3:]) == [*(f"{name}.join" for name in RECEIVERS), "trainer0.meet_receivers"]
    meet.set()
    await connecting
    assert setting.trainers[0].heard["open"] == (transport, PLAN, "127.0.0.1", 3, 5.0)
    assert setting.engines[1].heard["join"] == (OFFER, 1)


# --- publishing ------------------------------------------------------------------------------------------------------


async def test_simulated_engines_read_shared_memory_after_every_rank_has_written() -> None:
    setting = Setting("ipc")
    written = setting.trainers[1].hold("publish")
    publishing = asyncio.create_task(write_then_read(setting.trainers, [*setting.engines, setting.scorer], 1))
    await settle()
    assert setting.asked() == ["trainer0.publish", "trainer1.publish"]
    written.set()
    await publishing
    assert setting.asked() == [f"{name}.load" for name in RECEIVERS]


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_every_rank_and_every_engine_is_asked_at_once_for_the_same_version(transport: Transport) -> None:
    setting = Setting(transport)
    written = setting.trainers[0].hold("publish")
    publishing = asyncio.create_task(setting.coordinator.publish(7))
    await settle()
    assert sorted(setting.asked()) == [
        *(f"{name}.load" for name in RECEIVERS),
        "trainer0.publish",
        "trainer1.publish",
    ]
    written.set()
    await publishing
    assert all(worker.heard["load"] == (7,) for worker in (*setting.engines, setting.scorer))


async def test_weights_by_way_of_host_memory_can_be_published_in_one_go() -> None:
    setting = Setting("host_staged")
    await setting.coordinator.publish(1)
    assert setting.asked() == [
        "trainer0.publish",
        "trainer1.publish",
        *(f"{name}.stage" for name in RECEIVERS),
        *(f"{name}.swap" for name in RECEIVERS),
    ]
    await setting.coordinator.wait_arrived(1)


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_versions_and_spans_are_recorded(transport: Transport) -> None:
    setting = Setting(transport)
    assert setting.coordinator.versions == dict.fromkeys(RECEIVERS, 0)
    for version in (1, 2):
        await setting.coordinator.publish(version)
        assert setting.coordinator.versions == dict.fromkeys(RECEIVERS, version)
    assert sorted((span.engine, span.version) for span in setting.spans) == [
        (name, version) for name in (*RECEIVERS, "trainer0", "trainer1") for version in (1, 2)
    ]


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_who_failed_to_load_is_on_record_with_the_old_version(transport: Transport) -> None:
    setting = Setting(transport, fails={"engine1": "load"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to load"), flatten_subgroups=True):
        await setting.coordinator.publish(1)
    assert setting.coordinator.versions == {"engine0": 1, "engine1": 0, "scorer": 1}


@pytest.mark.parametrize("publish", [write_then_read, stage_then_swap])
async def test_no_engine_reads_where_a_rank_failed_to_write(publish: Any) -> None:
    setting = Setting("ipc", fails={"trainer1": "publish"})
    outcome = await publish(setting.trainers, setting.engines, 1)
    assert list(outcome.failed) == ["trainer1", "engine0", "engine1"] and not outcome.succeeded(setting.engines)
    assert setting.log == ["trainer0.publish", "trainer1.publish"]


# --- in two steps ----------------------------------------------------------------------------------------------------


async def test_the_trainer_goes_on_when_its_copy_is_made_and_receivers_take_it_meanwhile() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    assert setting.asked() == ["trainer0.publish", "trainer1.publish"]
    await settle()
    assert {*(f"{name}.stage" for name in RECEIVERS), "trainer0.wait_arrived"} <= set(setting.asked())
    stage.set()
    await setting.coordinator.finish()
    kinds = {(span.engine, span.kind) for span in setting.spans if span.engine.startswith("engine")}
    assert kinds == {("engine0", "stage_weights"), ("engine1", "stage_weights")}


async def test_a_version_arrives_when_every_engine_has_it() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    arrived = asyncio.create_task(setting.coordinator.wait_arrived(1))
    await settle()
    assert not arrived.done()
    stage.set()
    await arrived


async def test_the_next_transfer_waits_for_the_one_before_and_only_then_asks_the_trainer_for_a_copy() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    second = asyncio.create_task(setting.coordinator.start_transfer(2))
    await settle()
    assert setting.asked().count("trainer0.publish") == 1
    stage.set()
    await second
    assert setting.trainers[0].heard["publish"] == (2,)
    await setting.coordinator.finish()


async def test_a_version_that_is_not_staged_yet_can_be_waited_for() -> None:
    setting = Setting("host_staged")
    second = asyncio.create_task(setting.coordinator.wait_arrived(2))
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.wait_arrived(1)
    await settle()
    assert not second.done()
    assert await setting.coordinator.waiting() == ["weights.wait_arrived waits for version 2 to be sent and to arrive"]
    await setting.coordinator.start_transfer(2)
    await second
    await setting.coordinator.wait_arrived(1)
    assert await setting.coordinator.waiting() == []
    await setting.coordinator.finish()


async def test_engines_swap_when_they_are_told_and_scorers_at_once() -> None:
    setting = Setting("host_staged")
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.finish()
    assert setting.coordinator.versions == {"engine0": 0, "engine1": 0, "scorer": 1}
    assert not {"engine0.swap", "engine1.swap"} & set(setting.asked())
    await setting.coordinator.swap(setting.engines[:1], 1)
    assert setting.asked() == ["engine0.swap"]
    assert setting.coordinator.versions == {"engine0": 1, "engine1": 0, "scorer": 1}


@pytest.mark.parametrize(("worker", "call"), [("trainer0", "wait_arrived"), ("scorer", "stage"), ("scorer", "swap")])
async def test_engines_do_not_wait_for_others_that_compute_but_the_next_transfer_does(worker: str, call: str) -> None:
    setting = Setting("host_staged")
    answer = {"trainer0": setting.trainers[0], "scorer": setting.scorer}[worker].hold(call)
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.swap(setting.engines, 1)
    assert setting.coordinator.versions["engine0"] == setting.coordinator.versions["engine1"] == 1
    second = asyncio.create_task(setting.coordinator.start_transfer(2))
    await settle()
    assert not second.done()
    answer.set()
    await second
    assert setting.coordinator.versions["scorer"] == 1
    await setting.coordinator.finish()


async def test_a_swap_waits_for_its_version() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[0].hold("stage")
    await setting.coordinator.start_transfer(1)
    swapping = asyncio.create_task(setting.coordinator.swap(setting.engines[1:], 1))
    await settle()
    assert "engine1.swap" not in setting.asked()
    stage.set()
    await swapping
    assert "engine1.swap" in setting.asked()
    await setting.coordinator.finish()


@pytest.mark.parametrize(("worker", "call"), [("engine1", "stage"), ("trainer0", "wait_arrived"), ("scorer", "swap")])
async def test_a_failure_in_the_background_is_raised_by_whatever_is_called_next_and_at_the_end(
    worker: str, call: str
) -> None:
    setting = Setting("host_staged", fails={worker: call})
    coordinator = setting.coordinator
    waiting = asyncio.create_task(coordinator.wait_arrived(2))
    await coordinator.start_transfer(1)
    await settle()
    later = (
        coordinator.wait_arrived(1),
        coordinator.start_transfer(2),
        coordinator.swap(setting.engines, 1),
        coordinator.publish(2),
    )
    for told in (waiting, *later, coordinator.finish()):
        failure = pytest.RaisesExc(RuntimeError, match=f"{worker} fails to {call}")
        with pytest.RaisesGroup(failure, flatten_subgroups=True):
            await told
    assert "engine0.swap" not in setting.log and setting.log.count("trainer0.publish") == 1


async def test_a_copy_that_failed_is_the_trainers_error_and_reaches_no_receiver() -> None:
    setting = Setting("host_staged", fails={"trainer1": "publish"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="trainer1 fails to publish")):
        await setting.coordinator.start_transfer(1)
    await setting.coordinator.finish()
    assert "engine0.stage" not in setting.log


async def test_who_gives_up_waiting_does_not_end_the_transfer() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[0].hold("stage")
    await setting.coordinator.start_transfer(1)
    finish = asyncio.create_task(setting.coordinator.finish())
    await settle()
    finish.cancel()
    await settle()
    stage.set()
    await setting.coordinator.wait_arrived(1)
    await setting.coordinator.finish()
