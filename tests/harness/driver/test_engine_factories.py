"""Where the workers of a job's engines go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.config.compose import compose_job
from harness.config.placement import Placement
from harness.driver.assemble import start_workers
from harness.driver.engine_factories import RealEngines

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
