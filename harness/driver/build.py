"""Makes each role in the process where it will run. The only place that joins engines to roles."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from harness.config import AlgorithmConfig, JobConfig, ModelConfig
from harness.protocols import Sampling
from harness.runtime.runtime import RealClock
from harness.tasks import make_task, max_tokens
from harness.transfer_queue import TransferQueue
from harness.workers.readers import CompletionReader, FifoReader, MicroBatchReader
from schedules import Order


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to make its role; picklable. `model` names the checkpoint of the initial weights."""

    config: JobConfig
    model: ModelConfig
    seed: int
    engine: str
    device: str
    queue: TransferQueue
    origin: float
    order: Order
    eta: float

    @property
    def stage(self) -> dict[str, Any]:
        """What every stage wants to know."""
        return {
            "queue": self.queue,
            "clock": RealClock(self.origin),
            "wait_timeout_s": self.config.cluster.wait_timeout_s,
        }


def build_rollout(recipe: Recipe, number: int, engines: int, shares_device: bool) -> Any:
    from harness.workers.rollout import RolloutRole

    config, algorithm, device = recipe.config, recipe.config.algorithm, _device(recipe)
    task, clock = make_task(config), RealClock(recipe.origin)
    sampling = Sampling(max_tokens(config, task), algorithm.temperature, algorithm.top_p, (task.stop_token,))
    engine = load(recipe.engine)(
        _model(recipe),
        sampling=sampling,
        slots=config.engine.slots,
        seed=recipe.seed,
        clock=clock,
        device=device,
        name=str(number),
    )
    return RolloutRole(
        engine,
        recipe.queue,
        clock,
        index=number,
        device=device,
        group_size=algorithm.group_size,
        share=fair_share(algorithm, engines),
        stream_share=fair_share(algorithm, engines, batches=1 + recipe.eta),
        keep_cache=config.engine.keep_cache,
        shares_device=shares_device,
        wait_timeout_s=config.cluster.wait_timeout_s,
    )


def fair_share(algorithm: AlgorithmConfig, engines: int, batches: float = 1.0) -> int:
    """Samples of one engine where so many batches are dealt out in whole groups."""
    return math.ceil(round(batches * algorithm.batch_groups / engines, 9)) * algorithm.group_size


def build_reward(recipe: Recipe, number: int) -> Any:
    from harness.workers.stages import RewardStage

    algorithm = recipe.config.algorithm
    rows = algorithm.batch_samples
    return RewardStage(make_task(recipe.config), name=str(number), rows=rows, minimum=1, **recipe.stage)


def build_advantages(recipe: Recipe, number: int) -> Any:
    from harness.workers.stages import AdvantageStage

    algorithm = recipe.config.algorithm
    return AdvantageStage(
        group_size=algorithm.group_size,
        divide_by_std=algorithm.normalise_std,
        name=str(number),
        rows=algorithm.batch_samples,
        minimum=algorithm.group_size,
        **recipe.stage,
    )


def build_reference(recipe: Recipe, number: int) -> Any:
    from harness.workers.stages import ReferenceStage

    device, rows = _device(recipe), _micro_batch(recipe)
    engine = _scorer(recipe, device)
    return ReferenceStage(engine, name=str(number), rows=rows, minimum=_least(recipe), **recipe.stage)


def build_actor_fwd(recipe: Recipe, number: int) -> Any:
    from harness.workers.stages import OldLogProbStage

    device, rows = _device(recipe), _micro_batch(recipe)
    engine = _scorer(recipe, device)
    return OldLogProbStage(engine, device, name=str(number), rows=rows, minimum=_least(recipe), **recipe.stage)


def build_actor(recipe: Recipe, number: int, world: int, host: str, port: int) -> Any:
    """One training rank; returns when all `world` ranks have met at the store on host:port."""
    from torch.distributed import TCPStore

    from engines.torch.fsdp import FSDPEngine, init_world
    from harness.workers.actor import ActorRole

    device, timeout_s = _device(recipe), recipe.config.cluster.wait_timeout_s
    algorithm, training = recipe.config.algorithm, recipe.config.training
    store = TCPStore(host, port, world, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    mesh = init_world(store, number, world, device, timeout_s, training.tensor_parallel)
    reader = _reader(recipe, number)
    engine = FSDPEngine(_model(recipe), algorithm, mesh=mesh, device=device, training=training)
    return ActorRole(engine, RealClock(recipe.origin), rank=number, reader=reader, device=device)


def _reader(recipe: Recipe, rank: int) -> MicroBatchReader:
    """What a training rank reads the queue with."""
    together, timeout_s = recipe.config.training.tensor_parallel, recipe.config.cluster.wait_timeout_s
    reader = reader_of(
        recipe.order,
        recipe.queue,
        recipe.config.algorithm,
        rank=rank // together,
        rows=_micro_batch(recipe),
        wait_timeout_s=timeout_s,
    )
    if together == 1:
        return reader
    from harness.workers.readers import TensorParallelReader, tensor_parallel_group

    return TensorParallelReader(reader if rank % together == 0 else None, tensor_parallel_group(together, timeout_s))


def reader_of(
    order: Order,
    queue: TransferQueue,
    algorithm: AlgorithmConfig,
    *,
    rank: int,
    rows: int,
    wait_timeout_s: float | None,
) -> MicroBatchReader:
    """In which order a training rank takes groups. rows: samples of its micro-batch."""
    if order == "fifo":
        return FifoReader(queue, rank=rank, rows=rows, wait_timeout_s=wait_timeout_s)
    return CompletionReader(
        queue,
        rows=rows,
        group_size=algorithm.group_size,
        batch=algorithm.batch_groups,
        wait_timeout_s=wait_timeout_s,
    )


def _micro_batch(recipe: Recipe) -> int:
    return recipe.config.algorithm.micro_batch_groups * recipe.config.algorithm.group_size


def _least(recipe: Recipe) -> int:
    """Rows that scoring waits for."""
    return least_rows(recipe.order, _micro_batch(recipe), recipe.config.algorithm.group_size)


def least_rows(order: Order, micro_batch: int, group_size: int) -> int:
    """In order, a whole micro-batch, so that it holds the same rows whatever the timing; else a complete group."""
    return micro_batch if order == "fifo" else group_size


def _device(recipe: Recipe) -> Any:
    import torch

    torch.set_num_threads(recipe.config.cluster.threads_per_device)
    return torch.device(recipe.device)


def _scorer(recipe: Recipe, device: Any) -> Any:
    from engines.torch.log_prob import TorchLogProb

    temperature, layout = recipe.config.algorithm.temperature, recipe.config.training.layout
    return TorchLogProb(_model(recipe), temperature=temperature, device=device, layout=layout)


def _model(recipe: Recipe) -> Any:
    from engines.torch.model import build_model

    return build_model(recipe.model, seed=0)


def load(path: str) -> Any:
    """The object at "module:name"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
