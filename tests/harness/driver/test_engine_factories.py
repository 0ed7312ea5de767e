"""Where the workers of a job's engines go."""

from __future__ import annotations

from harness.config.compose import compose_job
from harness.config.placement import Placement
from harness.driver.engine_factories import RealEngines

APART = Placement({"rollout": (0, 1, 2, 3), "actor": (4, 5)})


def test_a_worker_has_all_devices_of_its_engine_and_one_for_any_other_role() -> None:
    config = compose_job(["engine.tensor_parallel=2"])
    engines = RealEngines(config, config.model, 0, True, 2, ("here", 1), None)
    assert (engines.workers("rollout", 4), engines.workers("actor", 2)) == (2, 2)
    assert [engines.devices_of("rollout", number, APART) for number in range(2)] == [(0, 1), (2, 3)]
    assert [engines.devices_of("actor", number, APART) for number in range(2)] == [(4,), (5,)]
