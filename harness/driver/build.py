"""Makes each worker of a job in the process where it will run: a role around its engine, the same on every backend.

An `EngineFactory` decides whether the engine computes (`RealEngines`), or lets time pass as a cost model says
(`SimulatedEngines`). Backends differ in nothing else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore

from engines.simulated.passes import Device, SimulatedLogProb, SimulatedTrainer
from engines.simulated.rollout import SimulatedRollout
from harness.config import AlgorithmConfig, CostConfig, JobConfig, ModelConfig
from harness.config.checks.plugins import engine_class, engine_options
from harness.cost_model.cost import TransferTimes, transfer_times
from harness.cost_model.lengths import Lengths
from harness.protocols import Clock, LogProbEngine, RolloutEngine, Sampling, TrainEngine
from harness.rl.advantages import advantages_of
from harness.tasks import Task, make_task, max_tokens
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import TransferQueue
from harness.weight_sync.simulated import PacedRole
from harness.workers.actor import ActorRole
from harness.workers.readers import (
    CompletionReader,
    FifoReader,
    MicroBatchReader,
    TensorParallelReader,
    tensor_parallel_group,
)
from harness.workers.rollout import RolloutRole
from harness.workers.stages import AdvantageStage, OldLogProbStage, ReferenceStage, RewardStage
from schedules import Order, Transport


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

    def rollout(self, number: int, clock: Clock) -> RolloutEngine: ...

    def log_prob(self, role: str, clock: Clock) -> LogProbEngine: ...

    def trainer(self, rank: int) -> TrainEngine:
        """Returns when all ranks have met."""


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

    def trainer(self, rank: int) -> TrainEngine:
        from engines.torch.fsdp import FSDPEngine, init_world

        (host, port), world, training = self.store, self.training_world, self.config.training
        timeout_s = self.config.cluster.wait_timeout_s
        store = TCPStore(host, port, world, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        mesh = init_world(store, rank, world, self.device, timeout_s, training.tensor_parallel)
        model = self._initial_model()
        return FSDPEngine(model, self.config.algorithm, mesh=mesh, device=self.device, training=training)

    def _initial_model(self) -> Any:
        from engines.torch.model import build_model

        torch.set_num_threads(self.config.cluster.threads_per_device)
        return build_model(self.model, seed=0)


@dataclass(frozen=True)
class SimulatedEngines:
    """Engines that let time pass. cost: resolved for the model and its layout; devices: of each role; data_parallel:
    ranks of each role; paced: weights are really sent, so that there have to be some."""

    config: JobConfig
    cost: CostConfig
    seed: int
    transport: Transport
    devices: Mapping[str, Device]
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

    def log_prob(self, role: str, clock: Clock) -> LogProbEngine:
        ranks, load_s = self.data_parallel[role], self._times.load_s
        return SimulatedLogProb(self.cost, self.devices[role], clock=clock, load_s=load_s, ranks=ranks)

    def trainer(self, rank: int) -> TrainEngine:
        weights = {"weights": torch.zeros(_PACED_WEIGHTS)} if self.paced else {}
        ranks = self.data_parallel["actor"]
        return SimulatedTrainer(self.cost, self.devices["actor"], ranks=ranks, parameters=weights)

    @property
    def _times(self) -> TransferTimes:
        return transfer_times(self.cost, self.transport)


_PACED_WEIGHTS = 32_768
"""Numbers in the weights that a paced run sends: as many bytes as a quarter of the tiny model's."""


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to make its role; picklable. engine_count: of rollout; shares_device: rollout does, with
    roles that work in turn."""

    config: JobConfig
    order: Order
    eta: float
    queue: TransferQueue
    clock: Clock
    wait_timeout_s: float | None
    engines: EngineFactory
    engine_count: int
    shares_device: bool

    @property
    def stage(self) -> dict[str, Any]:
        """Arguments of every stage."""
        return {"queue": self.queue, "clock": self.clock, "wait_timeout_s": self.wait_timeout_s}

    def micro_batch(self, role: str) -> int:
        """Samples that one worker of a role takes at once."""
        algorithm = self.config.algorithm
        rows = algorithm.micro_batch_groups * algorithm.group_size * self.engines.ranks(role)
        return min(algorithm.batch_samples, rows)


def build_worker(role: str, number: int, spec: WorkerSpec) -> Any:
    """Worker `number` of a role."""
    worker = _BUILD[role](number, spec)
    pace = spec.engines.transfer_pace
    return worker if pace is None else PacedRole(worker, pace)


def _rollout(number: int, spec: WorkerSpec) -> RolloutRole:
    algorithm = spec.config.algorithm
    return RolloutRole(
        spec.engines.rollout(number, spec.clock),
        spec.queue,
        spec.clock,
        index=number,
        device=spec.engines.device,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, spec.engine_count),
        stream_share=fair_share(algorithm, spec.engine_count, batches=1 + spec.eta),
        keep_cache=spec.config.engine.keep_cache,
        shares_device=spec.shares_device,
        wait_timeout_s=spec.wait_timeout_s,
        generate_s=spec.engines.generate_s,
    )


def _reward(number: int, spec: WorkerSpec) -> RewardStage:
    algorithm, sample_s = spec.config.algorithm, spec.engines.reward_s_per_sample
    rows = algorithm.group_size if sample_s else algorithm.batch_samples  # what takes time is handed on early
    return RewardStage(spec.engines.task, sample_s=sample_s, name=str(number), rows=rows, minimum=1, **spec.stage)


def _advantages(number: int, spec: WorkerSpec) -> AdvantageStage:
    algorithm = spec.config.algorithm
    return AdvantageStage(
        group_size=algorithm.group_size,
        advantages=advantages_of(algorithm),
        name=str(number),
        rows=algorithm.batch_samples,
        minimum=algorithm.group_size,
        **spec.stage,
    )


def _reference(number: int, spec: WorkerSpec) -> ReferenceStage:
    return ReferenceStage(spec.engines.log_prob("reference", spec.clock), **_scoring("reference", number, spec))


def _actor_fwd(number: int, spec: WorkerSpec) -> OldLogProbStage:
    engine = spec.engines.log_prob("actor_fwd", spec.clock)
    return OldLogProbStage(engine, spec.engines.device, **_scoring("actor_fwd", number, spec))


def _scoring(role: str, number: int, spec: WorkerSpec) -> dict[str, Any]:
    """Arguments of a stage that scores. In order it waits for whole micro-batches, so that they hold the same rows
    whatever the timing; else for a complete group."""
    rows = spec.micro_batch(role)
    minimum = rows if spec.order == "fifo" else spec.config.algorithm.group_size
    return {"name": str(number), "rows": rows, "minimum": minimum, **spec.stage}


def _actor(number: int, spec: WorkerSpec) -> ActorRole:
    """One training rank. Of ranks that share layers the first reads the queue, for all of them."""
    engine, together = spec.engines.trainer(number), spec.engines.ranks_together
    reader = _reader(number // together, spec)
    if together > 1:
        group = tensor_parallel_group(together, spec.config.cluster.wait_timeout_s)
        reader = TensorParallelReader(reader if number % together == 0 else None, group)
    return ActorRole(engine, spec.clock, rank=number, reader=reader, device=spec.engines.device)


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


_BUILD: dict[str, Callable[[int, WorkerSpec], Any]] = {
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
