"""The embedded engine: what it samples greedily on the device is what it samples on the CPU; and tokens a second."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from engines.torch.model import build_model
from engines.torch.rollout import TorchRollout
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import QWEN_HALF_B, SMALL, exact_products, per_second, predicted
from harness.acceptance.gpu_gate.results import Check, Figure
from harness.calibration.profile.timing import wait_for
from harness.config import ModelConfig
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock

_PROMPTS = 24


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of sampling, of sleeping, and of tokens a second."""
    exact_products()
    device = setting.device
    yield _greedy(device)
    yield _asleep(device)
    model, new = (QWEN_HALF_B, 256) if setting.gpu else (SMALL, 64)
    for slots in (64, 256) if setting.gpu else (16,):
        yield _speed(model, slots, new, device)


def _greedy(device: torch.device) -> Check:
    """Float32 on both, the CPU's without a cache: the whole sequence again for every token. Where two tokens are as
    likely but for rounding, either may come."""
    engine = _engine(SMALL, slots=8, max_tokens=24, temperature=0.0, device=device)
    asked = _prompts(SMALL, _PROMPTS)
    done = _generate(engine, asked)
    model = build_model(SMALL)
    wrong, worst = 0, 0.0
    for prompt, completion in zip(asked, done, strict=True):
        sequence = torch.from_numpy(np.concatenate([prompt, completion.tokens]))
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, sequence[len(prompt) :, None])[:, 0]
        short = float((logits.max(-1).values - chosen).max())
        worst, wrong = max(worst, short), wrong + (short > 1e-3)
    said = f"{_PROMPTS} responses of 24 tokens, {wrong} others; a chosen logit is at most {worst:.1e} below the best"
    return Check("greedy, against a forward of the CPU", said, wrong == 0)


def _asleep(device: torch.device) -> Check:
    """Asleep it gives its memory back; awake it samples the same again."""
    engine = _engine(SMALL, slots=8, max_tokens=8, temperature=1.0, device=device)
    first = [done.tokens.tolist() for done in _generate(engine, _prompts(SMALL, 8))]
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    asyncio.run(engine.sleep())
    freed = before - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    asyncio.run(engine.wake())
    second = [done.tokens.tolist() for done in _generate(engine, _prompts(SMALL, 8))]
    weights = sum(parameter.nbytes for parameter in build_model(SMALL).parameters())
    said = f"{freed / 1e6:.0f} MB of the device freed, " if device.type == "cuda" else ""
    fine = first == second and (device.type == "cpu" or freed >= weights)
    return Check("asleep and awake", f"{said}{'the same' if first == second else 'other'} samples after it", fine)


def _speed(model: ModelConfig, slots: int, new: int, device: torch.device) -> Check:
    engine = _engine(model, slots=slots, max_tokens=new, temperature=1.0, device=device)
    _generate(engine, _prompts(model, slots))  # not counted
    wait_for(device)
    start = time.perf_counter()
    done = _generate(engine, _prompts(model, 2 * slots))
    wait_for(device)
    seconds = time.perf_counter() - start
    tokens = sum(len(completion.tokens) for completion in done)
    sane = all(np.isfinite(completion.log_probs).all() and (completion.log_probs <= 0).all() for completion in done)
    name = f"{model.name} in {model.dtype}, {2 * slots} samples over {slots} slots"
    figure = Figure(f"decoding of {model.name}, {slots} slots", tokens / seconds, "token/s")
    costs = predicted(device.type, model)
    if costs is not None:
        step_s = costs.decode_step_s + max(costs.decode_weights_s, slots * costs.decode_step_s_per_sample)
        figure = replace(figure, model=slots / step_s)
    return Check(name, per_second(tokens, seconds, "token"), sane and tokens == 2 * slots * new, (figure,))


def _engine(
    model: ModelConfig, *, slots: int, max_tokens: int, temperature: float, device: torch.device
) -> TorchRollout:
    policy = build_model(model)
    policy.config.max_position_embeddings = 32 + max_tokens
    return TorchRollout(
        policy,
        sampling=Sampling(max_tokens, temperature=temperature),
        slots=slots,
        seed=0,
        clock=RealClock.starting_now(),
        device=device,
    )


def _prompts(model: ModelConfig, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, model.vocabulary, rng.integers(2, 30)) for _ in range(count)]


def _generate(engine: TorchRollout, asked: list[np.ndarray]) -> list[Completion]:
    async def run() -> list[Completion]:
        engine.submit([Request(number, prompt) for number, prompt in enumerate(asked)])
        done: list[Completion] = []
        while len(done) < len(asked):
            done += await engine.finished()
        return sorted(done, key=lambda completion: completion.sample_id)

    return asyncio.run(run())
