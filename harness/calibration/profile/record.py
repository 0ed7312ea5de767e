"""Records a profile of a model on this machine's device: which sizes, with as many layers as it holds; their times."""

import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engines.torch.model import build_model
from harness.calibration.profile.rows import DeviceProfile, TimingRow, TransferRow
from harness.calibration.profile.timing import (
    Sizes,
    Stopwatch,
    time_copies,
    time_decode,
    time_log_probs,
    time_prefill,
    time_training,
    time_weights,
)
from harness.calibration.profile.transfers import time_transfers
from harness.config import ConfigError, ModelConfig, TrainingConfig
from harness.config.machine import cpu_model
from harness.cost_model import shape

PACKAGES = ("torch", "transformers", "numpy")

SHALLOW = (2, 4)  # layers that are timed where the device does not hold all of them
_TRAINING_BYTES = 16  # per parameter, all float32: weight, gradient and two moments
_ROOM = 0.7  # of memory for what is counted here; activations, logits and caches need the rest
_OPERATIONS = {"cpu": 3e10, "cuda": 1e15}  # in a second or a few, by a careful guess
_MOST_TOKENS = {"cpu": 8192, "cuda": 65536}

_SAMPLES = {"cpu": (1, 8, 32, 128), "cuda": (1, 4, 16, 64, 256, 512)}

_LONGEST = {"cpu": 1024, "cuda": 8192}

_FEWEST_TOKENS = 128

_FEWEST_DECODED = 8  # samples
_ROW_TOKENS = 16  # of the shortest sequence
_NEW_TOKENS = 32  # room to decode in


@dataclass(frozen=True)
class Grid:
    """Sizes of each phase; copies: bytes."""

    decode: Sizes
    prefill: Sizes
    log_prob: Sizes
    train: Sizes
    copies: tuple[int, ...]


def record(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    device: torch.device,
    watch: Stopwatch | None = None,
    grid: Grid | None = None,
    depths: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ranks: Sequence[int] | None = None,
    bucket_bytes: int = 64 << 20,
    progress: Callable[[TimingRow | TransferRow], None] = lambda row: None,
) -> DeviceProfile:
    """Time everything, weights drawn at random. depths: layers to time inference and training with; by default as many
    as fit. ranks: training ranks to time transfers from; by default one, and as many as there are devices for.
    progress: is called with every row. Raises ConfigError for a model that the embedded engines do not make, or of
    which not even four layers fit."""
    if model.experts:
        raise ConfigError(f"model={model.name} has experts, which the embedded engines do not make; choose another")
    if training.tensor_parallel > 1:
        raise ConfigError(f"training.tensor_parallel={training.tensor_parallel} needs other devices; a profile has one")
    memory = memory_bytes(device)
    inference, trained = depths or (inference_depths(model, memory), training_depths(model, memory))
    watch, grid = watch or Stopwatch(device), grid or grid_for(model, device.type)
    rows = []
    for row in _rows(model, training, watch, grid, inference, trained):
        progress(row)
        rows.append(row)
    transfers = []
    for transfer in time_transfers(model, device, bucket_bytes, ranks):
        progress(transfer)
        transfers.append(transfer)
    return DeviceProfile(
        model=replace(model, checkpoint=None),
        device=device_name(device),
        kind="cuda" if device.type == "cuda" else "cpu",
        memory_bytes=memory,
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        rows=tuple(rows),
        transfers=tuple(transfers),
    )


def _rows(
    model: ModelConfig,
    training: TrainingConfig,
    watch: Stopwatch,
    grid: Grid,
    inference: tuple[int, ...],
    trained: tuple[int, ...],
) -> Iterator[TimingRow]:
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


def _made(model: ModelConfig, layers: int, device: torch.device) -> PreTrainedModel:
    """Made where it will be: drawing the weights of a large model on a CPU takes minutes."""
    with device:
        return build_model(replace(model, layers=layers, checkpoint=None), device=device)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """The maker's name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def memory_bytes(device: torch.device) -> int:
    """Bytes of the device's memory; of a CPU, those that are free on the host now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def grid_for(model: ModelConfig, kind: str) -> Grid:
    """A few dozen sizes. kind: cpu or cuda."""
    passes = _OPERATIONS[kind] / shape.forward_flops_per_token(model)
    longest = min(_LONGEST[kind], model.max_length - _NEW_TOKENS)

    def sizes(tokens: float, parts: tuple[int, ...] = (1, 3, 8)) -> Sizes:
        most = max(_FEWEST_TOKENS, min(_MOST_TOKENS[kind], int(tokens)))
        lengths = sorted({max(_ROW_TOKENS, min(longest, most) // part) for part in parts})
        return tuple((n, length) for length in lengths for n in _SAMPLES[kind] if n * length <= most)

    decode = sizes(_MOST_TOKENS[kind], (1, 8, 64))  # short ones too: only then many samples fit
    return Grid(
        decode=tuple((n, length) for n, length in decode if n <= max(passes, _FEWEST_DECODED)),
        prefill=sizes(passes),
        log_prob=sizes(passes),
        train=sizes(passes / 3),
        copies=tuple(1 << power for power in ((24, 26, 28) if kind == "cpu" else (22, 25, 28, 30))),
    )


def inference_depths(model: ModelConfig, memory_bytes: int) -> tuple[int, ...]:
    """Layers to time rollout and scoring with: weights as they are made, in float32, or twice while new ones load."""
    bytes_per_parameter = max(4, 2 * shape.bytes_per_number(model))
    return _depths(model, bytes_per_parameter, memory_bytes, "rollout")


def training_depths(model: ModelConfig, memory_bytes: int) -> tuple[int, ...]:
    """Layers to time training with, its optimizer's state included."""
    return _depths(model, _TRAINING_BYTES, memory_bytes, "training")


def _depths(model: ModelConfig, bytes_per_parameter: int, memory_bytes: int, what: str) -> tuple[int, ...]:
    def needed(layers: int) -> float:
        return bytes_per_parameter * shape.parameters(replace(model, layers=layers)) / _ROOM

    if needed(model.layers) <= memory_bytes:
        return (model.layers,)
    deepest = max(SHALLOW)
    if deepest < model.layers and needed(deepest) <= memory_bytes:
        return SHALLOW
    raise ConfigError(
        f"model={model.name} does not fit: {what} needs {needed(min(deepest, model.layers)) / 2**30:.1f} GiB for "
        f"{min(deepest, model.layers)} of its layers, and this device has {memory_bytes / 2**30:.1f}; "
        "choose a smaller model"
    )
