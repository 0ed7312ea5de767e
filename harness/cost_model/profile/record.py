"""Records a profile of a model on this machine's device: rollout, scoring, training, copies."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engines.torch.model import build_model
from harness.config import ConfigError, ModelConfig, TrainingConfig
from harness.cost_model.profile.copies import time_copies
from harness.cost_model.profile.grid import Grid, grid_for, inference_depths, training_depths
from harness.cost_model.profile.passes import time_log_probs, time_training
from harness.cost_model.profile.rollout import time_decode, time_prefill, time_weights
from harness.cost_model.profile.rows import Profile, Row
from harness.cost_model.profile.stopwatch import Stopwatch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

PACKAGES = ("torch", "transformers", "numpy")


def record(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    device: torch.device,
    watch: Stopwatch | None = None,
    grid: Grid | None = None,
    depths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    told: Callable[[Row], None] = lambda row: None,
) -> Profile:
    """Time everything, weights drawn at random.

    depths: layers to time inference and training with; by default as many as fit. told: is shown every row. Raises
    ConfigError for a model that the embedded engines do not make, or of which not even four layers fit.
    """
    if model.experts:
        raise ConfigError(f"model={model.name} has experts, which the embedded engines do not make; choose another")
    if training.tensor_parallel > 1:
        raise ConfigError(f"training.tensor_parallel={training.tensor_parallel} needs other devices; a profile has one")
    memory = memory_bytes(device)
    inference, trained = depths or (inference_depths(model, memory), training_depths(model, memory))
    watch, grid = watch or Stopwatch(device), grid or grid_for(model, device.type)
    rows = []
    for row in _rows(model, training, watch, grid, inference, trained):
        told(row)
        rows.append(row)
    return Profile(
        model=replace(model, checkpoint=None),
        device=device_name(device),
        kind="cuda" if device.type == "cuda" else "cpu",
        memory_bytes=memory,
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        rows=tuple(rows),
    )


def _rows(
    model: ModelConfig,
    training: TrainingConfig,
    watch: Stopwatch,
    grid: Grid,
    inference: tuple[int, ...],
    trained: tuple[int, ...],
) -> Iterator[Row]:
    yield from time_copies(grid.copies, watch)
    for layers in inference:
        made = _made(model, layers, watch.device)
        yield from time_decode(made, grid.decode, watch)
        yield from time_prefill(made, grid.prefill, watch)
        yield from time_weights(made, watch)
        yield from time_log_probs(made, grid.log_prob, watch, training)
        del made
        _forget(watch.device)
    for layers in trained:
        yield from time_training(_made(model, layers, watch.device), grid.train, watch, training)
        _forget(watch.device)


def _made(model: ModelConfig, layers: int, device: torch.device) -> Qwen3ForCausalLM:
    """Made where it will be: drawing the weights of a large model on a CPU takes minutes."""
    with device:
        return build_model(replace(model, layers=layers, checkpoint=None), device=device)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """Of the device; of a CPU, what is free on the host now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return psutil.virtual_memory().available
