"""Times of the embedded rollout engine: decode steps, prefill, and taking new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from engines.torch.kv_slots import SlotModel
from engines.torch.rollout import TorchRollout
from harness.cost_model.profile.grid import Sizes
from harness.cost_model.profile.rows import Row
from harness.cost_model.profile.stopwatch import Stopwatch
from harness.protocols import Request, Sampling
from harness.runtime.runtime import RealClock

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def time_decode(model: Qwen3ForCausalLM, sizes: Sizes, watch: Stopwatch) -> Iterator[Row]:
    """Steps of an engine that is full of samples with so many tokens each; sampling included."""
    for samples, length in sizes:
        steps = watch.calls + 1
        engine = _engine(model, samples, length + steps, steps, watch.device)
        prompts = _tokens(model, samples, length)
        engine.submit([Request(number, prompt) for number, prompt in enumerate(prompts)])
        engine.step()  # prefills
        seconds, spread = watch.time(engine.step)
        yield Row("decode", _layers(model), samples, length + steps // 2, 0, seconds, spread)
        asyncio.run(engine.close())


def time_prefill(model: Qwen3ForCausalLM, sizes: Sizes, watch: Stopwatch) -> Iterator[Row]:
    """Filling the slots of so many samples with so many tokens each."""
    for samples, length in sizes:
        model.config.max_position_embeddings = length
        cache = SlotModel(model, samples)
        contexts = [(slot, prompt.tolist()) for slot, prompt in enumerate(_tokens(model, samples, length))]
        seconds, spread = watch.time(lambda cache=cache, contexts=contexts: cache.prefill(contexts))  # type: ignore[misc]
        yield Row("prefill", _layers(model), samples, length, 0, seconds, spread)


def time_weights(model: Qwen3ForCausalLM, watch: Stopwatch) -> Iterator[Row]:
    """New weights from the host's memory into an idle engine; and the engine's weights to the host, and back."""
    engine = _engine(model, 1, 32, 1, watch.device)
    there = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    size = sum(tensor.nbytes for tensor in there.values())
    with asyncio.Runner() as loop:
        calls = {
            "load": (lambda: loop.run(engine.load_weights(1, there.items())), lambda: None),
            "sleep": (lambda: loop.run(engine.sleep()), lambda: loop.run(engine.wake())),
            "wake": (lambda: loop.run(engine.wake()), lambda: loop.run(engine.sleep())),
        }
        for phase, (work, before) in calls.items():
            seconds, spread = watch.time(work, before)
            yield Row(phase, _layers(model), 0, 0, size, seconds, spread)  # type: ignore[arg-type]
        loop.run(engine.close())


def _engine(model: Qwen3ForCausalLM, slots: int, length: int, max_tokens: int, device: torch.device) -> TorchRollout:
    """An engine whose cache holds `length` tokens of each slot, and no more."""
    model.config.max_position_embeddings = length
    sampling = Sampling(max_tokens)
    return TorchRollout(model, sampling=sampling, slots=slots, seed=0, clock=RealClock.starting_now(), device=device)


def _tokens(model: Qwen3ForCausalLM, samples: int, length: int) -> np.ndarray:
    """int64 [samples, length]."""
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (samples, length))


def _layers(model: Qwen3ForCausalLM) -> int:
    return model.config.num_hidden_layers
