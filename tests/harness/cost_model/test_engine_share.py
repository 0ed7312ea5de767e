"""What an engine may take of a device, on machines that are described: as much as the plan leaves, and no more."""

from __future__ import annotations

import pytest

from harness.checks.job import lengths_of, plan_job
from harness.checks.machine import real_setting
from harness.config.compose import compose_job, make_schedule
from harness.config.machine import Machine
from harness.cost_model.engine_memory import EngineMemory
from harness.cost_model.memory_plan import GIB, EngineShare, MemoryPlan, PoolMemory, engine_share, plan_memory
from harness.planner.memory import planned_memory

MACHINES = ("device=h100", "device=a100", "device=h20", "device=h200", "device=h100 cluster.devices=16")


def shared(*settings: str) -> tuple[MemoryPlan, EngineShare]:
    found = planned_memory(["model=qwen7b", *settings])
    config, schedule = found.config, make_schedule(found.config)
    setting = real_setting(config, schedule, found.machine, found.lengths, gpu=True)
    token = EngineMemory(config.model, config.engine, setting.lengths.sample).token
    return found.plan, engine_share(found.plan, setting, token)


def with_cache(plan: MemoryPlan, cache: float) -> PoolMemory:
    """The engines' pool, with a cache of this size."""
    pool = next(pool for pool in plan.pools if "rollout" in pool.roles)
    items = [item if item.what != "KV cache" else type(item)(item.what, cache, item.phases) for item in pool.items]
    return PoolMemory(pool.roles, pool.devices, pool.phases, tuple(items))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("schedule", ["colocate_sync", "fully_async", "half_step"])
def test_an_engine_has_all_that_others_leave_in_the_phase_that_is_fullest_with_it(
    machine: str, engine: str, schedule: str
) -> None:
    plan, share = shared(f"schedule={schedule}", f"engine={engine}", *machine.split())
    assert plan.fits
    pool = with_cache(plan, share.cache)
    assert max(pool.of(phase) for phase in ("start", "generate", *pool.phases[-1:])) == pytest.approx(plan.there)
    assert share.static < share.whole <= plan.there / share.device, "vLLM refuses a GPU of which less is free"


def test_an_engine_has_more_of_a_device_of_its_own_than_beside_a_larger_trainer() -> None:
    caches = []
    for offload in ("none", "between_phases"):
        _, share = shared(
            "schedule=colocate_sync", "engine=vllm", "device=h100", f"training.optimizer_offload={offload}"
        )
        caches.append(share.cache)
    assert caches[0] < caches[1], "moments rest on the host while the engine generates"


def test_engines_of_cores_share_what_the_job_leaves_of_the_machine() -> None:
    config = compose_job(["engine=torch", "cluster.devices=4", "schedule.split.rollout=3", "cluster.memory_gib=4"])
    plan = plan_job(config, make_schedule(config), Machine(8, 0, 0))
    share = plan.shares["rollout"]
    assert not share.gpu
    setting = real_setting(config, make_schedule(config), Machine(8, 0, 0), lengths_of(config), gpu=False)
    memory = plan_memory(config, plan.placement, setting)
    (engines,) = (pool for pool in memory.pools if "rollout" in pool.roles)
    own = next(item.bytes for item in engines.items if item.what == "KV cache")
    assert memory.host is not None, "processes and the queue have their memory there too"
    taken = memory.everything + memory.host.everything
    assert taken + 3 * (share.cache - own) == pytest.approx(16 * GIB)
