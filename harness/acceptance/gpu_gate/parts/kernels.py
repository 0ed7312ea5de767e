"""Computations on the device, against the same formula in float64 on the CPU.

Tolerances: in float32 a log-probability may be off by 1e-4, a gradient by 1e-4 of its norm. In bfloat16, which has 8
bits, by .1 and 5 %: float64 starts from the same rounded numbers, so that what is left is the rounding in between."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from engines.torch.model import build_model
from engines.torch.packing import flash_attention_3
from engines.torch.sampling import draw, uniforms
from engines.torch.scoring import TorchLogProb
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import SMALL, exact_products, random_rows
from harness.acceptance.gpu_gate.results import Check
from harness.config import AlgorithmConfig, Layout, ModelConfig, TrainingConfig
from harness.config.registries import CORRECTIONS
from harness.protocols import Sampling
from harness.rl.kl import k3
from harness.rl.log_probs import head_log_probs
from harness.rl.losses import policy_loss

_LOG_PROB = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of its norm


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of draws, output layers, layouts and losses."""
    exact_products()
    device = setting.device
    for sampling in (Sampling(1), Sampling(1, temperature=0.7), Sampling(1, top_p=0.9), Sampling(1, temperature=0.0)):
        yield _sampling(device, sampling)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _head(device, dtype)
    yield _layouts(device, SMALL)
    yield _layouts(device, replace(SMALL, dtype="bfloat16"))
    for correction in sorted(CORRECTIONS):
        yield _loss(device, correction)


def _sampling(device: torch.device, sampling: Sampling) -> Check:
    """Draws with the same uniforms. A uniform that lies on the border of two tokens may fall to either: so a draw in a
    thousand may differ, and those that agree have to have the same log-probability."""
    logits = 3 * torch.randn(2000, 500, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(np.concatenate([uniforms(0, sample, 1) for sample in range(len(logits))]))
    expected, expected_log_probs = _exact_draw(logits.double(), uniform, sampling)
    tokens, log_probs = draw(logits.to(device), uniform.to(device), sampling)
    same = tokens.cpu() == expected
    error = float((log_probs.cpu() - expected_log_probs)[same].abs().max())
    name = f"draws at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    share = float(same.double().mean())
    return Check(name, f"{share:.2%} the same, log-probs off by {error:.1e}", share >= 0.999 and error < 1e-4)


def _exact_draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs by the definition, in float64: inverse of the cumulative distribution, by vocabulary."""
    if sampling.temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits))
    share = torch.softmax(logits / sampling.temperature, -1)
    likely, order = share.sort(dim=-1, descending=True)
    beyond = likely.cumsum(-1) - likely >= sampling.top_p
    share = share.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    share = share / share.sum(-1, keepdim=True)
    tokens = (share.cumsum(-1) <= uniform[:, None]).sum(-1).clamp_(max=logits.shape[-1] - 1)
    return tokens, share.gather(-1, tokens[:, None])[:, 0].log()


def _head(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 128, generator=generator).to(dtype)
    weight = (torch.randn(5000, 128, generator=generator) / 8).to(dtype)
    tokens = torch.randint(5000, (300,), generator=generator)
    upstream = torch.randn(300, generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.log_softmax(exact[0] @ exact[1].T, -1).gather(1, tokens[:, None])[:, 0]
    (expected * upstream.double()).sum().backward()
    for float32 in [False, True] if dtype != torch.float32 else [False]:
        given = [tensor.to(device, copy=True).requires_grad_() for tensor in (hidden, weight)]
        found, _ = head_log_probs(given[0], given[1], tokens.to(device), float32=float32)
        (found * upstream.to(device)).sum().backward()
        error = float((found.detach().cpu() - expected.detach()).abs().max())
        of = [_relative(ours.grad, theirs.grad) for ours, theirs in zip(given, exact, strict=True)]
        allowed = 1e-3 if float32 else _LOG_PROB[dtype]
        yield Check(
            f"head_log_probs in {str(dtype).removeprefix('torch.')}{', logits in float32' if float32 else ''}",
            f"off by {error:.1e} (at most {allowed:g}), gradients by {max(of):.1e} (at most {_GRADIENT[dtype]:g})",
            error < allowed and max(of) < _GRADIENT[dtype],
        )


def _relative(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    assert ours is not None and theirs is not None
    return float((ours.cpu().double() - theirs).norm() / theirs.norm())


def _layouts(device: torch.device, config: ModelConfig) -> Check:
    """A model's log-probabilities, packed and padded on the device, against padded ones of the CPU in float32."""
    rng = np.random.default_rng(0)
    prompts = random_rows(config.vocabulary, rng.integers(1, 40, 12))
    responses = random_rows(config.vocabulary, rng.integers(1, 200, 12), seed=1)

    def scored(model: PreTrainedModel, where: torch.device, layout: Layout) -> np.ndarray:
        engine = TorchLogProb(model, temperature=1.0, device=where, training=TrainingConfig(layout=layout))
        return asyncio.run(engine.log_probs(prompts, responses)).values

    exact = scored(build_model(config).float(), torch.device("cpu"), "padded")
    layouts: tuple[Layout, ...] = ("packed", "padded")
    errors = {layout: float(np.abs(scored(build_model(config), device, layout) - exact).max()) for layout in layouts}
    allowed = 1e-3 if config.dtype == "float32" else _LOG_PROB[torch.bfloat16]
    said = ", ".join(f"{layout} off by {error:.1e}" for layout, error in errors.items())
    flash = device.type == "cuda" and config.dtype != "float32" and flash_attention_3(device) is not None
    name = f"attention in {config.dtype}{', packed by FlashAttention 3' if flash else ''}"
    return Check(name, f"{said} (at most {allowed:g})", max(errors.values()) < allowed)


def _loss(device: torch.device, correction: str) -> Check:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((64,), 200)
    log_probs = -3.4 + 0.3 * torch.randn(64 * 200, generator=generator)
    behaviour = log_probs + 0.2 * torch.randn(64 * 200, generator=generator)
    advantages = torch.randn(64, generator=generator).repeat_interleave(lengths)
    mask, entropies = torch.rand(64 * 200, generator=generator) < 0.7, -log_probs
    loss = policy_loss(AlgorithmConfig("gate", 8, 8, 8, learning_rate=0.0, correction=correction))
    found = []
    for where, dtype in ((torch.device("cpu"), torch.float64), (device, torch.float32)):
        leaf = log_probs.to(where, dtype).requires_grad_()
        others = [behaviour.to(where, dtype), advantages.to(where, dtype), mask.to(where)]
        losses = loss(leaf, *others, lengths=lengths.to(where), entropies=entropies.to(where, dtype))
        losses = losses + 0.1 * k3(leaf, others[0], others[2])
        losses.sum().backward()
        found.append((losses.detach(), leaf.grad))
    (exact, exact_gradient), (ours, gradient) = found
    errors = _relative(ours, exact), _relative(gradient, exact_gradient)
    said = f"off by {errors[0]:.1e} of its norm, its gradient by {errors[1]:.1e} (at most 1e-4)"
    return Check(f"the loss {correction}", said, max(errors) < 1e-4)
