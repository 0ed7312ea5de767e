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

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from harness.checks.layout import capacity_rows
from harness.checks.plugins import queue_storage
from harness.config.job import routes_dtype
from harness.config.placement import ENGINE_ROLES, HOST_ROLES, Placement, host_roles
from harness.driver.backends import RunBackend, RunSpec
from harness.driver.build import ROLE_CLASSES, WorkerSpec, build_in_stages, build_roles
from harness.driver.checkpointing import Checkpoints, at_once
from harness.driver.engine_factories import sampling_of
from harness.driver.evaluation import Evaluation
from harness.driver.filtering import Refill, WholeRunPool, places_of, refusals_of
from harness.driver.pools import AlreadyDone, CompletedGroups, RolloutPool, StagePool, TrainerPool
from harness.driver.prompts import PromptSource, RecordedDrops
from harness.driver.published_weights import PublishedWeights
from harness.driver.recorder import Recorder
from harness.driver.restarts import CarryOut, EngineRestarts, WorkerRestarts, lacks_samples, once
from harness.rl.advantages import needs_whole_batch
from harness.rl.filters import GIVEN, given_to_filter
from harness.runtime.runtime import Build, Handle, RealClock, RoleName, collect_waits
from harness.runtime.virtual_runtime import LocalRole
from harness.tasks import Dealer, environment_of, extra_metrics, make_buffer
from harness.transfer_queue import TransferQueue
from harness.transfer_queue.local import LocalQueue
from harness.transfer_queue.remote.client import RemoteQueue
from harness.weight_sync.coordinator import Coordinator, RetryPolicy
from harness.weight_sync.membership import Fleet
from harness.workers.dataflow import COMPLETE, RECORD, JobShape, Numbering, queue_spec
from harness.workers.readers import CompletionReader
from harness.workers.recording import Recorded, RecordingSettings, TrainedIteration
from harness.workers.rollout import RolloutRole
from harness.workers.stages import AdvantageStage, columns_compared
from harness.workers.training import RememberingRole
from harness.workers.turns import PlacedTurns
from schedules import Schedule

STAGES = ("reward", "advantages", "reference", "actor_fwd", "critic")
_BEFORE_KEPT = ("reward", "filter")

Roles = Mapping[str, Sequence[Handle[Any]]]
"""Handles by role, in the order of their numbers."""


@dataclass(frozen=True)
class RunningJob:
    """The job as a schedule sees it: `schedules.protocol.Job`, by shape. Nothing in it knows which schedule calls."""

    iterations: int
    batch: int
    prompts: PromptSource
    rollout: RolloutPool
    lent: RolloutPool
    stages: Sequence[StagePool]
    trainer: TrainerPool
    weights: PublishedWeights
    already: AlreadyDone = field(default_factory=AlreadyDone)


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
    refill: Refill | None = None
    """Deals again what is refused, beside the schedule."""

    async def run(self, schedule: Schedule) -> None:
        """The whole job, and what goes on beside the schedule."""
        if self.refill is None:
            return await schedule.run(self.job)
        async with asyncio.TaskGroup() as tasks:
            for pool in self.whole_run:
                tasks.create_task(pool.work())
            tasks.create_task(self.refill.run())
            await schedule.run(self.job)
            await self.job.prompts.close()

    async def waiting(self) -> list[str]:
        """Lines on what every loop waits for, now. Workers that compute are not waited for."""
        return [*await self.coordinator.waiting(), *await collect_waits(self.roles), *await self.queue.waiting()]

    def waiting_now(self) -> list[str]:
        """The same, where all is in this process, which is not free to wait for answers."""
        assert isinstance(self.queue, LocalQueue)
        roles = [handle.role for handle in self.roles if isinstance(handle, LocalRole)]
        lines = [line for role in roles for line in role.waits.lines()]
        return [*self.coordinator.waits.lines(), *lines, *self.queue.waiting_now()]


def assemble(run: RunSpec, backend: RunBackend, observer: Recorder, recording: RecordingSettings) -> Assembly:
    """Start all roles and build the job around them."""
    config = run.config
    storage = queue_storage(config.cluster)
    queue = backend.runtime.start_queue(queue_spec(job_shape(run, backend)), run.checkpoints, storage)
    roles = start_roles(run, backend, queue, recording)
    worlds: dict[str, Sequence[Handle[RememberingRole]]] = {r: roles[r] for r in ("actor", "critic") if r in roles}
    already = AlreadyDone(0 if run.resumed is None else run.resumed.version)
    host = _host_restarts(run, backend, queue, roles, observer)
    stages = stage_pools(run, roles, observer, already, host)
    coordinator, fleet = connect_weights(run, backend, queue, roles, observer)
    in_order = run.schedule.in_rounds and run.plan.backend == "virtual"  # real ranks agree on their turns
    rollout = RolloutPool(
        fleet,
        observer,
        already=already,
        complete=_complete(run, queue),
        filled=_filled(run, queue, already),
        devices_in_order=in_order,
    )
    on_training_devices = Fleet[RolloutRole](roles.get("lent", ()), notify=observer.engine)
    lent = RolloutPool(on_training_devices, observer, "lent", already=already, devices_in_order=in_order)
    recorder = roles[RECORD][0]
    prompts, refill = prompt_source(
        run, backend, queue, observer, lambda groups: host(lambda: recorder.role.keep(groups))
    )

    async def record(trained: TrainedIteration) -> Recorded:
        recorded = await host(lambda: recorder.role.record(trained))
        (generated, again), (of_lent, again_of_lent) = await rollout.tokens(), await lent.tokens()
        return replace(recorded, generated=(generated + of_lent, again + again_of_lent))

    job = RunningJob(
        iterations=config.iterations,
        batch=config.algorithm.batch_groups,
        prompts=prompts,
        rollout=rollout,
        lent=lent,
        stages=[pool for role, pool in stages.items() if role != "filter"],
        trainer=TrainerPool(roles["actor"], observer, already, prompts.trained, critics=roles.get("critic", ())),
        weights=PublishedWeights(
            coordinator,
            queue,
            observer,
            [rollout, lent, *stages.values()],
            record,
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
        [handle for of_role in roles.values() for handle in of_role],
        roles["advantages"][0],
        [pool for pool in stages.values() if isinstance(pool, WholeRunPool)],
        refill,
    )


def job_shape(run: RunSpec, backend: RunBackend) -> JobShape:
    """The facts that the job's queue depends on."""
    config, placement, task = run.config, run.plan.placement, backend.engines.task
    counts, together = worker_counts(run, backend), backend.engines.ranks_together
    algorithm, window = config.algorithm, run.schedule.window_groups(config.algorithm.batch_groups)
    return JobShape(
        list(placement.devices),
        training_ranks=counts["actor"] // together,
        capacity_rows=capacity_rows(config, run.schedule),
        order=run.schedule.order,
        score_extras=bool(extra_metrics(task)),
        environment=environment_of(task) is not None,
        advantages_read=columns_compared(algorithm),
        batches_compared=needs_whole_batch(algorithm),
        filter_reads=_filter_reads(run, backend),
        drops_stragglers=config.engine.on_straggler == "drop",
        redeals_failed=config.task.on_failed_score == "redeal",
        critic_ranks=max(1, counts.get("critic", 1) // together),
        beside_actor=[role for role in ("reference", "actor_fwd") if placement.share(role, "actor")],
        awaits_completion=run.schedule.awaits_completion or run.schedule.lends,
        routes=routes_dtype(config.model.experts) if config.replays_routing else None,
        window=None if window is None else window * algorithm.group_size,
    )


def start_roles(run: RunSpec, backend: RunBackend, queue: TransferQueue, recording: RecordingSettings) -> Roles:
    """Start all workers with their roles."""
    schedule, placement, counts = run.schedule, run.plan.placement, worker_counts(run, backend)
    spec = WorkerSpec(
        run.config,
        schedule,
        queue.for_role("writer") if isinstance(queue, RemoteQueue) else queue,
        backend.clock,
        run.turn_timeout_s,
        backend.engines,
        engine_count={role: counts[role] for role in ENGINE_ROLES if role in counts},
        scores_beside_actor=placement.share("actor_fwd", "actor"),
        turns_of=PlacedTurns(placement.devices, counts, limit_s=run.turn_timeout_s),
        replay=run.replay,
        recording=recording,
    )
    shares = schedule.colocated or schedule.lends
    build = build_in_stages if shares and run.plan.backend == "real" else build_roles
    return start_workers(backend, placement, counts, partial(build, spec=spec))


def stage_pools(
    run: RunSpec, roles: Roles, observer: Recorder, already: AlreadyDone, host: CarryOut
) -> dict[str, StagePool]:
    """The roles between rollout and training, and filter. What makes a batch where groups are refused works beside the
    schedule."""
    before = _BEFORE_KEPT if run.config.refills else ()
    pools = {
        role: StagePool(role, roles[role], observer, already, host if role in HOST_ROLES else once)
        for role in STAGES
        if role in roles
    }
    return pools | {role: WholeRunPool(role, roles[role], observer, carry_out=host) for role in before if role in roles}


def connect_weights(
    run: RunSpec, backend: RunBackend, queue: TransferQueue, roles: Roles, observer: Recorder
) -> tuple[Coordinator, Fleet[RolloutRole]]:
    """The way of weights from the training world to the engines and scorers; engines are started again where they may
    be."""
    cluster, placement = run.config.cluster, run.plan.placement
    fleet = Fleet[RolloutRole](
        roles["rollout"], on_lost=cluster.on_lost_engine, clear_up=partial(clear_up, queue), notify=observer.engine
    )
    coordinator = Coordinator(
        roles["actor"],
        fleet=fleet,
        scorers=[] if placement.share("actor_fwd", "actor") else roles.get("actor_fwd", []),
        transport=backend.transport,
        bucket_bytes=cluster.bucket_bytes,
        observe=observer.spans,
        retry=RetryPolicy(cluster.transfer_attempts, cluster.verify_weights, cluster.delta_weights),
    )
    alone = all(placement.roles_on(device) == ["rollout"] for device in placement.devices["rollout"])
    if run.restarts.limit and alone:  # nothing else dies with one of them
        engines = EngineRestarts(
            coordinator,
            run.restarts,
            backend.runtime,
            backend.clock,
            observer.restarted,
            partial(lacks_samples, queue, run.schedule.order, run.config.algorithm.group_size),
        )
        fleet.replace = engines.replace
    return coordinator, fleet


def prompt_source(
    run: RunSpec,
    backend: RunBackend,
    queue: TransferQueue,
    observer: Recorder,
    keep: Callable[[list[int]], Awaitable[None]],
) -> tuple[PromptSource, Refill | None]:
    """The source of prompts, and the one that deals again where groups may be refused. keep: reads groups that are
    refused."""
    config, n = run.config, run.config.algorithm.group_size
    places = places_of(config) if config.refills else None
    prompts = PromptSource(
        Dealer(backend.engines.task, run.seed, make_buffer(config)),
        queue,
        backend.clock,
        observer,
        numbering=Numbering(config.algorithm.batch_groups, config.algorithm.spare_groups if config.refills else 0),
        group_size=n,
        iterations=config.iterations,
        places=places,
        drops=None if run.replay is None else RecordedDrops(queue, run.replay.drops, n),
        keep=keep,
    )
    return prompts, None if places is None else Refill(prompts, queue, places, refusals_of(config))


def _complete(run: RunSpec, queue: TransferQueue) -> CompletionReader | None:
    """The reader by which a schedule that waits for complete groups hears of them."""
    algorithm = run.config.algorithm
    if not run.schedule.awaits_completion:
        return None
    return CompletionReader(
        queue,
        rows=algorithm.batch_samples,
        group_size=algorithm.group_size,
        batch=algorithm.batch_groups,
        task=COMPLETE,
    )


def _filled(run: RunSpec, queue: TransferQueue, already: AlreadyDone) -> CompletedGroups | None:
    """The count by which a schedule that lends training devices hears how many groups are complete."""
    algorithm = run.config.algorithm
    if not run.schedule.lends:
        return None
    done = already.done * algorithm.batch_groups
    return CompletedGroups(queue, rows=algorithm.batch_samples, group_size=algorithm.group_size, done=done)


def _filter_reads(run: RunSpec, backend: RunBackend) -> Sequence[str] | None:
    """Columns besides rewards; None where nothing is filtered."""
    algorithm = run.config.algorithm
    if not algorithm.filters:
        return None
    if run.plan.backend != "real":
        return ("sample",)
    return [GIVEN[name] for name in given_to_filter(algorithm)]


def _host_restarts(
    run: RunSpec, backend: RunBackend, queue: TransferQueue, roles: Roles, observer: Recorder
) -> CarryOut:
    """The way of calls to the worker that has all roles of the host, which is started again where it dies; not where
    one of them remembers something."""
    if run.config.algorithm.kl_target is not None:
        return once
    handles = [handle for role in (*HOST_ROLES, RECORD) for handle in roles.get(role, ())]
    restarts = WorkerRestarts(handles, run.restarts, backend.runtime, queue, backend.clock, observer.restarted)
    return restarts.carried_out


def _checkpoints(
    run: RunSpec,
    backend: RunBackend,
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
    run: RunSpec, backend: RunBackend, fleet: Fleet[RolloutRole], roles: Roles, observer: Recorder
) -> Evaluation | None:
    """The evaluation of a run that samples, where it is wanted."""
    config = run.config
    if not config.eval.period or run.plan.backend != "real":
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
    backend: RunBackend, placement: Placement, counts: Mapping[str, int], build: Build
) -> dict[str, list[Handle[Any]]]:
    """One worker per device, or per engine of several, and one for what needs none, each with all roles that belong
    there: those of an engine's first device with the engine. Their handles by role, in the order of their numbers."""
    workers: dict[int | None, list[RoleName]] = {}  # by first device
    seen: dict[int | None, tuple[int, ...]] = {}  # all that they see
    for role, count in counts.items():
        for number in range(count):
            devices = () if role not in placement.devices else backend.engines.devices_of(role, number, placement)
            first = devices[0] if devices else None
            workers.setdefault(first, []).append((role, number))
            seen[first] = max(seen.get(first, ()), devices, key=len)
    handles: dict[RoleName, Handle[Any]] = {}
    for first in sorted(workers, key=lambda first: len(seen[first])):  # an engine's after those of its other devices
        devices, names = seen[first], workers[first]
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


def worker_counts(run: RunSpec, backend: RunBackend) -> dict[str, int]:
    """Workers of every role, those on the host too."""
    devices = run.plan.placement.devices
    on_devices = {role: backend.engines.workers(role, len(its)) for role, its in devices.items()}
    return on_devices | dict.fromkeys((*host_roles(run.config.algorithm), RECORD), 1)
