"""A policy worth improving: a small model trained on demonstrations that become noisy.

From random weights the rewards of the built-in tasks are too rare to learn from. After this the greedy answer is mostly
right and the sampled one mostly wrong, so that reinforcement learning has something to sharpen. Clean demonstrations
come first because some initial weights learn little of the task from noisy ones alone (docs/algorithms.md).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harness.tasks.environment import transcript
from harness.tasks.task import Task

REPLACED = 0.13
DROPPED = 0.04
STUTTERED = 0.04
CLEAN_UNTIL, NOISY_FROM = 0.5, 0.9
"""Fractions of the steps: no noise before the first, all of it after the second, linear between."""
WARM_UP_STEPS = 10
DEMONSTRATION_STREAM = 1 << 63
"""Added to the group ids of demonstrations: no run's own problems are drawn from there."""


def warm_start(
    model: Any,
    task: Task,
    *,
    seed: int = 0,
    steps: int = 400,
    batch: int = 128,
    lr: float = 3e-3,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train `model` (a transformers causal LM in float32 on the CPU) in place on noisy demonstrations of `task`.

    Cross-entropy of the demonstrations' tokens, averaged over a batch; AdamW, `lr` warmed up and then decayed along a
    cosine. The result is a function of (model, task, seed, steps, batch, lr): it runs in one thread, whose number is
    restored, and leaves the global random generators alone. `progress` hears (steps done, steps).
    """
    was_training = model.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    with one_thread():
        model.train()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_factor(step, steps)
            tokens, present, answers = demonstrations(task, seed, step, batch, noise_level(step, steps))
            logits = model(input_ids=tokens, attention_mask=present.long()).logits[:, :-1]
            targets = answers[:, 1:]
            log_probs = logits.gather(2, tokens[:, 1:, None]).squeeze(2) - logits.logsumexp(2)
            loss = -log_probs[targets].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if progress is not None:
                progress(step + 1, steps)
    optimizer.zero_grad()
    model.train(was_training)


def demonstrations(
    task: Task, seed: int, step: int, batch: int, noise: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One batch, padded on the right: tokens int64, present bool, answers bool (what is learnt), all [batch, T]. What
    an environment answers between turns is as it is, and is not learnt."""
    first = DEMONSTRATION_STREAM + step * batch
    problems = [task.problem(first + row, seed) for row in range(batch)]
    random = np.random.Generator(np.random.Philox(key=np.array([seed, first], dtype=np.uint64)))
    clean = [transcript(task, problem) for problem in problems]
    said = [turn[:-1] for parts in clean for turn in parts[::2]]
    characters = np.unique(np.concatenate(said))
    rows, learnt = [], []
    for problem, parts in zip(problems, clean, strict=True):
        noisy = [part if i % 2 else add_noise(part, characters, noise, random) for i, part in enumerate(parts)]
        rows.append(np.concatenate([problem.prompt, *noisy]))
        is_said = [np.full(len(part), i % 2 == 0) for i, part in enumerate(noisy)]
        learnt.append(np.concatenate([np.zeros(len(problem.prompt), np.bool_), *is_said]))
    tokens = pad(rows, task.pad_token)
    present = np.arange(tokens.shape[1]) < np.array([[len(row)] for row in rows])
    answers = pad(learnt, 0).astype(np.bool_)
    return torch.from_numpy(tokens), torch.from_numpy(present), torch.from_numpy(answers)


def add_noise(answer: np.ndarray, characters: np.ndarray, noise: float, random: np.random.Generator) -> np.ndarray:
    """An answer int64 [A] with characters replaced (by any of `characters`), dropped and said twice; the stop stays.

    noise in [0, 1] scales the three probabilities.
    """
    text = answer[:-1]
    text = np.where(random.random(len(text)) < noise * REPLACED, random.choice(characters, size=len(text)), text)
    times = random.choice(3, size=len(text), p=[noise * DROPPED, 1 - noise * (DROPPED + STUTTERED), noise * STUTTERED])
    return np.append(np.repeat(text, times), answer[-1])


def pad(rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """int64 rows of any length -> int64 [rows, longest], filled on the right."""
    padded = np.full((len(rows), max(len(row) for row in rows)), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded


def noise_level(step: int, steps: int) -> float:
    """How much of the noise the demonstrations of a step carry, in [0, 1]."""
    return min(1.0, max(0.0, (step / steps - CLEAN_UNTIL) / (NOISY_FROM - CLEAN_UNTIL)))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear over the first steps, then half a cosine down to 0."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order: the same bits whatever number of threads the process uses otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
