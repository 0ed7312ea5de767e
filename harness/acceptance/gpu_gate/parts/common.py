"""Shapes of models, and clocks, that several parts use."""

import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from harness.acceptance.gpu_gate.results import amount
from harness.calibration.profile.timing import wait_for
from harness.config import CostConfig, DeviceConfig, ModelConfig, RooflineConfig
from harness.config.files import read_yaml
from harness.config.machine import GPU_KINDS
from harness.cost_model.memory import JobLayout
from harness.cost_model.roofline import roofline
from harness.transfer_queue import Ragged

_EXPERIMENTS = Path(__file__).parents[4] / "experiments"

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
SMALL = ModelConfig("small", 256, 4, 4, 2, 64, 512, 1024, True, 1024)
QWEN_HALF_B = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 4096, dtype="bfloat16")


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median of several times, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def per_second(done: float, seconds: float, unit: str) -> str:
    """Such as 3.21 GB/s."""
    return amount(done / seconds, f"{unit}/s")


@cache
def card(kind: str) -> DeviceConfig | None:
    """The figures of this machine's first GPU by its maker; None of cores, and of a GPU that no file describes."""
    named = GPU_KINDS.get(torch.cuda.get_device_name(0)) if kind == "cuda" else None
    if named is None:
        return None
    return TypeAdapter(DeviceConfig).validate_python(read_yaml(_EXPERIMENTS / "device" / f"{named}.yaml"))


def predicted(kind: str, model: ModelConfig) -> CostConfig | None:
    """Costs of a model on it by the cost model, `cost=roofline`."""
    device = card(kind)
    factors = read_yaml(_EXPERIMENTS / "cost" / "roofline.yaml")
    if device is None:
        return None
    return roofline(model, device, TypeAdapter(RooflineConfig).validate_python(factors), JobLayout())


def random_rows(vocabulary: int, lengths: np.ndarray, seed: int = 0) -> Ragged:
    """Tokens, int64, of samples of these lengths."""
    return Ragged(np.random.default_rng(seed).integers(1, vocabulary, int(lengths.sum())), lengths)


def exact_products() -> None:
    """Float32 products in float32: TF32 rounds their inputs to 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
