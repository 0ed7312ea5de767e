"""What to time: sizes that a device does in seconds, and as many layers as it holds. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.config import ConfigError, ModelConfig
from harness.cost_model import shape

Sizes = tuple[tuple[int, int], ...]
"""(samples, tokens of each)"""

SHALLOW = (2, 4)
"""Layers that are timed where the device does not hold all of them."""
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
