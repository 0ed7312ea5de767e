"""Makes the engines of a job: real ones, which compute, or simulated ones, which let time pass as a cost model says.
Backends differ in nothing else of their roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, Store

from engines.device_memory import give_back
from engines.simulated.passes import SimulatedCritic, SimulatedLogProb, SimulatedTrainer
from engines.simulated.rollout import SimulatedRollout
from harness.checks.plugins import engine_class, engine_reads_files, planned_options
from harness.config import CostConfig, JobConfig, ModelConfig
from harness.config.placement import ENGINE_ROLES, Placement
from harness.config.registries import find
from harness.cost_model.cost import TransferTimes, transfer_times
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.memory_plan import EngineShare
from harness.cost_model.shape import parameters
from harness.protocols import (
    Clock,
    CriticEngine,
    LogProbEngine,
    RolloutEngine,
    Sampling,
    Scorer,
    TrainEngine,
    TrainingSetting,
    TrainingWorld,
)
from harness.rl.filters import filter_of, given_to_filter
from harness.rl.learning_rate import policy_settings
from harness.runtime.stores import join_store
from harness.tasks import Task, make_task, max_tokens
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import TransferQueue
from harness.transfer_queue.remote.client import RemoteQueue
from harness.weight_sync.endpoints import WeightReceiver, WeightSender
from harness.weight_sync.simulated import SimulatedReceiver, SimulatedSender
from harness.weight_sync.transports import LocalReceiver, LocalSender
from harness.workers.engine_devices import EngineTurns, FirstDevice, OtherDevice
from harness.workers.episodes import simulated_environment
from harness.workers.stages import DrawnJudge, Judge, RewardJudge
from harness.workers.turns import Turns, world_turns
from schedules.base import BESIDE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engines.torch.first_weights import Outline

_joined: list[Store] = []  # of worlds; see `harness.runtime.stores`
_worlds: dict[str, TrainingWorld] = {}  # of this process, by the role whose they are


def sampling_of(config: JobConfig, task: Task) -> Sampling:
    """The sampling of training."""
    algorithm = config.algorithm
    return Sampling(max_tokens(config, task), algorithm.temperature, algorithm.top_p, task.stop_tokens)


@dataclass(frozen=True)
class RealEngines:
    """Makes the engines of a job that compute, each in the process of the role that uses it; picklable.

    model: with the checkpoint of the initial weights; place: where the store of the training world is; shares: of a
    device's memory, that rollout engines of each role may take; critic_world: devices of the critic, if there is one.
    """

    config: JobConfig
    model: ModelConfig
    seed: int
    gpu: bool
    training_world: int
    place: str = field(repr=False)
    shares: Mapping[str, EngineShare]
    critic_world: int = 0
    transfer_pace = None
    generate_s = 0.0
    reward_s_per_sample = 0.0

    @property
    def device(self) -> torch.device:
        """The device where engines take weights."""
        return torch.device("cuda" if self.gpu else "cpu")

    @property
    def task(self) -> Task:
        """The task of the job."""
        return make_task(self.config)

    @property
    def sampling(self) -> Sampling:
        """The sampling of a sample that has none of its own."""
        return sampling_of(self.config, self.task)

    @property
    def response_limit(self) -> int:
        """Tokens that a response may have, with what an environment writes."""
        return max_tokens(self.config, self.task)

    @property
    def ranks_together(self) -> int:
        """Training workers that share layers, and so each micro-batch."""
        return self.config.training.ranks_together

    @property
    def training_ranks(self) -> int:
        """Training workers, or sets of such, that train on different parts of a batch."""
        return self.training_world // self.ranks_together

    @property
    def critic_ranks(self) -> int:
        """The same of the critic."""
        return self.critic_world // self.ranks_together

    def judge(self) -> Judge:
        """The judge of a job with a filter."""
        algorithm = self.config.algorithm
        keep = filter_of(algorithm)
        assert keep is not None, "a job without a filter has no such role"
        return RewardJudge(keep, given_to_filter(algorithm), algorithm.group_size)

    def workers(self, role: str, devices: int) -> int:
        """How many workers a role has on so many devices: one each, or one that stands for several."""
        return devices // self._devices_each(role)

    def ranks(self, role: str) -> int:
        """Data-parallel ranks of a role that one worker stands for."""
        return 1

    def devices_of(self, role: str, number: int, placement: Placement) -> tuple[int, ...]:
        """The devices whose worker has this one."""
        each = self._devices_each(role)
        return tuple(placement.devices[role][number * each : (number + 1) * each])

    def _devices_each(self, role: str) -> int:
        return self.config.engine.tensor_parallel if role in ENGINE_ROLES else 1

    def rollout(self, role: str, number: int, clock: Clock) -> RolloutEngine:
        """The rollout engine of this number, of one of its roles."""
        task = self.task
        options, longest = planned_options(self.config, self.shares.get(role)), max_tokens(self.config, task)
        together = self.config.engine.tensor_parallel
        engine: RolloutEngine = engine_class(self.config.engine.name)(
            self._model_of_engine(task.max_prompt_tokens + longest),
            sampling=sampling_of(self.config, task),
            slots=self.config.engine.slots,
            seed=self.seed,
            clock=clock,
            device=self.device,
            name=str(number),
            **({} if options is None else {"options": options}),
            **({} if together == 1 else {"tensor_parallel": together}),
            **({"routes": True} if self.config.replays_routing else {}),
        )
        return engine

    def log_prob(self, role: str, clock: Clock) -> LogProbEngine:
        """A scorer with weights of its own."""
        from engines.torch.scoring import TorchLogProb

        outline = self._outline() if role == "reference" else self._adapted()
        return TorchLogProb(
            outline.fill(self.device).to(self.device),
            temperature=self.config.algorithm.temperature,
            device=self.device,
            training=self.config.training,
        )

    def trainer(self, rank: int, clock: Clock) -> TrainEngine:
        """Returns when all ranks have met."""
        return self._enter("actor", self._join_store(), rank, self.training_world).policy

    def critic(self, rank: int, trainer: TrainEngine | None, clock: Clock) -> CriticEngine:
        """The critic in the training world, beside that trainer, or in a world of its own; then this returns when all
        its ranks have met."""
        if trainer is None:
            self._enter("critic", PrefixStore("critic", self._join_store()), rank, self.critic_world)
        algorithm = self.config.algorithm
        settings = replace(algorithm, learning_rate=algorithm.critic_learning_rate)
        return _worlds["critic" if trainer is None else "actor"].critic(settings)

    def scorer(self, trainer: TrainEngine, clock: Clock) -> Scorer:
        """A scorer with the parameters of the trainer beside it."""
        return _worlds["actor"].scorer()

    def reference(self, trainer: TrainEngine, clock: Clock) -> Scorer:
        """A scorer with the initial parameters, spread over the training world as those of the trainer are."""
        return _worlds["actor"].reference()

    def _enter(self, role: str, store: Store, rank: int, world: int) -> TrainingWorld:
        """Enter the training world of a role. Returns when all its ranks have met."""
        config, algorithm = self.config, self.config.algorithm
        torch.set_num_threads(config.cluster.threads_per_device)
        _worlds[role] = find("training.engine", config.training.engine)(
            TrainingSetting(
                self.model,
                policy_settings(algorithm, config.training, parameters(self.model)),
                config.training,
                store,
                rank,
                world,
                self.device,
                config.cluster.wait_timeout_s,
                steps=config.iterations * algorithm.steps_per_version,
                horizon=self.response_limit,
                seed=self.seed,
            )
        )
        return _worlds[role]

    def world_turns(self, role: str, rank: int, device: Turns, queue: TransferQueue, limit_s: float | None) -> Turns:
        """Turns for what all ranks of a role's world (the actor's, or a critic's own) compute together, of which this
        one's `device` takes turns. The ranks meet at the queue."""
        ranks = self.training_world if role == "actor" else self.critic_world
        return world_turns(_meeting(queue), role, rank=rank, ranks=ranks, device=device, limit_s=limit_s)

    def engine_device(
        self, rank: int, device: Turns, queue: TransferQueue, limit_s: float | None
    ) -> FirstDevice | OtherDevice | None:
        """The device of this training rank, which is one of several of an engine; None where an engine has one."""
        together = self.config.engine.tensor_parallel
        if together == 1:
            return None
        engine, place = divmod(rank, together)
        if place == 0:
            return FirstDevice(device, _meeting(queue), engine=engine, others=together - 1, limit_s=limit_s)
        free = partial(give_back, self.device)
        return OtherDevice(device, _meeting(queue), engine=engine, place=place, limit_s=limit_s, give_back=free)

    def beside_turns(
        self, device: Turns, world: Turns, first: FirstDevice | OtherDevice | None, *, together: bool
    ) -> Turns:
        """Turns of an engine whose device has a training rank, which takes its turns in `world`. first: `engine_device`
        of the same worker; together: as `EngineTurns`."""
        assert not isinstance(first, OtherDevice), "an engine lives with the worker of its first device"
        return EngineTurns(device, world, first, together=together)

    def _join_store(self) -> Store:
        _joined.append(join_store(self.place, self.training_world, self.config.cluster.wait_timeout_s))
        return _joined[-1]

    def local_sender(self, clock: Clock) -> WeightSender:
        """The sender of a trainer whose weights are taken from where they are."""
        return LocalSender()

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        """The receiver of an engine beside that trainer."""
        return LocalReceiver(trainer)

    def _model_of_engine(self, longest: int) -> PreTrainedModel:
        """The model for a rollout engine: on its device where it computes in this process; only outlined where its own
        processes read the files, which nobody copies then."""
        outline, name = self._adapted(longest), self.config.engine.name
        if outline.in_files and engine_reads_files(name):
            return outline.model
        device = self.device if name == "torch" else "cpu"
        return outline.fill(device).to(device)

    def _adapted(self, longest: int | None = None) -> Outline:
        """The policy: `_outline`, with adapters where these are trained."""
        from engines.torch.lora import with_adapters

        return with_adapters(self._outline(longest), self.config.training, self.seed)

    def _outline(self, longest: int | None = None) -> Outline:
        """longest: tokens of a sample, for which caches are made; without it as many as the model can take."""
        from engines.torch.model import outline_model

        torch.set_num_threads(self.config.cluster.threads_per_device)
        return outline_model(replace(self.model, max_length=longest or self.model.max_length), seed=0)


def _meeting(queue: TransferQueue) -> RemoteQueue:
    assert isinstance(queue, RemoteQueue), "ranks that compute are processes, as is their queue"
    return queue


@dataclass(frozen=True)
class SimulatedEngines:
    """The same of engines that let time pass. cost: resolved for the model and its layout; costs: for that of other
    roles; sender_links: of `transfer_times`; data_parallel: ranks of each role; paced: weights are really sent, so that
    there have to be some."""

    config: JobConfig
    cost: CostConfig
    seed: int
    transport: str
    sender_links: float
    data_parallel: Mapping[str, int]
    paced: bool
    costs: Mapping[str, CostConfig] = field(default_factory=dict)
    device = torch.device("cpu")
    ranks_together = training_ranks = critic_ranks = 1
    response_limit = None  # a simulated environment ends by itself

    @property
    def task(self) -> Task:
        environment = simulated_environment(self.cost)
        return SimulatedTask(self.cost.prompt_tokens, self.cost.lengths.cap, environment=environment)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.cost.lengths.cap)

    @property
    def transfer_pace(self) -> TransferTimes | None:
        """The least that weight transfers take, where they are real and the engines are not."""
        return self.times if self.paced else None

    @property
    def generate_s(self) -> float:
        """Seconds before a batch is generated as one."""
        return self.cost.generate_s

    @property
    def reward_s_per_sample(self) -> float:
        """Seconds of the host for the reward of one sample."""
        return self.cost.reward_s_per_sample

    def judge(self) -> Judge:
        assert self.cost.filtered_share is not None, "the check at the door asks for it"
        return DrawnJudge(self.cost.filtered_share, self.seed, self.config.algorithm.group_size)

    def workers(self, role: str, devices: int) -> int:
        return devices // self.config.engine.tensor_parallel if role in ENGINE_ROLES else 1

    def ranks(self, role: str) -> int:
        return self.data_parallel[role]

    def devices_of(self, role: str, number: int, placement: Placement) -> tuple[int, ...]:
        """Roles that share a pool are all on its first device, since one of them may stand for several devices."""
        devices = placement.devices[role]
        shared = len(placement.roles_on(devices[0])) > 1
        return (devices[0] if shared else devices[number * self.config.engine.tensor_parallel],)

    def rollout(self, role: str, number: int, clock: Clock) -> RolloutEngine:
        group_size = self.config.algorithm.group_size
        times = self.times if role == "rollout" else transfer_times(self.cost, BESIDE, self.sender_links)
        return SimulatedRollout(
            self.costs.get(role, self.cost),
            ResponseLengths.of_job(self.config, self.seed),
            slots=self.config.engine.slots,
            group_size=group_size,
            several_turns=self.cost.turns is not None,
            clock=clock,
            load_s=times.load_s,
            name=str(number),
        )

    def log_prob(self, role: str, clock: Clock) -> SimulatedLogProb:
        return SimulatedLogProb(self.cost, clock, load_s=self.times.load_s, **self._world(role))

    def scorer(self, trainer: SimulatedTrainer, clock: Clock) -> Scorer:
        return SimulatedLogProb(self.cost, clock, **self._world("actor"))

    def reference(self, trainer: SimulatedTrainer, clock: Clock) -> Scorer:
        return self.log_prob("reference", clock)

    def world_turns(self, role: str, rank: int, device: Turns, queue: TransferQueue, limit_s: float | None) -> Turns:
        return device

    def critic(self, rank: int, trainer: SimulatedTrainer | None, clock: Clock) -> CriticEngine:
        steps = self.config.algorithm.steps_per_version
        return SimulatedCritic(self.costs["critic"], clock, steps_per_version=steps, **self._world("critic"))

    def _world(self, role: str) -> dict[str, Any]:
        """Arguments of an engine that stands for all ranks of this role."""
        group_size, training = self.config.algorithm.group_size, self.config.training
        return {"ranks": self.data_parallel[role], "group_size": group_size, "training": training}

    def engine_device(self, rank: int, device: Turns, queue: TransferQueue, limit_s: float | None) -> None:
        return None

    def beside_turns(
        self, device: Turns, world: Turns, first: FirstDevice | OtherDevice | None, *, together: bool
    ) -> Turns:
        return device

    def local_sender(self, clock: Clock) -> WeightSender:
        return SimulatedSender(self.times, clock)

    def local_receiver(self, trainer: TrainEngine, clock: Clock) -> WeightReceiver:
        return SimulatedReceiver(self.times, clock)

    def trainer(self, rank: int, clock: Clock) -> SimulatedTrainer:
        weights = {"weights": torch.zeros(_PACED_WEIGHTS)} if self.paced else {}
        world = self._world("actor")
        world["group_size"] -= self.config.algorithm.has_greedy_baseline  # whose samples are not trained
        steps = self.config.algorithm.steps_per_version
        return SimulatedTrainer(self.cost, clock, parameters=weights, steps_per_version=steps, **world)

    @property
    def times(self) -> TransferTimes:
        """Times of a weight update."""
        return transfer_times(self.cost, self.transport, self.sender_links, self.data_parallel["actor"])


_PACED_WEIGHTS = 32_768
"""Numbers in the weights that a paced run sends: as many bytes as a quarter of the tiny model's."""

EngineFactory = RealEngines | SimulatedEngines
