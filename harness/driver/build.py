"""Makes the roles of a worker in the process where they will run, each around its engine, the same on every backend.

What roles of one device can share, they share here: actor_fwd scores with the parameters of the trainer beside it, and
a colocated engine takes its weights from there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from harness.config import AlgorithmConfig, JobConfig
from harness.config.placement import ENGINE_ROLES
from harness.driver.engine_factories import EngineFactory, sampling_of
from harness.protocols import Clock, RolloutEngine
from harness.rl.advantages import advantages_of, needs_whole_batch, parts_compared
from harness.rl.kl import RewardKL
from harness.rl.shaping import shaping_of
from harness.rl.token_advantages import token_advantages_of
from harness.runtime.runtime import RoleName
from harness.tasks import environment_of, extra_metrics
from harness.transfer_queue import TransferQueue
from harness.transfer_queue.control.policies import balanced, contiguous
from harness.weight_sync.endpoints import ReceivingWorker, SendingWorker
from harness.workers.actor import ActorRole, CriticRole
from harness.workers.dataflow import CRITIC_TRAINING, RECORD, Numbering
from harness.workers.dealing import DealtQueue, DealtReader, WorldScatter
from harness.workers.engine_devices import FirstDevice, OtherDevice
from harness.workers.episodes import Episodes
from harness.workers.held_engine import HeldEngine
from harness.workers.readers import CompletionReader, FifoReader, MicroBatchReader, RankQueue, group_of_neighbours
from harness.workers.recording import RecordingSettings, RecordRole
from harness.workers.replaying import RecordedReader, Replay, ReplayedEngine
from harness.workers.reward_scorers import reward_scorer
from harness.workers.rollout import FeedOrder, Ordered, Ports, RecordedOrder, RolloutRole, RolloutSettings, TakingTurns
from harness.workers.stages import (
    AdvantageStage,
    FilterStage,
    OldLogProbStage,
    ReferenceStage,
    RewardStage,
    TrainersLogProbStage,
)
from harness.workers.training import ONE_STEP, LossMask, Updates
from harness.workers.turns import NO_TURNS, DeviceTurns, Turns
from schedules import Schedule


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to make its roles, a field for each; picklable.

    engine_count: of each role of engines; scores_beside_actor: actor_fwd scores by the trainer's weights; turns_of: by
    role and number, on its devices, shared by the roles of a process; started: engines that are there before the roles,
    by number, and sleep; engine_device: of this worker, where an engine has it among several; replay: of a recorded
    run, what is to be done again.
    """

    config: JobConfig
    schedule: Schedule
    queue: TransferQueue
    clock: Clock
    turn_timeout_s: float | None
    engines: EngineFactory
    engine_count: Mapping[str, int]
    scores_beside_actor: bool
    turns_of: Callable[[str, int], Turns]
    recording: RecordingSettings
    started: Mapping[int, RolloutEngine] = field(default_factory=dict)
    engine_device: FirstDevice | OtherDevice | None = None
    replay: Replay | None = None

    @property
    def stage(self) -> dict[str, Any]:
        """Arguments of every stage."""
        return {"queue": self.queue, "clock": self.clock}

    def micro_batch(self, role: str) -> int:
        """Samples that one worker of a role takes at once."""
        algorithm = self.config.algorithm
        rows = algorithm.micro_batch_groups * algorithm.group_size * self.engines.ranks(role)
        return min(algorithm.batch_samples, rows)


ColocatedTrainer = ActorRole | None
"""The training rank of the same worker, if there is one. One of a simulated world stands for all ranks."""


def build_roles(roles: Sequence[RoleName], spec: WorkerSpec) -> dict[RoleName, Any]:
    """All roles of a worker: the trainer first, since others take from it what they share. Every rank makes them in the
    same order, for some open groups together."""
    made: dict[RoleName, Any] = {}
    actor = None
    for role in sorted(roles, key=lambda role: role[0] != "actor"):
        made[role] = _BUILD[role[0]](role[1], spec, actor)
        actor = actor or made.get(("actor", role[1]))
    for (kind, _), built in made.items():
        if isinstance(built, SendingWorker | ReceivingWorker) and kind != "lent" and not spec.schedule.colocated:
            built.pace = spec.engines.transfer_pace
    return made


async def build_in_stages(roles: Sequence[RoleName], spec: WorkerSpec) -> dict[RoleName, Any]:
    """Build as `build_roles` where engines share their device. Each starts while it has the device to itself, as the
    plan of its memory counts, and sleeps before the trainer and all others take theirs, also those of its other
    devices; it wakes for its first batch."""
    shared = None
    for rank in (number for role, number in roles if role == "actor"):
        shared = spec.engines.engine_device(rank, spec.turns_of("actor", rank), spec.queue, spec.turn_timeout_s)
    if isinstance(shared, OtherDevice):
        await shared.begin()
    started = {}
    shares = "rollout" if spec.schedule.colocated else "lent"
    for number in (number for role, number in roles if role == shares):
        started[number] = _engine(shares, number, spec)
        await started[number].sleep()
    if isinstance(shared, FirstDevice):
        await shared.engine_sleeps()
    return build_roles(roles, replace(spec, started=started, engine_device=shared))


def _engine(role: str, number: int, spec: WorkerSpec) -> RolloutEngine:
    engine = spec.engines.rollout(role, number, spec.clock)
    if spec.replay is not None:
        runs = spec.replay.rollout(number).runs
        replayed = ReplayedEngine(engine, runs, sampling=spec.engines.sampling, name=str(number))
        return cast(RolloutEngine, replayed)
    return cast(RolloutEngine, HeldEngine(engine)) if spec.config.eval.period else engine


def _rollout(number: int, spec: WorkerSpec, beside: ColocatedTrainer, role: str = "rollout") -> RolloutRole:
    algorithm, turns = spec.config.algorithm, spec.turns_of(role, number)
    shares_device = spec.schedule.colocated or role == "lent"
    engine = spec.started[number] if shares_device and number in spec.started else _engine(role, number, spec)
    before = spec.engine_count["rollout"] if role == "lent" else 0  # each of these has its share whoever else is there
    engines = before + spec.engine_count[role]
    task = spec.engines.task
    environment, episodes = environment_of(task), None
    if environment is not None:
        limit = spec.engines.response_limit
        episodes = Episodes(environment, task, spec.clock, seed=spec.engines.seed, max_tokens=limit)
    ports = Ports(
        spec.queue,
        spec.clock,
        spec.engines.device,
        turns=turns
        if beside is None
        else spec.engines.beside_turns(turns, beside.turns, spec.engine_device, together=spec.schedule.in_rounds),
        episodes=episodes,
    )
    settings = RolloutSettings(
        index=number,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, engines),
        stream_share=fair_share(algorithm, engines, batches=1 + spec.schedule.eta),
        keep_cache=spec.config.engine.keep_cache,
        shares_device=shares_device,
        rounds=shares_device and spec.schedule.in_rounds,
        puts_off=spec.schedule.puts_off,
        keeps_weights=not (spec.schedule.loads_after_each_batch or role == "lent"),
        generate_s=spec.engines.generate_s,
        greedy=replace(sampling_of(spec.config, task), temperature=0.0, top_p=1.0)
        if algorithm.has_greedy_baseline
        else None,
        sample_limit_s=spec.config.engine.sample_limit_s,
        numbering=Numbering(algorithm.batch_groups, algorithm.spare_groups),
        role=role,
        engines=before,
    )
    order: FeedOrder = TakingTurns() if spec.config.refills else Ordered()
    if spec.replay is not None:
        order = RecordedOrder(spec.replay.rollout(number))
    made = RolloutRole(engine, ports, settings, order)
    if shares_device:
        assert beside is not None
        made.receiver = spec.engines.local_receiver(beside.engine, spec.clock)
    return made


def _reward(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> RewardStage:
    algorithm, sample_s = spec.config.algorithm, spec.engines.reward_s_per_sample
    rows = algorithm.group_size if sample_s else algorithm.batch_samples  # what takes time is handed on early
    task, name, chosen = spec.engines.task, str(number), spec.config.task
    reward = chosen.reward or f"of task {chosen.name}"
    scorer = reward_scorer(spec.config, task)
    return RewardStage(
        task,
        scorer,
        reward=reward,
        failure_reward=chosen.failure_reward,
        sample_s=sample_s,
        name=name,
        rows=rows,
        minimum=1,
        **spec.stage,
    )


def _filter(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> FilterStage:
    algorithm = spec.config.algorithm
    return FilterStage(
        judge=spec.engines.judge(),
        group_size=algorithm.group_size,
        name=str(number),
        rows=algorithm.batch_samples,
        minimum=algorithm.group_size,
        **spec.stage,
    )


def _advantages(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> AdvantageStage:
    algorithm, longest = spec.config.algorithm, spec.engines.response_limit
    by_token = token_advantages_of(algorithm)
    return AdvantageStage(
        group_size=algorithm.group_size,
        advantages=advantages_of(algorithm) if by_token is None else None,
        by_token=by_token,
        reward_kl=RewardKL(algorithm) if algorithm.has_reward_kl else None,
        parts=[extra_metrics(spec.engines.task).index(name) for name in parts_compared(algorithm)],
        shaping=None if longest is None else shaping_of(algorithm, longest),  # nothing simulated has a reward
        name=str(number),
        rows=algorithm.batch_samples,
        minimum=algorithm.batch_samples if needs_whole_batch(algorithm) else algorithm.group_size,
        **spec.stage,
    )


def _reference(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> ReferenceStage:
    stage = _scoring("reference", number, spec, beside)
    if beside is None:
        return ReferenceStage(spec.engines.log_prob("reference", spec.clock), **stage)
    return ReferenceStage(spec.engines.reference(beside.engine, spec.clock), **stage)


def _actor_fwd(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> OldLogProbStage | TrainersLogProbStage:
    stage = _scoring("actor_fwd", number, spec, beside)
    stage["gradient_squares"] = spec.config.algorithm.has_token_baseline
    if beside is None:
        return OldLogProbStage(spec.engines.log_prob("actor_fwd", spec.clock), spec.engines.device, **stage)
    return TrainersLogProbStage(spec.engines.scorer(beside.engine, spec.clock), lambda: beside.version, **stage)


def _scoring(role: str, number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> dict[str, Any]:
    """Arguments of a stage that scores. In order it waits for whole micro-batches, so that they hold the same rows
    whatever the timing; else for a complete group. Beside a training rank it reads that rank's share, and
    computes when the world does."""
    rows = spec.micro_batch(role)
    minimum = rows if spec.schedule.order == "fifo" else spec.config.algorithm.group_size
    stage = {"name": str(number), "rows": rows, "minimum": minimum, **spec.stage}
    if beside is None:
        return stage | {"turns": spec.turns_of(role, number)}
    together, ranks = spec.engines.ranks_together, spec.engines.training_ranks
    queue: RankQueue | DealtQueue
    if spec.schedule.order != "fifo" and ranks > 1:
        group_size = spec.config.algorithm.group_size
        queue = DealtQueue(
            spec.queue,
            WorldScatter(spec.config.cluster.wait_timeout_s),
            rank=number,
            ranks=ranks,
            group_size=group_size,
            together=together,
        )
    else:
        queue = _rank_queue(number, spec)
    return stage | {"turns": beside.turns, "queue": queue, "ahead": spec.schedule.order == "fifo"}


def _actor(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> ActorRole:
    engine = spec.engines.trainer(number, spec.clock)
    reader = _in_order("actor", "actor", number, spec) if spec.schedule.order == "fifo" else _as_completed(number, spec)
    device = spec.engine_device or spec.turns_of("actor", number)
    turns = spec.engines.world_turns("actor", number, device, spec.queue, spec.turn_timeout_s)
    role = ActorRole(
        engine,
        spec.clock,
        rank=number,
        reader=reader,
        device=spec.engines.device,
        turns=turns,
        loss_mask=LossMask(spec.config.algorithm.mask_truncated, spec.config.algorithm.max_token_staleness),
        updates=_updates(engine, spec),
        baseline_of=spec.config.algorithm.group_size if spec.config.algorithm.has_greedy_baseline else None,
        reports=number % spec.engines.ranks_together == 0,
    )
    if spec.schedule.colocated:
        role.sender = spec.engines.local_sender(spec.clock)
    return role


def _critic(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> CriticRole:
    """The role of a critic, whose two loops take turns, also where no other role is on its device."""
    engines, algorithm, together = spec.engines, spec.config.algorithm, spec.engines.ranks_together
    engine = engines.critic(number, None if beside is None else beside.engine, spec.clock)
    if beside is not None:
        turns = beside.turns
    else:
        device = spec.turns_of("critic", number)
        if device is NO_TURNS:
            device = DeviceTurns(f"the device of critic[{number}]", limit_s=spec.turn_timeout_s)
        turns = engines.world_turns("critic", number, device, spec.queue, spec.turn_timeout_s)
    rows, steps = spec.micro_batch("critic"), algorithm.steps_per_version
    updates = Updates(
        rows=algorithm.batch_samples // engines.critic_ranks // algorithm.mini_batches,
        epochs=algorithm.epochs,
        whole_batch=True,  # values are of versions, never of something between two
    )
    return CriticRole(
        engine,
        _in_order("critic", CRITIC_TRAINING, number, spec),
        rank=number,
        loss_mask=LossMask(algorithm.mask_truncated),  # a value may be learnt from any token
        updates=ONE_STEP if steps == 1 else updates,
        reports=number % together == 0,
        name=str(number),
        rows=rows,
        minimum=rows,
        queue=_rank_queue(number, spec),
        clock=spec.clock,
        turns=turns,
        ahead=True,
    )


def _updates(engine: Any, spec: WorkerSpec) -> Updates:
    """Updates of one rank. Between two steps of a batch nobody scores: no version has such weights."""
    algorithm = spec.config.algorithm
    if algorithm.steps_per_version == 1:
        return ONE_STEP
    scorer = spec.engines.scorer(engine, spec.clock) if algorithm.freezes_proximal else None
    return Updates(
        rows=algorithm.batch_samples // spec.engines.training_ranks // algorithm.mini_batches,
        epochs=algorithm.epochs,
        whole_batch=scorer is not None or spec.scores_beside_actor,
        scorer=scorer,
    )


def _in_order(role: str, task: str, number: int, spec: WorkerSpec) -> MicroBatchReader:
    """The reader of what a role trains on, by its task of the queue."""
    rank, rows = number // spec.engines.ranks_together, spec.micro_batch(role)
    return FifoReader(_rank_queue(number, spec), rank=rank, rows=rows, task=task)


def _rank_queue(number: int, spec: WorkerSpec) -> RankQueue:
    """The queue as a rank of a training world sees it. Of ranks that share layers the first reads, for all of them."""
    together, timeout_s = spec.engines.ranks_together, spec.config.cluster.wait_timeout_s
    group = group_of_neighbours(together, timeout_s) if together > 1 else None
    return RankQueue(spec.queue, rank=number // together, group=group)


def _as_completed(number: int, spec: WorkerSpec) -> MicroBatchReader:
    """The reader in completion order. Of several ranks the first reads the queue, for all of them."""
    algorithm, ranks, together = spec.config.algorithm, spec.engines.training_ranks, spec.engines.ranks_together
    rows = min(algorithm.batch_samples, ranks * spec.micro_batch("actor"))
    group_size = algorithm.group_size
    reader: MicroBatchReader = CompletionReader(
        spec.queue,
        rows=rows,
        group_size=group_size,
        batch=algorithm.batch_groups,
        mini_batches=algorithm.mini_batches,
        full=spec.schedule.colocated,  # then a batch is complete before it is trained
    )
    if spec.replay is not None:
        reader = RecordedReader(spec.queue, spec.replay.batches, group_size=group_size)
    if ranks * together == 1:
        return reader
    own = reader if number == 0 else None
    return DealtReader(
        own,
        WorldScatter(spec.config.cluster.wait_timeout_s),
        ranks=ranks,
        group_size=group_size,
        together=together,
        cut=balanced if spec.replay is None else contiguous,
    )


def _record(number: int, spec: WorkerSpec, beside: ColocatedTrainer) -> RecordRole:
    return RecordRole(spec.queue, spec.clock, spec.recording, name=str(number))


_BUILD: dict[str, Callable[[int, WorkerSpec, ColocatedTrainer], Any]] = {
    "rollout": _rollout,
    "lent": partial(_rollout, role="lent"),
    "reward": _reward,
    "filter": _filter,
    "advantages": _advantages,
    "reference": _reference,
    "actor_fwd": _actor_fwd,
    "critic": _critic,
    "actor": _actor,
    RECORD: _record,
}


def fair_share(algorithm: AlgorithmConfig, engines: int, batches: float = 1.0) -> int:
    """Samples of one engine where so many batches are dealt out in whole groups."""
    return math.ceil(round(batches * algorithm.admitted_groups / engines, 9)) * algorithm.group_size


ROLE_CLASSES: dict[str, type] = {
    **dict.fromkeys(ENGINE_ROLES, RolloutRole),
    "reward": RewardStage,
    "filter": FilterStage,
    "advantages": AdvantageStage,
    "reference": ReferenceStage,
    "actor_fwd": OldLogProbStage,
    "critic": CriticRole,
    "actor": ActorRole,
    RECORD: RecordRole,
}
"""Class of each role, by which the driver knows what it may ask of it."""
