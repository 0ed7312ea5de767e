"""Which calls are made in which order, what waits for what, and what becomes of a transfer that fails."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.protocols import EngineDied
from harness.runtime.runtime import WorkerDied
from harness.weight_sync.coordinator import NotBrought
from harness.weight_sync.membership import LostEngine
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.transports import send_and_receive, stage_then_swap, write_then_read
from tests.support.coordinated_workers import BROKEN, DIED, OFFER, PLAN, WRONG, Setting, Worker
from tests.support.role_setting import settle
from tests.support.unnoticed import none_unnoticed

RECEIVERS = ("engine0", "engine1", "scorer")


# --- connecting ------------------------------------------------------------------------------------------------------


async def test_through_shared_memory_all_join_then_the_file_goes_also_where_one_fails() -> None:
    setting = await connected("ipc")
    assert setting.log[:3] == ["trainer0.plan", "trainer1.gather_only", "trainer0.open"]
    assert sorted(setting.log[3:]) == [*(f"{name}.join" for name in RECEIVERS), "trainer0.meet_receivers"]
    offer = setting.trainers[0].offer
    assert [worker.arguments["join"] for worker in (*setting.engines, setting.scorer)] == [(offer, n) for n in range(3)]
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is PLAN
    setting = Setting("ipc", fails={"engine1": "join"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to join"), flatten_subgroups=True):
        await setting.coordinator.connect()
    assert not setting.shared_path.exists()
    assert setting.coordinator.plan is None
    setting = Setting("collective")
    setting.engines[0].ends = 3
    await setting.coordinator.connect()
    assert setting.trainers[0].arguments["open"][3] == 5
    assert [worker.arguments["join"][1] for worker in (*setting.engines, setting.scorer)] == [0, 3, 4]


@pytest.mark.parametrize("transport", ["collective", "host_staged"])
async def test_sender_and_receivers_of_a_process_group_meet_at_once(transport: str) -> None:
    setting = Setting(transport)
    meet = setting.trainers[0].hold("meet_receivers")
    connecting = asyncio.create_task(setting.coordinator.connect())
    await settle()
    assert setting.log[:3] == ["trainer0.plan", "trainer1.gather_only", "trainer0.open"]
    assert sorted(setting.log[3:]) == [*(f"{name}.join" for name in RECEIVERS), "trainer0.meet_receivers"]
    meet.set()
    await connecting
    name, plan, place, *sizes = setting.trainers[0].arguments["open"]
    assert (name, plan, sizes) == (transport, PLAN, [3, 5.0, 1])
    assert Path(place).parent.stat().st_mode & 0o777 == 0o700, "no other user of the host can join them"
    assert setting.engines[1].arguments["join"] == (OFFER, 1)


@pytest.mark.parametrize("transport", ["collective", "host_staged"])
async def test_every_rank_sends_where_there_are_buckets(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two = plan_transfer({"one": torch.zeros(3), "other": torch.zeros(3)}.items(), 16)
    monkeypatch.setattr("tests.support.coordinated_workers.PLAN", two)
    setting = await connected(transport)
    name, plan, _place, *sizes = setting.trainers[0].arguments["open"]
    assert (name, plan, sizes) == (transport, two, [3, 5.0, 2])
    assert setting.trainers[1].arguments["send_beside"] == (OFFER, 1)
    assert not any("gather_only" in call for call in setting.log)


async def test_what_did_not_arrive_is_sent_again_by_every_rank_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    two = plan_transfer({"one": torch.zeros(3), "other": torch.zeros(3)}.items(), 16)
    monkeypatch.setattr("tests.support.coordinated_workers.PLAN", two)
    setting = await connected("host_staged", trainer1={"wait_arrived": [BROKEN]}, engine0={"stage": [BROKEN]})
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.finish()
    for trainer in ("trainer0", "trainer1"):
        assert setting.count(f"{trainer}.send") == setting.count(f"{trainer}.resend") == 1
        assert setting.count(f"{trainer}.wait_arrived") == 2
    assert setting.count("trainer1.send_beside") == 2


# --- publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_every_rank_and_every_engine_is_asked_at_once_for_the_same_version(transport: str) -> None:
    setting = Setting(transport)
    written = setting.trainers[0].hold("send")
    publishing = asyncio.create_task(setting.coordinator.distribute(7))
    await settle()
    assert sorted(setting.calls()) == [*(f"{name}.load" for name in RECEIVERS), "trainer0.send", "trainer1.send"]
    written.set()
    await publishing
    assert all(worker.arguments["load"] == (7,) for worker in (*setting.engines, setting.scorer))


async def test_weights_by_way_of_host_memory_can_be_published_in_one_go() -> None:
    setting = Setting("host_staged")
    await setting.coordinator.distribute(1)
    received = [f"{name}.{how}" for how in ("stage", "swap") for name in RECEIVERS]
    assert setting.calls() == ["trainer0.send", "trainer1.send", *received]
    await setting.coordinator.wait_arrived(1)


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_versions_and_spans_are_recorded(transport: str) -> None:
    setting = Setting(transport)
    assert setting.coordinator.versions == dict.fromkeys(RECEIVERS, 0)
    for version in (1, 2):
        await setting.coordinator.distribute(version)
        assert setting.coordinator.versions == dict.fromkeys(RECEIVERS, version)
    assert sorted((span.engine, span.version) for span in setting.spans) == [
        (name, version) for name in (*RECEIVERS, "trainer0", "trainer1") for version in (1, 2)
    ]


@pytest.mark.parametrize("transport", ["ipc", "collective"])
async def test_who_failed_to_load_is_on_record_with_the_old_version(transport: str) -> None:
    setting = Setting(transport, fails={"engine1": "load"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="engine1 fails to load"), flatten_subgroups=True):
        await setting.coordinator.distribute(1)
    assert setting.coordinator.versions == {"engine0": 1, "engine1": 0, "scorer": 1}


@pytest.mark.parametrize("publish", [write_then_read, stage_then_swap])
async def test_no_engine_reads_where_a_rank_failed_to_write(publish: Any) -> None:
    setting = Setting("ipc", fails={"trainer1": "send"})
    outcome = await publish(setting.trainers, setting.engines, 1)
    assert list(outcome.failed) == ["trainer1", "engine0", "engine1"] and not outcome.succeeded(setting.engines)
    assert setting.log == ["trainer0.send", "trainer1.send"]


# --- in two steps ----------------------------------------------------------------------------------------------------


async def test_the_trainer_goes_on_when_its_copy_is_made_and_receivers_take_it_meanwhile() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    assert setting.calls() == ["trainer0.send", "trainer1.send"]
    await settle()
    assert {*(f"{name}.stage" for name in RECEIVERS), "trainer0.wait_arrived"} <= set(setting.calls())
    stage.set()
    await setting.coordinator.finish()
    kinds = {(span.engine, span.kind) for span in setting.spans if span.engine.startswith("engine")}
    assert kinds == {("engine0", "stage_weights"), ("engine1", "stage_weights")}


async def test_a_version_arrives_and_is_swapped_once_every_engine_has_it() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    arrived = asyncio.create_task(setting.coordinator.wait_arrived(1))
    await settle()
    assert not arrived.done()
    stage.set()
    await arrived
    setting = Setting("host_staged")
    stage = setting.engines[0].hold("stage")
    await setting.coordinator.start_transfer(1)
    swapping = asyncio.create_task(setting.coordinator.swap(setting.engines[1:], 1))
    await settle()
    assert "engine1.swap" not in setting.calls()
    stage.set()
    await swapping
    assert "engine1.swap" in setting.calls()
    await setting.coordinator.finish()


async def test_the_next_transfer_waits_for_the_one_before_and_only_then_asks_the_trainer_for_a_copy() -> None:
    setting = Setting("host_staged")
    stage = setting.engines[1].hold("stage")
    await setting.coordinator.start_transfer(1)
    second = asyncio.create_task(setting.coordinator.start_transfer(2))
    await settle()
    assert setting.calls().count("trainer0.send") == 1
    stage.set()
    await second
    assert setting.trainers[0].arguments["send"] == (2,)
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


async def test_engines_swap_when_they_are_asked_and_scorers_at_once() -> None:
    setting = Setting("host_staged")
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.finish()
    assert setting.coordinator.versions == {"engine0": 0, "engine1": 0, "scorer": 1}
    assert not {"engine0.swap", "engine1.swap"} & set(setting.calls())
    await setting.coordinator.swap(setting.engines[:1], 1)
    assert setting.calls() == ["engine0.swap"]
    assert setting.coordinator.versions == {"engine0": 1, "engine1": 0, "scorer": 1}


@pytest.mark.parametrize(("worker", "method"), [("trainer0", "wait_arrived"), ("scorer", "stage"), ("scorer", "swap")])
async def test_engines_do_not_wait_for_others_that_compute_but_the_next_transfer_does(worker: str, method: str) -> None:
    setting = Setting("host_staged")
    answer = {"trainer0": setting.trainers[0], "scorer": setting.scorer}[worker].hold(method)
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


@pytest.mark.parametrize(("worker", "method"), [("engine1", "stage"), ("trainer0", "wait_arrived"), ("scorer", "swap")])
async def test_a_failure_in_the_background_is_raised_by_what_is_called_next(worker: str, method: str) -> None:
    setting = Setting("host_staged", fails={worker: method})
    coordinator = setting.coordinator
    waiting = asyncio.create_task(coordinator.wait_arrived(2))
    await coordinator.start_transfer(1)
    await settle()
    later = (coordinator.wait_arrived(1), coordinator.start_transfer(2), coordinator.swap(setting.engines, 1))
    for call in (waiting, *later, coordinator.distribute(2), coordinator.finish()):
        failure = pytest.RaisesExc(RuntimeError, match=f"{worker} fails to {method}")
        with pytest.RaisesGroup(failure, flatten_subgroups=True):
            await call
    assert "engine0.swap" not in setting.log and setting.log.count("trainer0.send") == 1


async def test_a_failure_in_the_background_that_a_run_ends_before_is_no_traceback() -> None:
    async def start() -> None:
        setting = Setting("host_staged", fails={"engine1": "stage"})
        await setting.coordinator.start_transfer(1)
        await settle()

    with none_unnoticed():
        await start()


async def test_a_copy_that_failed_is_the_trainers_error_and_reaches_no_receiver() -> None:
    setting = Setting("host_staged", fails={"trainer1": "send"})
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="trainer1 fails to send")):
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


# --- transfers that fail ----------------------------------------------------------------------------------------------


async def connected(*told: Any, **errors: Any) -> Setting:
    setting = Setting(*told, **errors)
    await setting.coordinator.connect()
    return setting


def versions(engine0: int, engine1: int, scorer: int) -> dict[str, int]:
    return {"engine0": engine0, "engine1": engine1, "scorer": scorer}


TRANSPORTS = ("collective", "ipc")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_failed_is_sent_again_to_those_that_did_not_get_it_over_a_new_group(transport: str) -> None:
    setting = await connected(transport, engine1={"load": [BROKEN]}, trainer0={"send": [BROKEN]})
    await setting.coordinator.distribute(1)
    assert setting.coordinator.versions == versions(1, 1, 1)
    assert setting.count("engine0.load") == 1 and setting.count("engine1.load") == 2
    assert setting.count("engine0.join") == 1 and setting.count("engine1.join") == 2
    await setting.coordinator.distribute(2)
    assert setting.count("engine0.join") == 2, "the next version goes to all again"
    assert setting.coordinator.versions == versions(2, 2, 2)
    await setting.coordinator.distribute(3)
    assert setting.count("engine0.join") == 2, "the transport is connected"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_that_never_gets_it_ends_the_run_by_name_and_keeps_its_version(transport: str) -> None:
    setting = await connected(transport, engine1={"load": [BROKEN] * 9})
    with pytest.raises(LostEngine, match="engine1 did not get version 1 and holds version 0: the link broke .*3 attem"):
        await setting.coordinator.distribute(1)
    assert setting.count("engine1.load") == 3
    assert setting.coordinator.versions == versions(1, 0, 1) and not setting.lost


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_run_that_may_goes_on_without_the_engine_and_says_so(transport: str) -> None:
    setting = await connected(transport, "go_on", 2, engine1={"load": [BROKEN] * 2})
    await setting.coordinator.distribute(1)
    why = "engine1 did not get version 1 and holds version 0: the link broke (after 2 attempts)"
    assert setting.lost == [f"engine1: {why}"]
    await setting.coordinator.distribute(2)
    assert setting.coordinator.versions == versions(2, 0, 2)
    assert setting.coordinator.membership.of("engine1").health == "lost"
    assert setting.count("engine1.load") == 2


async def test_the_dead_are_not_asked_again_and_count_as_no_attempt_of_others() -> None:
    setting = await connected("collective", "go_on", engine1={"load": [DIED]}, engine0={"load": [BROKEN]})
    await setting.coordinator.distribute(1)
    assert setting.count("engine1.load") == 1 and setting.count("engine0.load") == 2
    assert setting.coordinator.versions == versions(1, 0, 1) and len(setting.lost) == 1
    setting = await connected("collective", "go_on", 2, engine1={"load": [BROKEN]}, scorer={"load": [BROKEN]})
    setting.engines[1].errors["join"] = [DIED]  # as the second attempt connects
    await setting.coordinator.distribute(1)
    assert setting.coordinator.versions == versions(1, 0, 1)
    assert setting.lost == ["engine1: engine1 did not get version 1 and holds version 0: engine1 died: it died"]
    setting = await connected("collective")
    setting.engines[0].errors = {"join": [DIED]}
    with pytest.raises(NotBrought, match="engine0 did not get version 1: engine0 died: it died"):
        await setting.coordinator.bring(setting.engines[0], setting.trainers[0].role.settled_version)


@pytest.mark.parametrize(("transport", "method"), [("collective", "load"), ("host_staged", "swap")])
async def test_an_engine_whose_own_process_died_over_a_transfer_is_lost(transport: str, method: str) -> None:
    died = EngineDied("engine engine1 died: its process is gone")
    broken = {"load": [BROKEN], "stage": [BROKEN]}
    setting = await connected(transport, "go_on", engine1={method: [died]}, engine0=broken)
    await setting.coordinator.distribute(1)
    assert setting.count(f"engine1.{method}") == 1
    assert [line for line in setting.lost if "engine1 died: its process is gone" in line] == setting.lost != []
    assert setting.coordinator.versions == versions(1, 0, 1)


async def test_the_other_ends_of_a_transfer_do_not_wait_for_an_engine_whose_own_process_died() -> None:
    setting, aborted = Setting("collective"), asyncio.Event()

    async def abort() -> None:
        aborted.set()

    died = {"load": [EngineDied("engine engine1 died")]}
    engine = Worker("engine1", setting.log, errors=died)
    outcome = await send_and_receive(setting.trainers, [setting.engines[0], engine], 1, on_death=abort)
    assert aborted.is_set() and list(outcome.failed) == ["engine1"]


async def test_a_dead_trainer_and_what_no_attempt_mends_end_the_run() -> None:
    broken = {"load": [BROKEN]}
    setting = Setting("collective", trainer0={"send": [DIED]}, engine0=dict(broken), engine1={"load": [BROKEN]})
    with pytest.RaisesGroup(pytest.RaisesExc(WorkerDied, match="it died")):
        await setting.coordinator.distribute(1)
    assert setting.count("trainer0.send") == 1
    assert setting.coordinator.versions == versions(0, 0, 1)
    setting = Setting("collective", "go_on", engine1={"load": [WRONG]})
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="do not fit")):
        await setting.coordinator.distribute(1)
    assert setting.count("engine1.load") == 1
    both = Setting("collective", "go_on", 1, engine0={"load": [BROKEN]}, engine1={"load": [BROKEN]})
    with pytest.raises(LostEngine, match="engine0 did not get version 1 .*; engine1 did not get version 1"):
        await both.coordinator.distribute(1)
    scorer = Setting("collective", "go_on", 1, scorer={"load": [BROKEN]})
    with pytest.raises(LostEngine, match="scorer did not get version 1"):
        await scorer.coordinator.distribute(1)


async def test_a_transport_that_does_not_connect_is_tried_again_and_who_is_silent_given_up() -> None:
    setting = await connected("collective", engine1={"load": [BROKEN], "join": []})
    setting.engines[1].errors["join"] = [BROKEN]
    await setting.coordinator.distribute(1)
    assert setting.count("engine1.join") == 3 and setting.count("engine1.load") == 2
    assert setting.coordinator.versions == versions(1, 1, 1)
    setting = Setting("collective", "go_on", engine1={"load": [TimeoutError("slow")]})
    await setting.coordinator.distribute(1)
    assert setting.count("engine1.load") == 1 and "engine1 did not load version 1 within 10.0 s" in setting.lost[0]


async def test_a_copy_that_did_not_arrive_is_sent_again_from_host_memory() -> None:
    setting = await connected("host_staged", engine1={"stage": [BROKEN]}, trainer0={"wait_arrived": [BROKEN]})
    await setting.coordinator.start_transfer(1)
    await setting.coordinator.wait_arrived(1)
    await setting.coordinator.finish()
    assert setting.count("trainer0.send") == 1 and setting.count("trainer0.resend") == 1
    assert setting.count("engine0.stage") == 1 and setting.count("engine1.stage") == 2
    assert setting.count("scorer.swap") == 1
    assert setting.coordinator.versions == versions(0, 0, 1)
    await setting.coordinator.start_transfer(2)
    await setting.coordinator.finish()
    assert setting.count("engine0.join") == 2


async def test_a_staged_version_arrives_without_who_did_not_get_it_or_ends_the_run() -> None:
    setting = await connected("host_staged", "go_on", 2, engine1={"stage": [BROKEN] * 2})
    arrived = asyncio.create_task(setting.coordinator.wait_arrived(1))
    await setting.coordinator.start_transfer(1)
    await arrived
    await setting.coordinator.swap(setting.fleet.working, 1)
    assert setting.coordinator.versions == versions(1, 0, 1) and len(setting.lost) == 1
    setting = Setting("host_staged", engine1={"stage": [BROKEN] * 3})
    await setting.coordinator.start_transfer(1)
    await settle()
    for call in (setting.coordinator.wait_arrived(1), setting.coordinator.finish()):
        with pytest.raises(LostEngine, match="engine1 did not get version 1"):
            await call


async def test_engines_come_go_and_stay_where_others_are_dead() -> None:
    setting = await connected("collective")
    await setting.coordinator.distribute(1)
    newcomer = Worker("engine2", setting.log)
    setting.fleet.add(newcomer, version=0)
    setting.fleet.membership.request("engine0", "leave")
    await setting.coordinator.distribute(2)
    assert setting.coordinator.versions == {"engine0": 1, "engine1": 2, "scorer": 2, "engine2": 2}
    assert setting.count("engine0.load") == 1 and setting.count("engine2.join") == 1
    setting = await connected("collective", "go_on")
    setting.fleet.membership.request("engine1", "leave")
    setting.engines[0].dead = True  # which nobody has noticed
    await setting.coordinator.distribute(1)
    assert setting.coordinator.versions == versions(0, 1, 1) and setting.fleet.membership.working == ["engine1"]


async def test_an_engine_that_came_back_loads_nothing_that_travelled_while_it_was_away() -> None:
    setting = Setting("host_staged")
    coordinator, membership = setting.coordinator, setting.fleet.membership
    await coordinator.connect()
    for version, request in ((1, "leave"), (2, "join"), (3, None)):
        await coordinator.start_transfer(version)
        await coordinator.wait_arrived(version)
        await settle()
        if request is not None:
            membership.request("engine1", request)
    await coordinator.swap(setting.engines, 2)
    assert coordinator.versions == versions(2, 0, 3) and membership.behind == ["engine1"]
    await coordinator.swap(setting.engines[1:], 3)
    assert coordinator.versions == versions(2, 3, 3) and not membership.behind


@pytest.mark.parametrize("trainer", [{"send": [BROKEN]}, {"send": [], "resend": [BROKEN], "wait_arrived": [BROKEN]}])
async def test_what_was_not_sent_did_not_arrive(trainer: dict[str, list[Exception]]) -> None:
    engine = {"stage": [BROKEN]} if "resend" in trainer else {}
    setting = await connected("host_staged", trainer0=trainer, engine1=engine)
    if "resend" in trainer:
        await setting.coordinator.start_transfer(1)
        await setting.coordinator.wait_arrived(1)
        assert setting.count("trainer0.resend") == 2 and setting.count("engine1.stage") == 2
    else:
        await setting.coordinator.distribute(1)
        assert setting.count("trainer0.send") == 2 and setting.count("engine0.stage") == 1
        assert setting.coordinator.versions == versions(1, 1, 1)
