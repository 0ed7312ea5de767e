"""The learning rate of each optimizer step: by the model's size, warmed up, decayed."""

import math
from dataclasses import replace

from harness.config import AlgorithmConfig, TrainingConfig

BY_PARAMETERS = ((10_000_000, 5e-4, 1e-3), (100_000_000, 5e-5, 5e-4), (math.inf, 1e-6, 1e-5))
"""The rate `auto`, for models of fewer parameters than the first number: of weights, and of adapters. 1e-6 is what
published recipes of RL on language models from 0.5B to 32B use (DAPO, arXiv 2503.14476, section 4.1; verl's and TRL's
for GRPO); 5e-4 is the rate at which `tiny` learns in a minute. Adapters of large models want ten times as much,
whatever their rank (Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025); of `tiny` they learn best at
twice as much."""


def peak_rate(algorithm: AlgorithmConfig, parameters: int) -> float:
    """The rate before warm-up and decay, of a model with so many parameters."""
    if algorithm.learning_rate != "auto":
        return algorithm.learning_rate
    return next(rate for below, rate, _ in BY_PARAMETERS if parameters < below)


def policy_settings(algorithm: AlgorithmConfig, training: TrainingConfig, parameters: int) -> AlgorithmConfig:
    """The optimizer of a policy with so many parameters: the same; of adapters at another rate `auto`."""
    if not training.lora_rank or algorithm.learning_rate != "auto":
        return algorithm
    return replace(algorithm, learning_rate=next(rate for below, _, rate in BY_PARAMETERS if parameters < below))


def learning_rate(algorithm: AlgorithmConfig, parameters: int, step: int, steps: int) -> float:
    """The learning rate of step `step`, counted from 0, of a run of `steps`.

    Linear from 1/warmup_steps to the peak over `warmup_steps`; then the peak (constant), or down to
    `decay_to` of it at the last step, on a line or on half a cosine (Loshchilov and Hutter, arXiv 1608.03983).
    """
    peak, warmup = peak_rate(algorithm, parameters), algorithm.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if algorithm.decay == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    left = 1 - done if algorithm.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (algorithm.decay_to + (1 - algorithm.decay_to) * left)
