"""Times of scoring and of training: the forward pass, forward and backward, the optimizer's step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.log_prob import TorchLogProb
from harness.config import AlgorithmConfig, TrainingConfig
from harness.cost_model.profile.grid import Sizes
from harness.cost_model.profile.rows import Row
from harness.cost_model.profile.stopwatch import Stopwatch
from harness.protocols import TrainBatch
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

_TIMEOUT_S = 60.0
_ALGORITHM = AlgorithmConfig("profile", batch_groups=1, group_size=2, micro_batch_groups=1, learning_rate=1e-6)


def time_log_probs(model: Qwen3ForCausalLM, sizes: Sizes, watch: Stopwatch, training: TrainingConfig) -> Iterator[Row]:
    """Micro-batches of so many samples with so many tokens each, half of them the prompt's."""
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    engine = TorchLogProb(model, temperature=1.0, device=watch.device, layout=training.layout)
    with asyncio.Runner() as loop:
        for samples, length in sizes:
            batch = batch_of(samples, length, vocabulary)
            seconds, spread = watch.time(lambda batch=batch: loop.run(engine.log_probs(batch.prompts, batch.responses)))  # type: ignore[misc]
            yield Row("log_prob", layers, samples, length, 0, seconds, spread)


def time_training(model: Qwen3ForCausalLM, sizes: Sizes, watch: Stopwatch, training: TrainingConfig) -> Iterator[Row]:
    """Micro-batches as of `time_log_probs`, on a training world of this process alone; then optimizer steps."""
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    with asyncio.Runner() as loop, world_of_one(watch.device) as mesh:
        engine = FSDPEngine(model, _ALGORITHM, mesh=mesh, device=watch.device, training=training)
        for samples, length in sizes:
            batch = batch_of(samples, length, vocabulary)
            seconds, spread = watch.time(lambda batch=batch: loop.run(engine.accumulate(batch)))  # type: ignore[misc]
            yield Row("train", layers, samples, length, 0, seconds, spread)
        least = batch_of(*sizes[0], vocabulary)
        seconds, spread = watch.time(lambda: loop.run(engine.step()), before=lambda: loop.run(engine.accumulate(least)))
        yield Row("optimizer", layers, 0, 0, 0, seconds, spread)


@contextmanager
def world_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """A training world of one rank; no other process is asked for."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_world(HashStore(), 0, 1, device, _TIMEOUT_S)
    try:
        yield mesh
    finally:
        destroy_process_group()


def batch_of(samples: int, length: int, vocabulary: int) -> TrainBatch:
    """Random tokens; half of each sample is its prompt."""
    rng = np.random.default_rng(0)
    prompt, response = length // 2, length - length // 2

    def column(values: np.ndarray) -> Ragged:
        return Ragged.from_rows(list(values.reshape(samples, -1)))

    return TrainBatch(
        prompts=column(rng.integers(0, vocabulary, samples * prompt)),
        responses=column(rng.integers(0, vocabulary, samples * response)),
        behaviour_log_probs=column(np.full(samples * response, -np.log(vocabulary), np.float32)),
        versions=column(np.zeros(samples * response, np.int32)),
        advantages=rng.standard_normal(samples).astype(np.float32),
    )
