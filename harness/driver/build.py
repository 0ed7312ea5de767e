"""Makes the roles of a worker in the process where they will run, each around its engine, the same on every backend.

What roles of one device can share, they share here: actor_fwd scores with the parameters of the trainer beside it, and
a colocated engine takes its weights from there.

An `EngineFactory` decides whether the engine computes (`RealEngines`), or lets time pass as a cost model says
(`SimulatedEngines`). Backends differ in nothing else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
from harness.tasks import Task, make_task, max_tokens
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import TransferQueue
from harness.weight_sync.endpoints import LocalReceiver, LocalSender, WeightReceiver, WeightSender
from harness.weight_sync.simulated import PacedRole, SimulatedReceiver, SimulatedSender
from harness.workers.actor import ActorRole
from harness.workers.readers import (
    CompletionReader,
    FifoReader,
    MicroBatchReader,
    TensorParallelReader,
    tensor_parallel_group,
)
from harness.workers.reward_pool import RewardPool
from harness.workers.rollout import RolloutRole
from harness.workers.stages import (
    AdvantageStage,
    OldLogProbStage,
    ReferenceStage,
    RewardStage,
    TrainersLogProbStage,
)
from harness.workers.turns import Turns
from schedules import Order, Transport

if TYPE_CHECKING:
    from engines.torch.fsdp import FSDPEngine


class EngineFactory(Protocol):
    """Makes the engines of a job, each in the process of the role that uses it; picklable."""

    @property
    def device(self) -> torch.device:
        """Where engines take weights."""

    @property
    def task(self) -> Task: ...

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
    def ranks_together(self) -> int:
        return self.config.training.tensor_parallel

    def workers(self, role: str, devices: int) -> int:
        return devices

    def ranks(self, role: str) -> int:
        return 1

    def device_of(self, role: str, number: int, placement: Placement) -> int:
        return placement.devices[role][number]

    def rollout(self, number: int, clock: Clock) -> RolloutEngine:
        algorithm, task = self.config.algorithm, self.task
        options = engine_options(self.config)
        engine: RolloutEngine = engine_class(self.config.engine.name)(
            self._initial_model(),
            sampling=Sampling(
                max_tokens(self.config, task), algorithm.temperature, algorithm.top_p, (task.stop_token,)
            ),
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

        (host, port), world, training = self.store, self.training_world, self.config.training
        timeout_s = self.config.cluster.wait_timeout_s
        store = TCPStore(host, port, world, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        mesh = init_world(store, rank, world, self.device, timeout_s, training.tensor_parallel)
        model = self._initial_model()
        return FSDPEngine(model, self.config.algorithm, mesh=mesh, device=self.device, training=training)

    def scorer(self, trainer: FSDPEngine, clock: Clock) -> Scorer:
        return trainer.scorer()

    def local_sender(self, clock: Clock) -> WeightSender:
        return LocalSender()

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        return LocalReceiver(trainer)

    def _initial_model(self) -> Any:
        from engines.torch.model import build_model

        torch.set_num_threads(self.config.cluster.threads_per_device)
        return build_model(self.model, seed=0)


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

    @property
    def task(self) -> Task:
        return SimulatedTask(self.cost.prompt_tokens, self.cost.lengths.cap)

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
            clock=clock,
            load_s=self._times.load_s,
            name=str(number),
        )

    def log_prob(self, role: str, clock: Clock) -> SimulatedLogProb:
        ranks, load_s = self.data_parallel[role], self._times.load_s
        return SimulatedLogProb(self.cost, clock, load_s=load_s, ranks=ranks)

    def scorer(self, trainer: SimulatedTrainer, clock: Clock) -> Scorer:
        return self.log_prob("actor_fwd", clock)

    def local_sender(self, clock: Clock) -> WeightSender:
        return SimulatedSender(self._times, clock)

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        return SimulatedReceiver(self._times, clock)

    def trainer(self, rank: int, clock: Clock) -> SimulatedTrainer:
        weights = {"weights": torch.zeros(_PACED_WEIGHTS)} if self.paced else {}
        ranks = self.data_parallel["actor"]
        return SimulatedTrainer(self.cost, clock, ranks=ranks, parameters=weights)

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
    wait_timeout_s: float | None
    engines: EngineFactory
    engine_count: int
    colocated: bool
    turns_of: Callable[[str, int], Turns]

    @property
    def stage(self) -> dict[str, Any]:
        """Arguments of every stage."""
        return {"queue": self.queue, "clock": self.clock, "wait_timeout_s": self.wait_timeout_s}

    def micro_batch(self, role: str) -> int:
        """Samples that one worker of a role takes at once."""
        algorithm = self.config.algorithm
        rows = algorithm.micro_batch_groups * algorithm.group_size * self.engines.ranks(role)
        return min(algorithm.batch_samples, rows)


Beside = Mapping[RoleName, Any]
"""The roles of the same worker that are there already."""


def build_roles(roles: Sequence[RoleName], spec: WorkerSpec) -> dict[RoleName, Any]:
    """All roles of a worker: the trainer first, since others take from it what they share."""
    made: dict[RoleName, Any] = {}
    for role in sorted(roles, key=lambda role: role[0] != "actor"):
        made[role] = _BUILD[role[0]](role[1], spec, made)
    pace = spec.engines.transfer_pace
    if pace is None or spec.colocated:
        return made
    return {role: PacedRole(built, pace) for role, built in made.items()}


def _rollout(number: int, spec: WorkerSpec, beside: Beside) -> RolloutRole:
    algorithm = spec.config.algorithm
    role = RolloutRole(
        spec.engines.rollout(number, spec.clock),
        spec.queue,
        spec.clock,
        index=number,
        device=spec.engines.device,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, spec.engine_count),
        stream_share=fair_share(algorithm, spec.engine_count, batches=1 + spec.eta),
        keep_cache=spec.config.engine.keep_cache,
        shares_device=spec.colocated,
        wait_timeout_s=spec.wait_timeout_s,
        generate_s=spec.engines.generate_s,
        turns=spec.turns_of("rollout", number),
    )
    if spec.colocated:
        role.receiver = spec.engines.local_receiver(_trainer_beside(number, beside).engine, spec.clock)
    return role


def _reward(number: int, spec: WorkerSpec, beside: Beside) -> RewardStage:
    algorithm, sample_s = spec.config.algorithm, spec.engines.reward_s_per_sample
    rows = algorithm.group_size if sample_s else algorithm.batch_samples  # what takes time is handed on early
    processes = 0 if sample_s else spec.config.task.reward_processes
    pool = None
    if processes:
        pool = RewardPool(partial(make_task, spec.config), processes, timeout_s=spec.wait_timeout_s)
    task, name = spec.engines.task, str(number)
    return RewardStage(task, pool=pool, sample_s=sample_s, name=name, rows=rows, minimum=1, **spec.stage)


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
    return ReferenceStage(spec.engines.log_prob("reference", spec.clock), **_scoring("reference", number, spec))


def _actor_fwd(number: int, spec: WorkerSpec, beside: Beside) -> OldLogProbStage | TrainersLogProbStage:
    stage = _scoring("actor_fwd", number, spec)
    if any(role == "actor" for role, _ in beside):
        actor = _trainer_beside(number, beside)
        engine = spec.engines.scorer(actor.engine, spec.clock)
        return TrainersLogProbStage(engine, lambda: actor.version, **stage)
    return OldLogProbStage(spec.engines.log_prob("actor_fwd", spec.clock), spec.engines.device, **stage)


def _scoring(role: str, number: int, spec: WorkerSpec) -> dict[str, Any]:
    """Arguments of a stage that scores. In order it waits for whole micro-batches, so that they hold the same rows
    whatever the timing; else for a complete group."""
    rows = spec.micro_batch(role)
    minimum = rows if spec.order == "fifo" else spec.config.algorithm.group_size
    turns = spec.turns_of(role, number)
    return {"name": str(number), "rows": rows, "minimum": minimum, "turns": turns, **spec.stage}


def _actor(number: int, spec: WorkerSpec, beside: Beside) -> ActorRole:
    """One training rank. Of ranks that share layers the first reads the queue, for all of them."""
    engine, together = spec.engines.trainer(number, spec.clock), spec.engines.ranks_together
    reader = _reader(number // together, spec)
    if together > 1:
        group = tensor_parallel_group(together, spec.config.cluster.wait_timeout_s)
        reader = TensorParallelReader(reader if number % together == 0 else None, group)
    turns = spec.turns_of("actor", number)
    role = ActorRole(engine, spec.clock, rank=number, reader=reader, device=spec.engines.device, turns=turns)
    if spec.colocated:
        role.sender = spec.engines.local_sender(spec.clock)
    return role


def _trainer_beside(number: int, beside: Beside) -> ActorRole:
    """The rank on the same device; of a simulated world the one that stands for all."""
    actor = beside.get(("actor", number)) or beside["actor", 0]
    assert isinstance(actor, ActorRole)
    return actor


def _reader(rank: int, spec: WorkerSpec) -> MicroBatchReader:
    """In which order a training rank takes groups."""
    rows, algorithm = spec.micro_batch("actor"), spec.config.algorithm
    if spec.order == "fifo":
        return FifoReader(spec.queue, rank=rank, rows=rows, wait_timeout_s=spec.wait_timeout_s)
    return CompletionReader(
        spec.queue,
        rows=rows,
        group_size=algorithm.group_size,
        batch=algorithm.batch_groups,
        wait_timeout_s=spec.wait_timeout_s,
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
