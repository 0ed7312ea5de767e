"""Assembles a job: starts every role around one queue, and makes the fronts that a schedule calls (`RunningJob`).

    schedule     admit(below)     generate, stream    process, stream          train(i)            publish(v)
                      |                  |                   |                    |                    |
                      v                  v                   v                    v                    v
                PromptSource      rollout engines     reward, advantages,   training ranks ----> Coordinator
                      |              ^       |    reference, actor_fwd, critic    ^                    |
               prompt |       prompt |       | response  ^       | advantage,     | all of it          |
                      v              |       v           |       v log-probs      |                    |
                +===================== TransferQueue: rows stream, a column an arrow ===+              |
                                     ^                   ^                                             |
                                     +-------------------+------- weights of version v ----------------+

Two bounds limit the lag of a sample (schedules/capacity.py): `admit` lets a group into the queue, and the queue hands
it to an engine only below the dispatch limit of that engine's version. Nothing here depends on the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from harness.checks.plugins import queue_storage
from harness.config import JobConfig
from harness.config.placement import HOST_ROLES, Placement, host_roles
from harness.driver.backends import Backend, RunSpec
from harness.driver.build import ROLE_CLASSES, WorkerSpec, build_in_stages, build_roles
from harness.driver.checkpointing import Checkpoints, at_once
from harness.driver.engine_factories import EngineFactory, sampling_of
from harness.driver.evaluation import Evaluation
from harness.driver.filtering import RefilledPrompts, WholeRunPool, refusals_of
from harness.driver.observer import Observer
from harness.driver.pools import AlreadyDone, RolloutPool, StagePool, TrainerPool
from harness.driver.prompts import PromptSource
from harness.driver.published_weights import PublishedWeights
from harness.driver.restarts import EngineRestarts, WorkerRestarts, lacks_samples
from harness.rl.advantages import needs_whole_batch
from harness.rl.filters import GIVEN, given_to_filter
from harness.runtime.runtime import Build, Handle, RealClock, RoleName, collect_waits
from harness.runtime.virtual_runtime import LocalRole
from harness.tasks import environment_of, extra_metrics, make_buffer
from harness.transfer_queue import LocalQueue, TransferQueue
from harness.transfer_queue.remote.client import RemoteQueue
from harness.weight_sync.coordinator import Coordinator, RetryPolicy
from harness.weight_sync.membership import Fleet
from harness.workers.dataflow import JobShape, queue_spec
from harness.workers.rollout import RolloutRole
from harness.workers.stages import AdvantageStage, columns_compared
from harness.workers.training_state import RememberingRole
from harness.workers.turns import PlacedTurns
from schedules import Schedule
from schedules.capacity import Capacity

STAGES = ("reference", "actor_fwd", "critic", "reward", "advantages")
_BEFORE_KEPT = ("reward", "filter")


@dataclass(frozen=True)
class RunningJob:
    """The job as a schedule sees it: `schedules.protocol.Job`, by shape. Nothing in it knows which schedule calls."""

    iterations: int
    batch: int
    prompts: PromptSource
    rollout: RolloutPool
    device_stages: Sequence[StagePool]
    host_stages: Sequence[StagePool]
    trainer: TrainerPool
    weights: PublishedWeights
    already: AlreadyDone = field(default_factory=AlreadyDone)

    @property
    def stages(self) -> Sequence[StagePool]:
        """All stages, those of the host first."""
        return (*self.host_stages, *self.device_stages)


@dataclass(frozen=True)
class Assembly:
    """A job and the parts of it that the driver itself needs."""

    job: RunningJob
    queue: TransferQueue
    coordinator: Coordinator
    worlds: Mapping[str, Sequence[Handle[RememberingRole]]]
    """All that train, by role."""
    roles: Sequence[Handle[Any]]
    """All of them, those that train too."""
    advantages: Handle[AdvantageStage]
    whole_run: Sequence[WholeRunPool] = ()
    """Stages that work beside the schedule."""

    async def run(self, schedule: Schedule) -> None:
        """The whole job, and what goes on beside the schedule."""
        prompts = self.job.prompts
        if not isinstance(prompts, RefilledPrompts):
            return await schedule.run(self.job)
        async with asyncio.TaskGroup() as tasks:
            for pool in self.whole_run:
                tasks.create_task(pool.work())
            tasks.create_task(prompts.refill())
            await schedule.run(self.job)
            await prompts.close()

    async def waiting(self) -> list[str]:
        """Lines on what every loop waits for, now. Workers that compute are not waited for."""
        return [*await self.coordinator.waiting(), *await collect_waits(self.roles), *await self.queue.waiting()]

    def waiting_now(self) -> list[str]:
        """The same, where all is in this process, which is not free to wait for answers."""
        assert isinstance(self.queue, LocalQueue)
        roles = [handle.role for handle in self.roles if isinstance(handle, LocalRole)]
        lines = [line for role in roles for line in role.waits.lines()]
        return [*self.coordinator.waits.lines(), *lines, *self.queue.waiting_now()]


def assemble(run: RunSpec, backend: Backend, observer: Observer) -> Assembly:
    """Start all roles and build the job around them."""
    config, schedule, placement = run.config, run.schedule, run.plan.placement
    counts = worker_counts(backend.engines, placement, host_roles(config.algorithm))
    queue = backend.runtime.start_queue(
        queue_spec(
            JobShape(
                list(placement.devices),
                training_ranks=-(-counts["actor"] // config.training.tensor_parallel),
                capacity_rows=capacity_rows(config, schedule),
                order=schedule.order,
                score_extras=bool(extra_metrics(backend.engines.task)),
                environment=environment_of(backend.engines.task) is not None,
                advantages_read=columns_compared(config.algorithm),
                batches_compared=needs_whole_batch(config.algorithm),
                filter_reads=_filter_reads(run, backend),
                drops_stragglers=config.engine.on_straggler == "drop",
                critic_ranks=-(-counts.get("critic", 1) // config.training.tensor_parallel),
                beside_actor=[role for role in ("reference", "actor_fwd") if placement.share(role, "actor")],
            )
        ),
        run.checkpoints,
        queue_storage(config.cluster),
    )
    spec = WorkerSpec(
        config,
        schedule.order,
        schedule.eta,
        queue.for_role("writer") if isinstance(queue, RemoteQueue) else queue,
        backend.clock,
        run.turn_timeout_s,
        backend.engines,
        engine_count=counts["rollout"],
        colocated=schedule.colocated,
        scores_beside_actor=placement.share("actor_fwd", "actor"),
        turns_of=PlacedTurns(placement.devices, counts, limit_s=run.turn_timeout_s),
        loads_after_each_batch=schedule.loads_after_each_batch,
        replay=run.replay,
    )
    build = build_in_stages if schedule.colocated and run.plan.backend == "real" else build_roles
    roles = start_workers(backend, placement, counts, partial(build, spec=spec))
    worlds: dict[str, Sequence[Handle[RememberingRole]]] = {r: roles[r] for r in ("actor", "critic") if r in roles}
    already = AlreadyDone(0 if run.resumed is None else run.resumed.version)
    before = [role for role in _BEFORE_KEPT if role in roles and config.refills]
    host = _host_restarts(run, backend, queue, roles, observer)
    whole_run = {role: WholeRunPool(role, roles[role], observer, restarts=host) for role in before}
    pools = {
        role: StagePool(role, roles[role], observer, already, host if role in HOST_ROLES else None)
        for role in STAGES
        if role in roles
    } | whole_run
    fleet = Fleet(
        roles["rollout"],
        on_lost=config.cluster.on_lost_engine,
        clear_up=partial(clear_up, queue),
        notify=observer.engine,
    )
    rollout = RolloutPool(fleet, observer, already=already)
    coordinator = Coordinator(
        roles["actor"],
        fleet=fleet,
        scorers=[] if placement.share("actor_fwd", "actor") else roles.get("actor_fwd", []),
        transport=backend.transport,
        bucket_bytes=config.cluster.bucket_bytes,
        observe=observer.spans,
        retry=RetryPolicy(config.cluster.transfer_attempts, config.cluster.verify_weights),
    )
    if run.restarts.limit and _engines_are_alone(placement):
        engines = EngineRestarts(
            coordinator,
            run.restarts,
            backend.runtime,
            backend.clock,
            observer.restarted,
            partial(lacks_samples, queue, schedule.order, config.algorithm.group_size),
        )
        fleet.replace = engines.replace
    algorithm = config.algorithm
    prompts = _prompts(
        config,
        backend.engines.task,
        queue,
        backend.clock,
        observer,
        seed=run.seed,
        batch=algorithm.batch_groups,
        group_size=algorithm.group_size,
        iterations=config.iterations,
        buffer=make_buffer(config),
        drops=None if run.replay is None else run.replay.drops,
    )
    every_role = [handle for of_role in roles.values() for handle in of_role]
    job = RunningJob(
        iterations=config.iterations,
        batch=algorithm.batch_groups,
        prompts=prompts,
        rollout=rollout,
        device_stages=[pool for role, pool in pools.items() if role not in HOST_ROLES],
        host_stages=[pool for role, pool in pools.items() if role in HOST_ROLES and role != "filter"],
        trainer=TrainerPool(
            roles["actor"],
            observer,
            config.training.tensor_parallel,
            already,
            prompts.trained,
            critics=roles.get("critic", ()),
        ),
        weights=PublishedWeights(
            coordinator,
            queue,
            observer,
            [rollout, *pools.values()],
            _evaluation(run, backend, fleet, roles, observer),
            already,
            _checkpoints(run, backend, queue, worlds, roles["advantages"][0], prompts),
        ),
        already=already,
    )
    return Assembly(
        job,
        queue,
        coordinator,
        worlds,
        every_role,
        roles["advantages"][0],
        list(whole_run.values()),
    )


def _prompts(config: JobConfig, *args: Any, **kwargs: Any) -> PromptSource:
    if not config.refills:
        return PromptSource(*args, **kwargs)
    rounds, spares = config.algorithm.filter_rounds, config.algorithm.spare_groups
    return RefilledPrompts(*args, reasons=refusals_of(config), rounds=rounds, spares=spares, **kwargs)


def _filter_reads(run: RunSpec, backend: Backend) -> Sequence[str] | None:
    """Columns besides rewards; None where nothing is filtered."""
    algorithm = run.config.algorithm
    if not algorithm.filters:
        return None
    if run.plan.backend != "real":
        return ("sample",)
    return [GIVEN[name] for name in given_to_filter(algorithm)]


def _host_restarts(
    run: RunSpec,
    backend: Backend,
    queue: TransferQueue,
    roles: Mapping[str, Sequence[Handle[Any]]],
    observer: Observer,
) -> WorkerRestarts | None:
    """Restarts of the worker that has all roles of the host; None where one of them remembers something."""
    if run.config.algorithm.kl_target is not None:
        return None
    handles = [handle for role in HOST_ROLES for handle in roles.get(role, ())]
    return WorkerRestarts(handles, run.restarts, backend.runtime, queue, backend.clock, observer.restarted)


def _engines_are_alone(placement: Placement) -> bool:
    """Whether engines are alone on their devices: nothing else dies with one of them."""
    return all(placement.roles_on(device) == ["rollout"] for device in placement.devices["rollout"])


def _checkpoints(
    run: RunSpec,
    backend: Backend,
    queue: TransferQueue,
    worlds: Mapping[str, Sequence[Handle[RememberingRole]]],
    advantages: Handle[AdvantageStage],
    prompts: PromptSource,
) -> Checkpoints | None:
    """Checkpoints where they are wanted."""
    settings = run.config.checkpoint
    if run.checkpoints is None or not settings.every:
        return None
    assert isinstance(queue, LocalQueue | RemoteQueue), "a queue that can be saved"
    return Checkpoints(
        run.checkpoints,
        settings,
        queue=queue,
        worlds=worlds,
        last=run.config.iterations,
        resumed=0 if run.resumed is None else run.resumed.version,
        work=asyncio.to_thread if isinstance(backend.clock, RealClock) else at_once,
        leave=run.leave,
        refused=prompts.refused_since,
        kl_coefficient=None if run.config.algorithm.kl_target is None else advantages.role.kl_coefficient,
    )


def _evaluation(
    run: RunSpec,
    backend: Backend,
    fleet: Fleet[RolloutRole],
    roles: Mapping[str, Sequence[Handle[Any]]],
    observer: Observer,
) -> Evaluation | None:
    """The evaluation of a run that samples, where it is wanted."""
    config = run.config
    if not config.eval.every or run.plan.backend != "real":
        return None
    assert isinstance(backend.clock, RealClock)
    return Evaluation(
        config.eval,
        task=backend.engines.task,
        sampling=sampling_of(config, backend.engines.task),
        iterations=config.iterations,
        devices=run.plan.placement.total,
        fleet=fleet,
        reward=roles["reward"][0],
        others=[handle for role, handles in roles.items() if role != "rollout" for handle in handles],
        runtime=backend.runtime,
        clock=backend.clock,
        hear=observer.evaluated,
        newest=run.evaluated,
    )


def start_workers(
    backend: Backend, placement: Placement, counts: Mapping[str, int], build: Build
) -> dict[str, list[Handle[Any]]]:
    """One worker per device, or per engine of several, and one for what needs none, each with all roles that belong
    there. Their handles by role, in the order of their numbers."""
    workers: dict[tuple[int, ...], list[RoleName]] = {}
    for role, count in counts.items():
        for number in range(count):
            devices = () if role not in placement.devices else backend.engines.devices_of(role, number, placement)
            workers.setdefault(devices, []).append((role, number))
    handles: dict[RoleName, Handle[Any]] = {}
    for devices, names in workers.items():
        worker = f"device[{','.join(map(str, devices))}]" if devices else "host"
        classes = {name: ROLE_CLASSES[name[0]] for name in names}
        started = backend.runtime.start_worker(worker, devices, classes, build)
        handles |= zip(names, started, strict=True)
    return {role: [handles[role, number] for number in range(count)] for role, count in counts.items()}


async def clear_up(queue: TransferQueue, engine: Handle[Any]) -> None:
    """End an engine that is lost, and give back to the queue what it had not finished."""
    await engine.end()
    await queue.waiting()  # once this is answered, the queue has read all that the engine had written
    await queue.release(engine.name)


def worker_counts(engines: EngineFactory, placement: Placement, host: Sequence[str]) -> dict[str, int]:
    """Workers of every role, those on the host too."""
    on_devices = {role: engines.workers(role, len(devices)) for role, devices in placement.devices.items()}
    return on_devices | dict.fromkeys(host, 1)


def capacity_rows(config: JobConfig, schedule: Schedule) -> int:
    """The queue's cap, in samples: what admission can be ahead of training, in whole batches (docs/schedules.md).

    In completion order a group may be trained, or dropped, ceil(eta) iterations after its batch, and holds the batch's
    rows as long; what is admitted instead of dropped groups comes on top. A dropped sample that still runs may hold its
    batch longer: then admission waits for it.
    """
    algorithm = config.algorithm
    ahead = Capacity(algorithm.batch_groups, schedule.eta).worst_lag
    batches = ahead + 1 if schedule.order == "fifo" else 3 * ahead + 3
    return algorithm.admitted_groups * algorithm.group_size * batches
