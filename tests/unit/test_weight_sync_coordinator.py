from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.protocols import Span
from harness.weight_sync.coordinator import Coordinator, Transport
from harness.weight_sync.ipc import SharedOffer, create_buffer
from harness.weight_sync.plan import plan_transfer

PLAN = plan_transfer({"weight": torch.zeros(3)}.items(), 1 << 20)


class Worker:
    """Writes down what it is asked, in a log that all workers share; fails at `fails`."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails
        self.heard: dict[str, tuple[Any, ...]] = {}
        self.offer: SharedOffer | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        self.log.append(f"{self.name}.{method}")
        self.heard[method] = arguments
        if method == self.fails:
            raise RuntimeError(f"{self.name} fails to {method}")
        match method:
            case "plan":
                return PLAN
            case "open_shared":
                self.offer = create_buffer(PLAN)
                return self.offer
            case "open_collective":
                return "the offer"
            case "publish" | "load":
                return [Span("role", self.name, "load_weights", 0.0, 1.0, arguments[0], arguments[0] - 1)]
        return None


class Setting:
    def __init__(self, transport: Transport, fails: dict[str, str] | None = None) -> None:
        fails = fails or {}
        self.log: list[str] = []
        self.trainers = [Worker(name, self.log, fails.get(name, "")) for name in ("trainer0", "trainer1")]
        self.receivers = [Worker(name, self.log, fails.get(name, "")) for name in ("engine0", "engine1")]
        self.spans: list[Span] = []
        self.coordinator = Coordinator(
            self.trainers,
            self.receivers,
            transport=transport,
            host="127.0.0.1",
            bucket_bytes=1 << 20,
            timeout_s=5.0,
            observe=self.observe,
        )

    def observe(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    @property
    def shared_path(self) -> Path:
        assert self.trainers[0].offer is not None
        return self.trainers[0].offer.path


async def test_through_shared_memory_all_join_and_then_the_file_is_unlinked() -> None:
    setting = Setting("ipc")
    await setting.coordinator.connect()
    assert setting.log == [
        "trainer0.plan",
        "trainer1.follow",
        "trainer0.open_shared",
        "engine0.join",
        "engine1.join",
    ]
    offer = setting.trainers[0].offer
    assert [receiver.heard["join"] for receiver in setting.receivers] == [(offer, 0), (offer, 1)]
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is PLAN


async def test_the_shared_file_is_unlinked_where_an_engine_fails_to_join() -> None:
    setting = Setting("ipc", fails={"engine1": "join"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to join")):
        await setting.coordinator.connect()
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is None


async def test_through_shared_memory_engines_read_after_every_rank_has_written() -> None:
    setting = Setting("ipc")
    await setting.coordinator.connect()
    setting.log.clear()
    await setting.coordinator.publish(1)
    assert setting.log == ["trainer0.publish", "trainer1.publish", "engine0.load", "engine1.load"]


async def test_by_broadcast_sender_and_receivers_meet_at_once() -> None:
    setting = Setting("collective")
    await setting.coordinator.connect()
    assert setting.log[:3] == ["trainer0.plan", "trainer1.follow", "trainer0.open_collective"]
    assert sorted(setting.log[3:]) == ["engine0.join", "engine1.join", "trainer0.join_collective"]
    assert setting.trainers[0].heard["open_collective"] == (PLAN, "127.0.0.1", 2, 5.0)
    assert setting.receivers[1].heard["join"] == ("the offer", 1)


async def test_by_broadcast_every_rank_and_every_engine_is_asked_for_the_same_version() -> None:
    setting = Setting("collective")
    await setting.coordinator.connect()
    setting.log.clear()
    await setting.coordinator.publish(7)
    assert sorted(setting.log) == ["engine0.load", "engine1.load", "trainer0.publish", "trainer1.publish"]
    assert all(worker.heard["load"] == (7,) for worker in setting.receivers)


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_versions_and_spans_are_recorded(transport: Transport) -> None:
    setting = Setting(transport)
    await setting.coordinator.connect()
    assert setting.coordinator.versions == {"engine0": 0, "engine1": 0}
    for version in (1, 2):
        await setting.coordinator.publish(version)
        assert setting.coordinator.versions == {"engine0": version, "engine1": version}
    assert sorted((span.engine, span.version) for span in setting.spans) == [
        (worker.name, version) for worker in (*setting.receivers, *setting.trainers) for version in (1, 2)
    ]


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_a_failed_transfer_leaves_the_old_versions_on_record(transport: Transport) -> None:
    setting = Setting(transport, fails={"engine1": "load"})
    await setting.coordinator.connect()
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to load"), flatten_subgroups=True):
        await setting.coordinator.publish(1)
    assert setting.coordinator.versions == {"engine0": 0, "engine1": 0}


async def test_no_engine_reads_where_a_rank_failed_to_write() -> None:
    setting = Setting("ipc", fails={"trainer1": "publish"})
    await setting.coordinator.connect()
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="trainer1 fails to publish")):
        await setting.coordinator.publish(1)
    assert "engine0.load" not in setting.log
