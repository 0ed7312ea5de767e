"""Makes the roles of a worker in the process where they will run, each around its engine, the same on every backend.

What roles of one device can share, they share here: actor_fwd scores with the parameters of the trainer beside it, and
a colocated engine takes its weights from there.

An `EngineFactory` decides whether the engine computes (`RealEngines`), or lets time pass as a cost model says
(`SimulatedEngines`). Backends differ in nothing else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import TCPStore

from engines.simulated.passes import SimulatedLogProb, SimulatedTrainer
from engines.simulated.rollout import SimulatedRollout
from harness.config import AlgorithmConfig, CostConfig, JobConfig, ModelConfig
from harness.config.checks.plugins import engine_class, engine_options
from harness.config.placement import Placement
from harness.cost_model.cost import TransferTimes, transfer_times
from harness.cost_model.lengths import Lengths
from harness.protocols import Clock, LogProbEngine, RolloutEngine, Sampling, Scorer, TrainEngine
from harness.rl.advantages import advantages_of
from harness.runtime.runtime import RoleName
from harness.tasks import Task, environment_of, make_task, max_tokens
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import TransferQueue
from harness.weight_sync.endpoints import LocalReceiver, LocalSender, WeightReceiver, WeightSender
from harness.weight_sync.simulated import PacedRole, SimulatedReceiver, SimulatedSender
from harness.workers.actor import ActorRole
from harness.workers.episodes import Episodes
from harness.workers.held_engine import HeldEngine
from harness.workers.readers import (
    CompletionReader,
    FifoReader,
    MicroBatchReader,
    RankQueue,
    TensorParallelReader,
    tensor_parallel_group,
)
from harness.workers.reward_pool import reward_scorer
from harness.workers.rollout import RolloutRole
from harness.workers.simulated_environment import simulated_environment
from harness.workers.stages import (
    AdvantageStage,
    OldLogProbStage,
    ReferenceStage,
    RewardStage,
    TrainersLogProbStage,
)
from harness.workers.turns import EngineTurns, Turns, world_turns
from schedules import Order, Transport

if TYPE_CHECKING:
    from engines.torch.fsdp import FSDPEngine


def sampling_of(config: JobConfig, task: Task) -> Sampling:
    """Of training."""
    algorithm = config.algorithm
    return Sampling(max_tokens(config, task), algorithm.temperature, algorithm.top_p, task.stop_tokens)


class EngineFactory(Protocol):
    """Makes the engines of a job, each in the process of the role that uses it; picklable."""

    @property
    def device(self) -> torch.device:
        """Where engines take weights."""

    @property
    def task(self) -> Task: ...

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def response_limit(self) -> int | None:
        """Tokens that a response may have, with what an environment writes; None is no limit."""

    @property
    def ranks_together(self) -> int:
        """Training workers that share layers, and so each micro-batch."""

    @property
    def transfer_pace(self) -> TransferTimes | None:
        """The least that weight transfers take, where they are real and the engines are not."""

    @property
    def generate_s(self) -> float:
        """Simulated seconds before a batch is generated as one."""

    @property
    def reward_s_per_sample(self) -> float:
        """Simulated seconds of the host for the reward of one sample."""

    def workers(self, role: str, devices: int) -> int:
        """How many workers a role has on so many devices: one each, or one that stands for several."""

    def ranks(self, role: str) -> int:
        """Data-parallel ranks of a role that one worker stands for."""

    def device_of(self, role: str, number: int, placement: Placement) -> int:
        """The device whose worker has this one."""

    def rollout(self, number: int, clock: Clock) -> RolloutEngine: ...

    def log_prob(self, role: str, clock: Clock) -> LogProbEngine:
        """With weights of its own."""

    def trainer(self, rank: int, clock: Clock) -> Any:
        """A TrainEngine. Returns when all ranks have met."""

    def scorer(self, trainer: Any, clock: Clock) -> Scorer:
        """With the parameters of the trainer beside it."""

    def reference(self, trainer: Any, clock: Clock) -> Scorer:
        """With the initial parameters, spread over the training world as those of the trainer beside it are."""

    def world_turns(self, rank: int, device: Turns, limit_s: float | None) -> Turns:
        """For what all training ranks compute together, of which this one's `device` takes turns."""

    def beside_turns(self, device: Turns, world: Turns) -> Turns:
        """Of an engine whose device has a training rank, which takes its turns in `world`."""

    def local_sender(self, clock: Clock) -> WeightSender:
        """Of a trainer whose weights are taken from where they are."""

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        """Of an engine beside that trainer."""


@dataclass(frozen=True)
class RealEngines:
    """Engines that compute. model: with the checkpoint of the initial weights; store: its host and port, where the
    training world meets."""

    config: JobConfig
    model: ModelConfig
    seed: int
    gpu: bool
    training_world: int
    store: tuple[str, int]
    transfer_pace = None
    generate_s = 0.0
    reward_s_per_sample = 0.0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.gpu else "cpu")

    @property
    def task(self) -> Task:
        return make_task(self.config)

    @property
    def response_limit(self) -> int:
        return max_tokens(self.config, self.task)

    @property
    def ranks_together(self) -> int:
        return self.config.training.tensor_parallel

    def workers(self, role: str, devices: int) -> int:
        return devices

    def ranks(self, role: str) -> int:
        return 1

    def device_of(self, role: str, number: int, placement: Placement) -> int:
        return placement.devices[role][number]

    def rollout(self, number: int, clock: Clock) -> RolloutEngine:
        task = self.task
        options, longest = engine_options(self.config), max_tokens(self.config, task)
        engine: RolloutEngine = engine_class(self.config.engine.name)(
            self._initial_model(task.max_prompt_tokens + longest),
            sampling=sampling_of(self.config, task),
            slots=self.config.engine.slots,
            seed=self.seed,
            clock=clock,
            device=self.device,
            name=str(number),
            **({} if options is None else {"options": options}),
        )
        return engine

    def log_prob(self, role: str, clock: Clock) -> LogProbEngine:
        from engines.torch.scoring import TorchLogProb

        return TorchLogProb(
            self._initial_model(),
            temperature=self.config.algorithm.temperature,
            device=self.device,
            layout=self.config.training.layout,
        )

    def trainer(self, rank: int, clock: Clock) -> FSDPEngine:
        from engines.torch.fsdp import FSDPEngine, init_world

        world, training, timeout_s = self.training_world, self.config.training, self.config.cluster.wait_timeout_s
        mesh = init_world(self._join_store(), rank, world, self.device, timeout_s, training.tensor_parallel)
        model = self._initial_model()
        return FSDPEngine(
            model, self.config.algorithm, mesh=mesh, device=self.device, training=training, steps=self.config.iterations
        )

    def scorer(self, trainer: FSDPEngine, clock: Clock) -> Scorer:
        return trainer.scorer()

    def reference(self, trainer: FSDPEngine, clock: Clock) -> Scorer:
        from engines.torch.fsdp import sharded_reference

        assert trainer.mesh is not None, "a trainer of a job has a world"
        return sharded_reference(
            self._initial_model(),
            mesh=trainer.mesh,
            device=self.device,
            temperature=self.config.algorithm.temperature,
            training=self.config.training,
        )

    def world_turns(self, rank: int, device: Turns, limit_s: float | None) -> Turns:
        ranks = self.training_world
        return world_turns(self._join_store(), rank=rank, ranks=ranks, device=device, limit_s=limit_s)

    def beside_turns(self, device: Turns, world: Turns) -> Turns:
        return EngineTurns(device, world)

    def _join_store(self) -> TCPStore:
        timeout = timedelta(seconds=self.config.cluster.wait_timeout_s)
        return TCPStore(*self.store, self.training_world, False, timeout, wait_for_workers=False)

    def local_sender(self, clock: Clock) -> WeightSender:
        return LocalSender()

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        return LocalReceiver(trainer)

    def _initial_model(self, longest: int | None = None) -> Any:
        """longest: tokens of a sample, for which caches are made; without it as many as the model can take."""
        from engines.torch.model import build_model

        torch.set_num_threads(self.config.cluster.threads_per_device)
        return build_model(replace(self.model, max_length=longest or self.model.max_length), seed=0)


@dataclass(frozen=True)
class SimulatedEngines:
    """Engines that let time pass. cost: resolved for the model and its layout; data_parallel: ranks of each role;
    paced: weights are really sent, so that there have to be some."""

    config: JobConfig
    cost: CostConfig
    seed: int
    transport: Transport
    data_parallel: Mapping[str, int]
    paced: bool
    device = torch.device("cpu")
    ranks_together = 1
    response_limit = None  # a simulated environment ends by itself

    @property
    def task(self) -> Task:
        environment = simulated_environment(self.cost)
        return SimulatedTask(self.cost.prompt_tokens, self.cost.lengths.cap, environment=environment)

    @property
    def transfer_pace(self) -> TransferTimes | None:
        return self._times if self.paced else None

    @property
    def generate_s(self) -> float:
        return self.cost.generate_s

    @property
    def reward_s_per_sample(self) -> float:
        return self.cost.reward_s_per_sample

    def workers(self, role: str, devices: int) -> int:
        return devices // self.config.engine.tensor_parallel if role == "rollout" else 1

    def ranks(self, role: str) -> int:
        return self.data_parallel[role]

    def device_of(self, role: str, number: int, placement: Placement) -> int:
        """Roles that share a pool are all on its first device, since one of them may stand for several devices."""
        devices = placement.devices[role]
        shared = len(placement.roles_on(devices[0])) > 1
        return devices[0] if shared else devices[number * self.config.engine.tensor_parallel]

    def rollout(self, number: int, clock: Clock) -> RolloutEngine:
        group_size = self.config.algorithm.group_size
        return SimulatedRollout(
            self.cost,
            Lengths(self.cost.lengths, self.seed, group_size),
            slots=self.config.engine.slots,
            group_size=group_size,
            several_turns=self.cost.turns is not None,
            clock=clock,
            load_s=self._times.load_s,
            name=str(number),
        )

    def log_prob(self, role: str, clock: Clock) -> SimulatedLogProb:
        ranks, load_s = self.data_parallel[role], self._times.load_s
        return SimulatedLogProb(self.cost, clock, load_s=load_s, ranks=ranks)

    def scorer(self, trainer: SimulatedTrainer, clock: Clock) -> Scorer:
        return self.log_prob("actor_fwd", clock)

    def reference(self, trainer: SimulatedTrainer, clock: Clock) -> Scorer:
        return self.log_prob("reference", clock)

    def world_turns(self, rank: int, device: Turns, limit_s: float | None) -> Turns:
        return device

    def beside_turns(self, device: Turns, world: Turns) -> Turns:
        return device

    def local_sender(self, clock: Clock) -> WeightSender:
        return SimulatedSender(self._times, clock)

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        return SimulatedReceiver(self._times, clock)

    def trainer(self, rank: int, clock: Clock) -> SimulatedTrainer:
        weights = {"weights": torch.zeros(_PACED_WEIGHTS)} if self.paced else {}
        ranks = self.data_parallel["actor"]
        return SimulatedTrainer(self.cost, clock, ranks=ranks, parameters=weights, training=self.config.training)

    @property
    def _times(self) -> TransferTimes:
        return transfer_times(self.cost, self.transport)


_PACED_WEIGHTS = 32_768
"""Numbers in the weights that a paced run sends: as many bytes as a quarter of the tiny model's."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to make its roles; picklable. engine_count: of rollout; colocated: rollout shares devices
    with the roles that work in turn, and takes its weights from the trainer beside it; turns_of: by role and number, on
    its devices, shared by the roles of a process."""

    config: JobConfig
    order: Order
    eta: float
    queue: TransferQueue
    clock: Clock
    turn_timeout_s: float | None
    engines: EngineFactory
    engine_count: int
    colocated: bool
    turns_of: Callable[[str, int], Turns]

    @property
    def stage(self) -> dict[str, Any]:
        """Arguments of every stage."""
        return {"queue": self.queue, "clock": self.clock}

    def micro_batch(self, role: str) -> int:
        """Samples that one worker of a role takes at once."""
        algorithm = self.config.algorithm
        rows = algorithm.micro_batch_groups * algorithm.group_size * self.engines.ranks(role)
        return min(algorithm.batch_samples, rows)


Beside = ActorRole | None
"""The training rank of the same worker, if there is one. One of a simulated world stands for all ranks."""


def build_roles(roles: Sequence[RoleName], spec: WorkerSpec) -> dict[RoleName, Any]:
    """All roles of a worker: the trainer first, since others take from it what they share. Every rank makes them in the
    same order, for some open groups together."""
    made: dict[RoleName, Any] = {}
    actor = None
    for role in sorted(roles, key=lambda role: role[0] != "actor"):
        made[role] = _BUILD[role[0]](role[1], spec, actor)
        actor = actor or made.get(("actor", role[1]))
    pace = spec.engines.transfer_pace
    if pace is None or spec.colocated:
        return made
    return {role: PacedRole(built, pace) for role, built in made.items()}


def _rollout(number: int, spec: WorkerSpec, beside: Beside) -> RolloutRole:
    algorithm, turns = spec.config.algorithm, spec.turns_of("rollout", number)
    engine = spec.engines.rollout(number, spec.clock)
    task = spec.engines.task
    environment, episodes = environment_of(task), None
    if environment is not None:
        limit = spec.engines.response_limit
        episodes = Episodes(environment, task, spec.clock, seed=spec.engines.seed, max_tokens=limit)
    role = RolloutRole(
        HeldEngine(engine) if spec.config.eval.every else engine,
        spec.queue,
        spec.clock,
        index=number,
        device=spec.engines.device,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, spec.engine_count),
        stream_share=fair_share(algorithm, spec.engine_count, batches=1 + spec.eta),
        keep_cache=spec.config.engine.keep_cache,
        shares_device=spec.colocated,
        generate_s=spec.engines.generate_s,
        turns=turns if beside is None else spec.engines.beside_turns(turns, beside.turns),
        episodes=episodes,
    )
    if spec.colocated:
        assert beside is not None
        role.receiver = spec.engines.local_receiver(beside.engine, spec.clock)
    return role


def _reward(number: int, spec: WorkerSpec, beside: Beside) -> RewardStage:
    algorithm, sample_s = spec.config.algorithm, spec.engines.reward_s_per_sample
    rows = algorithm.group_size if sample_s else algorithm.batch_samples  # what takes time is handed on early
    task, name, chosen = spec.engines.task, str(number), spec.config.task
    reward = chosen.reward or f"of task {chosen.name}"
    scorer = reward_scorer(spec.config, task)
    return RewardStage(task, scorer, reward=reward, sample_s=sample_s, name=name, rows=rows, minimum=1, **spec.stage)


def _advantages(number: int, spec: WorkerSpec, beside: Beside) -> AdvantageStage:
    algorithm = spec.config.algorithm
    return AdvantageStage(
        group_size=algorithm.group_size,
        advantages=advantages_of(algorithm),
        name=str(number),
        rows=algorithm.batch_samples,
        minimum=algorithm.group_size,
        **spec.stage,
    )


def _reference(number: int, spec: WorkerSpec, beside: Beside) -> ReferenceStage:
    stage = _scoring("reference", number, spec, beside)
    if beside is None:
        return ReferenceStage(spec.engines.log_prob("reference", spec.clock), **stage)
    return ReferenceStage(spec.engines.reference(beside.engine, spec.clock), **stage)


def _actor_fwd(number: int, spec: WorkerSpec, beside: Beside) -> OldLogProbStage | TrainersLogProbStage:
    stage = _scoring("actor_fwd", number, spec, beside)
    if beside is None:
        return OldLogProbStage(spec.engines.log_prob("actor_fwd", spec.clock), spec.engines.device, **stage)
    return TrainersLogProbStage(spec.engines.scorer(beside.engine, spec.clock), lambda: beside.version, **stage)


def _scoring(role: str, number: int, spec: WorkerSpec, beside: Beside) -> dict[str, Any]:
    """Arguments of a stage that scores. In order it waits for whole micro-batches, so that they hold the same rows
    whatever the timing; else for a complete group. Beside a training rank it reads that rank's share, and computes when
    the world does."""
    rows = spec.micro_batch(role)
    minimum = rows if spec.order == "fifo" else spec.config.algorithm.group_size
    stage = {"name": str(number), "rows": rows, "minimum": minimum, **spec.stage}
    if beside is None:
        return stage | {"turns": spec.turns_of(role, number)}
    together = spec.engines.ranks_together
    group = tensor_parallel_group(together) if together > 1 else None
    queue = RankQueue(spec.queue, rank=number // together, group=group)
    return stage | {"turns": beside.turns, "queue": queue, "ahead": spec.order == "fifo"}


def _actor(number: int, spec: WorkerSpec, beside: Beside) -> ActorRole:
    """One training rank. Of ranks that share layers the first reads the queue, for all of them."""
    engine, together = spec.engines.trainer(number, spec.clock), spec.engines.ranks_together
    reader = _reader(number // together, spec)
    if together > 1:
        group = tensor_parallel_group(together)
        reader = TensorParallelReader(reader if number % together == 0 else None, group)
    turns = spec.engines.world_turns(number, spec.turns_of("actor", number), spec.turn_timeout_s)
    role = ActorRole(engine, spec.clock, rank=number, reader=reader, device=spec.engines.device, turns=turns)
    if spec.colocated:
        role.sender = spec.engines.local_sender(spec.clock)
    return role


def _reader(rank: int, spec: WorkerSpec) -> MicroBatchReader:
    """In which order a training rank takes groups."""
    rows, algorithm = spec.micro_batch("actor"), spec.config.algorithm
    if spec.order == "fifo":
        return FifoReader(spec.queue, rank=rank, rows=rows)
    return CompletionReader(
        spec.queue,
        rows=rows,
        group_size=algorithm.group_size,
        batch=algorithm.batch_groups,
    )


_BUILD: dict[str, Callable[[int, WorkerSpec, Beside], Any]] = {
    "rollout": _rollout,
    "reward": _reward,
    "advantages": _advantages,
    "reference": _reference,
    "actor_fwd": _actor_fwd,
    "actor": _actor,
}


def fair_share(algorithm: AlgorithmConfig, engines: int, batches: float = 1.0) -> int:
    """Samples of one engine where so many batches are dealt out in whole groups."""
    return math.ceil(round(batches * algorithm.batch_groups / engines, 9)) * algorithm.group_size


ROLE_CLASSES: dict[str, type] = {
    "rollout": RolloutRole,
    "reward": RewardStage,
    "advantages": AdvantageStage,
    "reference": ReferenceStage,
    "actor_fwd": OldLogProbStage,
    "actor": ActorRole,
}
"""By which the driver knows what it may ask of each."""
