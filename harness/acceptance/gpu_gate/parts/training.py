"""Training steps: the gradient of plain torch, a loss that falls, tokens a second, and the memory that they take."""

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import (
    QWEN_HALF_B,
    SMALL,
    TINY,
    card,
    exact_products,
    per_second,
    predicted,
    seconds_of,
)
from harness.acceptance.gpu_gate.results import Check, Figure
from harness.calibration.profile.timing import batch_of, world_of_one
from harness.config import AlgorithmConfig, Layout, ModelConfig, TrainingConfig
from harness.cost_model import shape
from harness.cost_model.memory_plan import training_peak
from harness.cost_model.training_memory import PassShape, RankMemory
from harness.protocols import TrainBatch
from harness.transfer_queue import Ragged

_PLAN_ERROR = 0.1
"""Allowed error of the plan, a share of the peak. On a CPU, where torch counts no memory, tests count it."""

_ALGORITHM = AlgorithmConfig("gate", 8, 8, 8, learning_rate=1e-4, correction="none")


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of gradients, steps and memory."""
    exact_products()
    with world_of_one(setting.device) as mesh:
        yield _gradient(mesh, setting.device)
        layouts: tuple[Layout, ...] = ("padded", "packed")
        for layout in layouts:
            for recompute in (False, True):
                yield _steps(mesh, setting, TrainingConfig(layout=layout, recompute_activations=recompute))


def _gradient(mesh: DeviceMesh, device: torch.device) -> Check:
    """Check the gradient's norm against a loss that is written out and computed in float64 on the CPU."""
    batch = batch_of(8, 40, TINY.vocabulary)
    engine = FSDPEngine(build_model(TINY), _ALGORITHM, mesh=mesh, device=device)
    asyncio.run(engine.accumulate(batch))
    norm = asyncio.run(engine.step())["grad_norm"]
    model = build_model(TINY).double().train()
    loss = torch.zeros((), dtype=torch.float64)
    advantages = Ragged(batch.advantages_of_tokens, batch.responses.lengths)
    for prompt, response, advantage in zip(
        batch.prompts.rows(), batch.responses.rows(), advantages.rows(), strict=True
    ):
        sequence = torch.from_numpy(np.concatenate([prompt, response]))
        logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, sequence[len(prompt) :, None])[:, 0]
        loss = loss - (torch.from_numpy(advantage) * log_probs).sum()
    (loss / len(batch.responses.values)).backward()
    exact = float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))
    error = abs(norm - exact) / exact
    return Check("a step's gradient", f"norm {norm:.6g}, in float64 {exact:.6g}, off by {error:.1e}", error < 1e-4)


def _steps(mesh: DeviceMesh, setting: GateSetting, training: TrainingConfig) -> Check:
    """Check steps in bfloat16, which FSDP2 shards on one rank too: praised tokens become likelier; and time them."""
    device, model = setting.device, QWEN_HALF_B if setting.gpu else replace(SMALL, layers=2, dtype="bfloat16")
    samples, length = (16, 1024) if setting.gpu else (4, 128)
    batch = replace(batch_of(samples, length, model.vocabulary), advantages=np.ones(samples, np.float32))
    _forget_peak(device)
    engine = FSDPEngine(build_model(model), _ALGORITHM, mesh=mesh, device=device, training=training)
    before = _log_prob(engine, batch)
    for _ in range(2):
        asyncio.run(engine.accumulate(batch))
        norm = asyncio.run(engine.step())["grad_norm"]
    peak = _peak(device)
    seconds = seconds_of(lambda: _step(engine, batch), device, repeats=3)
    after = _log_prob(engine, batch)
    said = [
        f"{per_second(samples * length, seconds, 'token')}",
        per_second(_flops(model, samples, length), seconds, "FLOP"),
        f"log-probs from {before:.3f} to {after:.3f}",
    ]
    planned = training_peak(RankMemory(model, _pass(training, samples * length, setting.gpu)))
    said.append(f"{planned / 1e9:.3g} GB planned")
    held = True
    if peak is not None:
        held = abs(peak / planned - 1) <= _PLAN_ERROR
        said.append(f"{peak / 1e9:.3g} GB measured, {peak / planned - 1:+.1%} (at most {_PLAN_ERROR:.0%})")
    name = f"{training.layout}{', recomputed' if training.recompute_activations else ''}"
    made, costs = card(setting.kind), predicted(setting.kind, model)
    speed = Figure(f"training of {model.name}, {name}", samples * length / seconds, "token/s")
    if costs is not None and not training.recompute_activations:
        tokens = samples * (length * costs.train_s_per_token + length**2 * costs.train_s_per_pair)
        speed = replace(speed, model=samples * length / (tokens + costs.train_call_s + costs.train_step_s))
    memory = Figure(f"its memory, {name}", peak or 0.0, "B", made.memory_bytes if made else None, planned)
    return Check(
        f"steps of {model.name}, {samples} x {length} tokens, {name}",
        ", ".join(said),
        bool(np.isfinite(norm)) and after > before and held,
        (speed,) if peak is None else (speed, memory),
    )


def _pass(training: TrainingConfig, tokens: int, gpu: bool) -> PassShape:
    """Half of each sample is its prompt, as `batch_of` makes them."""
    scored = tokens // 2 if training.layout == "packed" else tokens
    recompute, logits = training.recompute_activations, training.logit_bytes
    return PassShape(tokens=tokens, scored=scored, recompute=recompute, gpu=gpu, logit_bytes=logits)


def _flops(model: ModelConfig, samples: int, length: int) -> float:
    """Forward and backward, each product once."""
    forward = length * shape.forward_flops_per_token(model) + length**2 * shape.forward_flops_per_pair(model)
    return samples * shape.train_passes(recompute=False) * forward


def _step(engine: FSDPEngine, batch: TrainBatch) -> None:
    asyncio.run(engine.accumulate(batch))
    asyncio.run(engine.step())


def _log_prob(engine: FSDPEngine, batch: TrainBatch) -> float:
    """The mean of the batch's tokens."""
    return float(asyncio.run(engine.scorer().log_probs(batch.prompts, batch.responses)).values.mean())


def _forget_peak(device: torch.device) -> None:
    gc.collect()  # the engine before this one
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    """Bytes; None where torch does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
