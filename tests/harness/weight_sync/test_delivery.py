"""What becomes of a transfer that fails: whom it is tried again with, and what is told of whom."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from harness.protocols import Span
from harness.runtime.runtime import WorkerDied
from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.coordinator import Coordinator, LostEngine, RetryPolicy
from harness.weight_sync.membership import Fleet, OnLost
from harness.weight_sync.plan import TransferError, plan_transfer
from harness.weight_sync.process_group import Rendezvous
from harness.weight_sync.transports import GroupTransport
from schedules.base import Transport
from tests.support.role_setting import settle

PLAN = plan_transfer({"weight": torch.zeros(3)}.items(), 1 << 20)
BROKEN, DIED, WRONG = TransferError("the link broke"), WorkerDied("it died"), ValueError("the weights do not fit")


class Worker:
    """Fails as often as `errors` of a method lasts; who raised WorkerDied stays dead."""

    def __init__(self, name: str, log: list[str], errors: dict[str, list[Exception]]) -> None:
        self.name, self._log, self._errors = name, log, errors
        self.dead = False

    async def call(self, method: str, *arguments: Any) -> Any:
        self._log.append(f"{self.name}.{method}")
        if self.dead:
            raise DIED
        if self._errors.get(method):
            error = self._errors[method].pop(0)
            self.dead = isinstance(error, WorkerDied)
            raise error
        match method:
            case "plan":
                return PLAN
            case "open":
                return CollectiveOffer(PLAN, Rendezvous("127.0.0.1", 1, 4, 5.0))
            case "publish" | "load" | "stage" | "swap":
                return [Span("role", self.name, method, 0.0, 1.0, arguments[0], 0)]
        return None

    async def is_dead(self, within_s: float = 5.0) -> bool:
        return self.dead

    async def end(self) -> None:
        self.dead = True


class Setting:
    def __init__(
        self,
        transport: Transport,
        on_lost: OnLost = "end",
        attempts: int = 3,
        **errors: dict[str, list[Exception]],
    ) -> None:
        self.log: list[str] = []
        self.lost: list[str] = []
        self.spans: list[Span] = []
        self.trainer, self.engine0, self.engine1, self.scorer = (
            Worker(name, self.log, errors.get(name, {})) for name in ("trainer", "engine0", "engine1", "scorer")
        )
        self.fleet = Fleet([self.engine0, self.engine1], on_lost=on_lost, notify=self.hear)
        self.coordinator = Coordinator(
            [self.trainer],
            fleet=self.fleet,
            scorers=[self.scorer],
            transport=GroupTransport(transport, "127.0.0.1", 5.0),
            bucket_bytes=1 << 20,
            observe=self.observe,
            retry=RetryPolicy(attempts),
        )

    def observe(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def hear(self, engine: str, what: str, why: str) -> None:
        assert what == "lost"
        self.lost.append(f"{engine}: {why}")

    def count(self, call: str) -> int:
        return self.log.count(call)


def versions(engine0: int, engine1: int, scorer: int) -> dict[str, int]:
    return {"engine0": engine0, "engine1": engine1, "scorer": scorer}


TRANSPORTS: Sequence[Transport] = ("collective", "ipc")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_failed_is_sent_again_to_who_did_not_get_it_over_a_new_wire(transport: Transport) -> None:
    setting = Setting(transport, engine1={"load": [BROKEN]}, trainer={"publish": [BROKEN]})
    await setting.coordinator.connect()
    await setting.coordinator.publish(1)
    assert setting.coordinator.versions == versions(1, 1, 1)
    assert setting.count("engine0.load") == 1 and setting.count("engine1.load") == 2
    assert setting.count("engine0.join") == 1 and setting.count("engine1.join") == 2
    await setting.coordinator.publish(2)
    assert setting.count("engine0.join") == 2, "the next version goes to all again"
    assert setting.coordinator.versions == versions(2, 2, 2)
    await setting.coordinator.publish(3)
    assert setting.count("engine0.join") == 2, "the transport is up"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_that_never_gets_it_ends_the_run_by_name_and_keeps_its_version(transport: Transport) -> None:
    setting = Setting(transport, engine1={"load": [BROKEN] * 9})
    await setting.coordinator.connect()
    with pytest.raises(LostEngine, match="engine1 did not get version 1 and holds version 0: the link broke .*3 attem"):
        await setting.coordinator.publish(1)
    assert setting.count("engine1.load") == 3
    assert setting.coordinator.versions == versions(1, 0, 1) and not setting.lost


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_run_that_may_goes_on_without_the_engine_and_says_so(transport: Transport) -> None:
    setting = Setting(transport, "go_on", 2, engine1={"load": [BROKEN] * 2})
    await setting.coordinator.connect()
    await setting.coordinator.publish(1)
    (told,) = setting.lost
    assert told == "engine1: engine1 did not get version 1 and holds version 0: the link broke (after 2 attempts)"
    await setting.coordinator.publish(2)
    assert setting.coordinator.versions == versions(2, 0, 2)
    assert setting.coordinator.membership.of("engine1").health == "lost"
    assert setting.count("engine1.load") == 2


async def test_the_dead_are_not_asked_again() -> None:
    setting = Setting("collective", "go_on", engine1={"load": [DIED]}, engine0={"load": [BROKEN]})
    await setting.coordinator.connect()
    await setting.coordinator.publish(1)
    assert setting.count("engine1.load") == 1 and setting.count("engine0.load") == 2
    assert setting.coordinator.versions == versions(1, 0, 1) and len(setting.lost) == 1


async def test_a_run_cannot_go_on_without_any_engine_nor_without_a_scorer() -> None:
    both = Setting("collective", "go_on", 1, engine0={"load": [BROKEN]}, engine1={"load": [BROKEN]})
    with pytest.raises(LostEngine, match="engine0 did not get version 1 .*; engine1 did not get version 1"):
        await both.coordinator.publish(1)
    scorer = Setting("collective", "go_on", 1, scorer={"load": [BROKEN]})
    with pytest.raises(LostEngine, match="scorer did not get version 1"):
        await scorer.coordinator.publish(1)


async def test_a_dead_trainer_ends_the_run_at_once() -> None:
    broken = {"load": [BROKEN]}
    setting = Setting("collective", trainer={"publish": [DIED]}, engine0=dict(broken), engine1={"load": [BROKEN]})
    with pytest.RaisesGroup(pytest.RaisesExc(WorkerDied, match="it died")):
        await setting.coordinator.publish(1)
    assert setting.count("trainer.publish") == 1
    assert setting.coordinator.versions == versions(0, 0, 1)


async def test_what_no_attempt_mends_is_raised_as_it_is() -> None:
    setting = Setting("collective", "go_on", engine1={"load": [WRONG]})
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="do not fit")):
        await setting.coordinator.publish(1)
    assert setting.count("engine1.load") == 1


async def test_a_wire_that_does_not_come_up_is_tried_again_too() -> None:
    setting = Setting("collective", engine1={"load": [BROKEN], "join": []})
    await setting.coordinator.connect()
    setting.engine1._errors["join"] = [BROKEN]
    await setting.coordinator.publish(1)
    assert setting.count("engine1.join") == 3 and setting.count("engine1.load") == 2
    assert setting.coordinator.versions == versions(1, 1, 1)


async def test_an_engine_that_does_not_answer_is_given_up() -> None:
    setting = Setting("collective", "go_on", engine1={"load": [TimeoutError("slow")]})
    await setting.coordinator.publish(1)
    assert setting.count("engine1.load") == 1 and "engine1 did not answer load within 10.0 s" in setting.lost[0]


async def test_a_copy_that_did_not_arrive_is_sent_again_from_host_memory() -> None:
    setting = Setting("host_staged", engine1={"stage": [BROKEN]}, trainer={"wait_arrived": [BROKEN]})
    await setting.coordinator.connect()
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.wait_arrived(1)
    await setting.coordinator.finish()
    assert setting.count("trainer.publish") == 1 and setting.count("trainer.resend") == 1
    assert setting.count("engine0.stage") == 1 and setting.count("engine1.stage") == 2
    assert setting.count("scorer.swap") == 1
    assert setting.coordinator.versions == versions(0, 0, 1)
    await setting.coordinator.start_transfer(2)
    await setting.coordinator.finish()
    assert setting.count("engine0.join") == 2


async def test_a_staged_version_arrives_once_the_run_goes_on_without_who_did_not_get_it() -> None:
    setting = Setting("host_staged", "go_on", 2, engine1={"stage": [BROKEN] * 2})
    await setting.coordinator.connect()
    arrived = asyncio.create_task(setting.coordinator.wait_arrived(1))
    await setting.coordinator.start_transfer(1)
    await arrived
    await setting.coordinator.swap(setting.fleet.working, 1)
    assert setting.coordinator.versions == versions(1, 0, 1) and len(setting.lost) == 1


async def test_a_staged_version_that_one_engine_never_gets_ends_the_run() -> None:
    setting = Setting("host_staged", engine1={"stage": [BROKEN] * 3})
    await setting.coordinator.start_transfer(1)
    await settle()
    for call in (setting.coordinator.wait_arrived(1), setting.coordinator.finish()):
        with pytest.raises(LostEngine, match="engine1 did not get version 1"):
            await call


async def test_engines_come_and_go_between_transfers() -> None:
    setting = Setting("collective")
    await setting.coordinator.connect()
    await setting.coordinator.publish(1)
    newcomer = Worker("engine2", setting.log, {})
    setting.fleet.add(newcomer, version=0)
    setting.fleet.remove(setting.engine0)
    await setting.coordinator.publish(2)
    assert setting.coordinator.versions == {"engine1": 2, "scorer": 2, "engine2": 2}
    assert setting.count("engine0.load") == 1 and setting.count("engine2.join") == 1


@pytest.mark.parametrize(
    "trainer", [{"publish": [BROKEN]}, {"publish": [], "resend": [BROKEN], "wait_arrived": [BROKEN]}]
)
async def test_what_was_not_sent_did_not_arrive(trainer: dict[str, list[Exception]]) -> None:
    setting = Setting("host_staged", trainer=trainer, engine1={"stage": [BROKEN]} if "resend" in trainer else {})
    await setting.coordinator.connect()
    if "resend" in trainer:
        await setting.coordinator.start_transfer(1)
        await setting.coordinator.wait_arrived(1)
        assert setting.count("trainer.resend") == 2 and setting.count("engine1.stage") == 2
    else:
        await setting.coordinator.publish(1)
        assert setting.count("trainer.publish") == 2 and setting.count("engine0.stage") == 1
        assert setting.coordinator.versions == versions(1, 1, 1)
