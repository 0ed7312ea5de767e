"""Padded against packed micro-batches, with and without keeping activations: seconds of a forward and backward.

    python -m tests.benchmarks.bench_layouts [--device cpu|cuda] [--rounds 12]

CPU: the tiny model on one thread. CUDA: the shape of qwen0.5b in bfloat16, in micro-batches of 8 samples. Lengths are
those of `reverse`, or drawn with a long tail.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch.distributed import HashStore, destroy_process_group

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.model import build_model
from harness.config import AlgorithmConfig, Layout, ModelConfig, TrainingConfig
from harness.protocols import TrainBatch
from harness.transfer_queue import Ragged

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 512)
QWEN = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 8192, dtype="bfloat16")
ALGORITHM = AlgorithmConfig("bench", 4, 4, 1, learning_rate=1e-4, kl_coef=0.0)


def batch_of(vocabulary: int, prompt: int, lengths: np.ndarray) -> TrainBatch:
    rng = np.random.default_rng(0)
    total = int(lengths.sum())

    def column(values: np.ndarray) -> Ragged:
        return Ragged(values, lengths)

    return TrainBatch(
        prompts=Ragged.from_rows([rng.integers(1, vocabulary, prompt) for _ in lengths]),
        responses=column(rng.integers(1, vocabulary, total)),
        behaviour_log_probs=column(np.full(total, -np.log(vocabulary), np.float32)),
        versions=column(np.zeros(total, np.int32)),
        advantages=rng.standard_normal(len(lengths)).astype(np.float32),
    )


def cases(device: torch.device) -> tuple[ModelConfig, dict[str, TrainBatch]]:
    rng = np.random.default_rng(1)
    if device.type == "cuda":
        even, tail = rng.integers(900, 1100, 8), np.minimum(4096, (rng.lognormal(6.2, 1.0, 8)).astype(np.int64) + 1)
        return QWEN, {"even": batch_of(151936, 256, even), "long tail": batch_of(151936, 256, tail)}
    even, tail = rng.integers(3, 9, 64), np.minimum(256, rng.geometric(1 / 24, 64))
    return TINY, {"even": batch_of(32, 5, even), "long tail": batch_of(32, 5, tail)}


def seconds(engine: FSDPEngine, batch: TrainBatch, device: torch.device, rounds: int) -> float:
    """The median of so many rounds, the first two left out."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        _run(engine.accumulate(batch))
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    _run(engine.step())
    return float(np.median(taken[2:]))


def _run(coroutine: object) -> None:
    try:
        coroutine.send(None)  # type: ignore[attr-defined]
    except StopIteration:
        return
    raise AssertionError("it waits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(1)
    mesh = init_world(HashStore(), 0, 1, device, timeout_s=60)
    model, batches = cases(device)
    layouts: tuple[Layout, ...] = ("padded", "packed")
    for layout in layouts:
        for recompute in (False, True):
            training = TrainingConfig(layout=layout, recompute_activations=recompute)
            engine = FSDPEngine(build_model(model), ALGORITHM, mesh=mesh, device=device, training=training)
            for name, batch in batches.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                took = seconds(engine, batch, device, given.rounds)
                tokens = len(batch.responses.values) + len(batch.prompts.values)
                peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
                kept = "recomputed" if recompute else "kept"
                print(f"{layout:7} {kept:10} {name:10} {took * 1e3:8.1f} ms, {tokens / took:8.0f} tokens/s{peak}")
            del engine
    destroy_process_group()


if __name__ == "__main__":
    main()
