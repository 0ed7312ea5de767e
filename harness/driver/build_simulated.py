"""Makes each simulated role in the process where it will run: the real roles, around engines that let time pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engines.simulated.devices import Device
from engines.simulated.passes import SimulatedLogProb, SimulatedTrainer
from engines.simulated.rollout import SimulatedRollout
from harness.config import CostConfig, JobConfig
from harness.cost_model.cost import TransferTimes, transfer_times
from harness.cost_model.lengths import Lengths
from harness.driver.build import fair_share, least_rows, reader_of
from harness.protocols import Clock, Span
from harness.tasks.task import SimulatedTask
from harness.transfer_queue import Batch, Column, TransferQueue
from harness.weight_sync.endpoints import WeightOffer, WeightSender
from harness.weight_sync.simulated import PacedOffer, PacedSender
from harness.workers.actor import ActorRole
from harness.workers.rollout import RolloutRole
from harness.workers.stages import AdvantageStage, OldLogProbStage, ReferenceStage, RewardStage
from schedules import Order, Transport

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class SimulatedRecipe:
    """All that a worker needs to make its role. counts: engines of rollout, data-parallel ranks of other roles;
    paced: it has weights, which are really sent."""

    config: JobConfig
    cost: CostConfig
    seed: int
    transport: Transport
    order: Order
    eta: float
    counts: Mapping[str, int]
    shares_device: bool
    queue: TransferQueue
    clock: Clock
    devices: Mapping[str, Device]
    paced: bool = False

    @property
    def batch_rows(self) -> int:
        return self.config.algorithm.batch_samples

    @property
    def stage(self) -> dict[str, Any]:
        """What every stage wants to know."""
        return {"queue": self.queue, "clock": self.clock, "wait_timeout_s": self.wait_timeout_s}

    @property
    def wait_timeout_s(self) -> float | None:
        """As of the kit: where the clock jumps, nobody waits too long."""
        return self.config.cluster.wait_timeout_s if self.paced else None

    def micro_batch(self, role: str) -> int:
        """Rows that all ranks of a role take at once."""
        algorithm = self.config.algorithm
        return min(self.batch_rows, algorithm.micro_batch_groups * algorithm.group_size * self.counts[role])

    def least(self, rows: int) -> int:
        return least_rows(self.order, rows, self.config.algorithm.group_size)

    @property
    def times(self) -> TransferTimes:
        return transfer_times(self.cost, self.transport)


def build_simulated(number: int, job_role: str, recipe: SimulatedRecipe) -> Any:
    """Worker `number` of a role; of rollout there are several, of the others one that stands for all its devices."""
    return _BUILD[job_role](number, recipe)


class PacedActor(ActorRole):
    """Sends real weights, no faster than the cost model says."""

    def __init__(self, times: TransferTimes, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times = times

    async def use(self, sender: WeightSender) -> None:
        await super().use(PacedSender(sender, self.times, self.clock))


class SimulatedRolloutRole(RolloutRole):
    """Lets `generate_s` pass before it generates a batch as one."""

    def __init__(self, generate_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.generate_s = generate_s

    async def generate(self, iteration: int, batches: int = 1) -> list[Span]:
        await self.clock.sleep(self.generate_s)
        return await super().generate(iteration, batches)


class PacedRollout(SimulatedRolloutRole):
    """Receives real weights, no faster than the cost model says."""

    def __init__(self, times: TransferTimes, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times = times

    async def join(self, offer: WeightOffer, number: int) -> None:
        await super().join(PacedOffer(offer, self.times, self.clock), number)


class PacedOldLogProb(OldLogProbStage):
    """Receives real weights, no faster than the cost model says."""

    def __init__(self, times: TransferTimes, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times = times

    async def join(self, offer: WeightOffer, number: int) -> None:
        await super().join(PacedOffer(offer, self.times, self.clock), number)


class SimulatedReward(RewardStage):
    """Takes `sample_s` of its host for each sample, one after the other."""

    def __init__(self, sample_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sample_s = sample_s

    async def compute(self, batch: Batch) -> Mapping[str, Column]:
        if self.sample_s:
            await self.clock.sleep(len(batch.rows) * self.sample_s)
        return await super().compute(batch)


def _rollout(number: int, recipe: SimulatedRecipe) -> RolloutRole:
    config, algorithm = recipe.config, recipe.config.algorithm
    engine = SimulatedRollout(
        recipe.cost,
        Lengths(recipe.cost.lengths, recipe.seed, algorithm.group_size),
        slots=config.engine.slots,
        group_size=algorithm.group_size,
        clock=recipe.clock,
        load_s=recipe.times.load_s,
        name=str(number),
    )
    make = partial(PacedRollout, recipe.times) if recipe.paced else SimulatedRolloutRole
    return make(
        recipe.cost.generate_s,
        engine,
        recipe.queue,
        recipe.clock,
        index=number,
        device=_HOST,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, recipe.counts["rollout"]),
        stream_share=fair_share(algorithm, recipe.counts["rollout"], batches=1 + recipe.eta),
        keep_cache=config.engine.keep_cache,
        shares_device=recipe.shares_device,
        wait_timeout_s=recipe.wait_timeout_s,
    )


def _reward(number: int, recipe: SimulatedRecipe) -> RewardStage:
    task = SimulatedTask(recipe.cost.prompt_tokens, recipe.cost.lengths.cap)
    sample_s = recipe.cost.reward_s_per_sample
    rows = recipe.config.algorithm.group_size if sample_s else recipe.batch_rows  # what takes time is handed on early
    return SimulatedReward(sample_s, task, name=str(number), rows=rows, minimum=1, **recipe.stage)


def _advantages(number: int, recipe: SimulatedRecipe) -> AdvantageStage:
    algorithm = recipe.config.algorithm
    return AdvantageStage(
        group_size=algorithm.group_size,
        divide_by_std=algorithm.normalise_std,
        name=str(number),
        rows=recipe.batch_rows,
        minimum=algorithm.group_size,
        **recipe.stage,
    )


def _log_prob_engine(role: str, recipe: SimulatedRecipe) -> SimulatedLogProb:
    return SimulatedLogProb(
        recipe.cost, recipe.devices[role], clock=recipe.clock, load_s=recipe.times.load_s, ranks=recipe.counts[role]
    )


def _reference(number: int, recipe: SimulatedRecipe) -> ReferenceStage:
    rows = recipe.micro_batch("reference")
    engine = _log_prob_engine("reference", recipe)
    return ReferenceStage(engine, name=str(number), rows=rows, minimum=recipe.least(rows), **recipe.stage)


def _actor_fwd(number: int, recipe: SimulatedRecipe) -> OldLogProbStage:
    rows = recipe.micro_batch("actor_fwd")
    engine = _log_prob_engine("actor_fwd", recipe)
    make = partial(PacedOldLogProb, recipe.times) if recipe.paced else OldLogProbStage
    return make(engine, _HOST, name=str(number), rows=rows, minimum=recipe.least(rows), **recipe.stage)


def _actor(number: int, recipe: SimulatedRecipe) -> ActorRole:
    weights = {"weights": torch.zeros(_TINY)} if recipe.paced else {}
    engine = SimulatedTrainer(recipe.cost, recipe.devices["actor"], ranks=recipe.counts["actor"], parameters=weights)
    reader = reader_of(
        recipe.order,
        recipe.queue,
        recipe.config.algorithm,
        rank=number,
        rows=recipe.micro_batch("actor"),
        wait_timeout_s=recipe.wait_timeout_s,
    )
    make = partial(PacedActor, recipe.times) if recipe.paced else ActorRole
    return make(engine, recipe.clock, rank=number, reader=reader, device=_HOST)


_TINY = 32_768
"""Numbers in the weights that a paced run sends: as many bytes as a quarter of the tiny model's."""

_BUILD: dict[str, Callable[[int, SimulatedRecipe], Any]] = {
    "rollout": _rollout,
    "reward": _reward,
    "advantages": _advantages,
    "reference": _reference,
    "actor_fwd": _actor_fwd,
    "actor": _actor,
}
