"""The roles of a worker are made in an order in which their devices can hold them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.config.compose import compose_job, make_schedule
from harness.config.placement import Placement
from harness.driver import build
from harness.driver.assemble import start_workers
from harness.driver.build import WorkerSpec, build_in_stages
from harness.driver.engine_factories import RealEngines
from harness.protocols import Request
from harness.runtime.runtime import RoleName
from harness.workers.held_engine import HeldEngine
from harness.workers.recording import RecordingSettings, TokenDecoder
from harness.workers.turns import NO_TURNS
from tests.support.role_setting import CPU, TASK, CountingQueue, HandEngine, TickingClock

ROLES: list[RoleName] = [("actor", 0), ("rollout", 0), ("rollout", 1)]


class Engine(HandEngine):
    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__(slots=1000)
        self.number, self.log = number, log
        log.append(f"engine {number} starts")

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.finish([request.sample_id for request in requests])

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await super().sleep(keep_weights=keep_weights)
        self.log.append(f"engine {self.number} sleeps, weights kept: {keep_weights}")

    async def wake(self) -> None:
        await super().wake()
        self.log.append(f"engine {self.number} wakes")


def spec_of(log: list[str], monkeypatch: pytest.MonkeyPatch, *settings: str) -> WorkerSpec:
    def trainer(number: int, spec: WorkerSpec, beside: Any) -> Any:
        log.append("the trainer loads")
        return SimpleNamespace(engine=None, turns=NO_TURNS)

    monkeypatch.setitem(build._BUILD, "actor", trainer)
    engines: Any = SimpleNamespace(
        rollout=lambda role, number, clock: Engine(number, log),
        task=TASK,
        seed=0,
        device=CPU,
        response_limit=8,
        generate_s=0.0,
        transfer_pace=None,
        engine_device=lambda rank, device, queue, limit_s: None,
        beside_turns=lambda device, world, first, together: device,
        local_receiver=lambda trainer, clock: None,
    )
    config = compose_job(["schedule=colocate_sync", *settings])
    return WorkerSpec(
        config,
        make_schedule(config),
        CountingQueue(),
        TickingClock(),
        None,
        engines,
        engine_count={"rollout": 2},
        scores_beside_actor=True,
        turns_of=lambda role, number: NO_TURNS,
        recording=RecordingSettings(TokenDecoder(), config.algorithm.group_size),
    )


async def test_engines_start_alone_and_sleep_before_the_trainer_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    made = await build_in_stages(ROLES, spec_of(log, monkeypatch))
    assert log == [
        *(f"engine {n} {what}" for n in (0, 1) for what in ("starts", "sleeps, weights kept: True")),
        "the trainer loads",
    ], "version 0 comes from nobody else, so they keep it"
    assert made["rollout", 1].engine.number == 1
    settings = made["rollout", 0].settings
    assert settings.shares_device and not settings.keeps_weights


async def test_an_evaluation_before_the_first_batch_wakes_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    made = await build_in_stages([("rollout", 0), ("actor", 0)], spec_of(log, monkeypatch, "eval.every=1"))
    engine = made["rollout", 0].engine
    assert isinstance(engine, HeldEngine)
    log.clear()
    await engine.hold()
    (done,) = await engine.generate([Request(0, np.array([1]))])
    assert done.sample_id == 0
    await engine.let_go()
    assert log == ["engine 0 wakes", "engine 0 sleeps, weights kept: True"]


APART = Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5)})


def test_a_worker_has_all_devices_of_its_engine_and_one_for_any_other_role() -> None:
    config = compose_job(["engine.tensor_parallel=2"])
    engines = RealEngines(config, config.model, 0, True, 2, ("here", 1), None)
    assert (engines.workers("rollout", 4), engines.workers("actor", 2)) == (2, 2)
    assert [engines.devices_of("rollout", number, APART) for number in range(2)] == [(0, 1), (2, 3)]
    assert [engines.devices_of("actor", number, APART) for number in range(2)] == [(4,), (5,)]


def test_an_engine_beside_training_ranks_lives_with_that_of_its_first_device_and_starts_last() -> None:
    together = Placement(dict.fromkeys(("rollout", "actor"), (0, 1, 2, 3)))
    config = compose_job(["engine.tensor_parallel=2"])
    started: list[tuple[str, tuple[int, ...], list[Any]]] = []

    def start_worker(name: str, devices: tuple[int, ...], roles: dict[Any, type], build: Any) -> list[Any]:
        started.append((name, devices, list(roles)))
        return list(roles)

    backend: Any = SimpleNamespace(
        engines=RealEngines(config, config.model, 0, True, 4, ("here", 1), None),
        runtime=SimpleNamespace(start_worker=start_worker),
    )
    handles = start_workers(backend, together, {"rollout": 2, "actor": 4}, lambda roles: {})
    assert handles["rollout"] == [("rollout", 0), ("rollout", 1)] and len(handles["actor"]) == 4
    assert started == [
        ("device[1]", (1,), [("actor", 1)]),
        ("device[3]", (3,), [("actor", 3)]),
        ("device[0,1]", (0, 1), [("rollout", 0), ("actor", 0)]),
        ("device[2,3]", (2, 3), [("rollout", 1), ("actor", 2)]),
    ]
