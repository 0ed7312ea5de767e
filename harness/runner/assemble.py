"""Brings up every role of a job on a runtime, and joins them to what a schedule sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from engines import ENGINES
from harness.config import JobConfig, ModelConfig
from harness.placement import HOST_ROLES, Placement
from harness.roles.dataflow import queue_spec
from harness.runner.build import (
    Recipe,
    build_actor,
    build_actor_fwd,
    build_advantages,
    build_reference,
    build_reward,
    build_rollout,
    make_task,
)
from harness.runner.job import Observer, PromptSource, PublishedWeights, RolloutPool, RunningJob, StagePool, TrainerPool
from harness.runtime.clock import RealClock
from harness.runtime.ray_runtime import RayRuntime, RemoteRole
from harness.transfer_queue.ray_backend import RayQueue
from harness.weight_sync.coordinator import Coordinator
from schedules import Schedule
from schedules.capacity import Capacity

_STAGES: dict[str, Callable[..., Any]] = {
    "reference": build_reference,
    "actor_fwd": build_actor_fwd,
    "reward": build_reward,
    "advantages": build_advantages,
}


@dataclass(frozen=True)
class Assembly:
    """A job and the parts of it that the runner itself needs."""

    job: RunningJob
    coordinator: Coordinator
    trainers: list[RemoteRole]
    workers: list[RemoteRole]
    """All of them, the trainers too."""
    store: TCPStore
    """Where the training ranks meet; it has to outlive them."""


def assemble(
    config: JobConfig,
    model: ModelConfig,
    schedule: Schedule,
    seed: int,
    *,
    placement: Placement,
    runtime: RayRuntime,
    clock: RealClock,
    observer: Observer,
) -> Assembly:
    """Start all roles (they come up side by side, in the background) and build the job around them."""
    devices, algorithm, wait_s = placement.devices, config.algorithm, config.cluster.wait_timeout_s
    capacity = Capacity(algorithm.batch_groups, schedule.eta)
    batch_rows = algorithm.batch_groups * algorithm.group_size
    spec = queue_spec(
        list(devices),
        training_ranks=len(devices["actor"]),
        capacity_rows=batch_rows * (capacity.worst_lag + 1),
    )
    queue = RayQueue.start(spec)
    recipe = Recipe(
        config=config,
        model=model,
        seed=seed,
        engine=ENGINES[config.engine.name],
        device="cuda" if runtime.gpu else "cpu",
        queue=queue,
        origin=clock.origin,
    )
    world = len(devices["actor"])
    # The store lives in the driver, so that no rank has to be up before the others can be told where to meet.
    store = TCPStore(runtime.host, 0, world, True, timedelta(seconds=wait_s), wait_for_workers=False)
    meet = {"world": world, "host": runtime.host, "port": store.port}
    trainers = [runtime.start("actor", rank, build_actor, recipe=recipe, **meet) for rank in range(world)]
    rollouts = [
        runtime.start("rollout", n, build_rollout, recipe=recipe, engines=len(devices["rollout"]))
        for n in range(len(devices["rollout"]))
    ]
    stages = {
        role: [
            runtime.start(role, n, build, recipe=recipe) for n in range(1 if role in HOST_ROLES else len(devices[role]))
        ]
        for role, build in _STAGES.items()
        if role in devices or role in HOST_ROLES
    }
    pools = {role: StagePool(role, workers, observer) for role, workers in stages.items()}
    coordinator = Coordinator(
        trainers,
        [*rollouts, *stages.get("actor_fwd", [])],
        transport=schedule.transport,
        host=runtime.host,
        bucket_bytes=config.cluster.bucket_bytes,
        timeout_s=wait_s,
        observe=observer.spans,
    )
    prompts = PromptSource(
        make_task(config),
        queue,
        clock,
        observer,
        seed=seed,
        batch=algorithm.batch_groups,
        group_size=algorithm.group_size,
        iterations=config.iterations,
        wait_timeout_s=wait_s,
    )
    job = RunningJob(
        iterations=config.iterations,
        batch=algorithm.batch_groups,
        prompts=prompts,
        rollout=RolloutPool(rollouts, observer),
        device_stages=[pool for role, pool in pools.items() if role not in HOST_ROLES],
        host_stages=[pool for role, pool in pools.items() if role in HOST_ROLES],
        trainer=TrainerPool(trainers, observer),
        weights=PublishedWeights(coordinator, queue, observer),
    )
    workers = [*trainers, *rollouts, *(worker for pool in stages.values() for worker in pool)]
    return Assembly(job, coordinator, trainers, workers, store)
