"""What an engine is compared with: plain transformers forwards of small random models, and textbook sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from engines.torch.model import build_model
from harness.config import ModelConfig
from harness.protocols import Completion, Sampling

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

VOCABULARY = 96  # not a multiple of 64: engines that pad it must not sample the padding
MAX_LENGTH = 256
TOLERANCE = 1e-4
"""Of a log-probability, between an engine and a forward of the same weights in float32."""

_CONFIG = {tied: ModelConfig("contract", 64, 2, 4, 2, 32, 128, VOCABULARY, tied, MAX_LENGTH) for tied in (True, False)}


@lru_cache(maxsize=32)
def reference_model(seed: int, tied: bool) -> Qwen3ForCausalLM:
    """The weights of one version. To be read only: it is shared."""
    return make_model(seed, tied)


def make_model(seed: int, tied: bool) -> Qwen3ForCausalLM:
    """Two layers in which every weight depends on the seed, norms too, and whose logits have a spread of about two:
    neither a flat distribution, under which every model is right, nor one that leaves no choice."""
    model = build_model(_CONFIG[tied], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_((0.25 if name in ("lm_head.weight", "model.embed_tokens.weight") else 0.12) * noise)
    return model


def weights_of(model: Qwen3ForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """As the trainer sends them: tied weights once."""
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


@torch.no_grad()
def logits_of(model: Qwen3ForCausalLM, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """Logits that each response token was chosen from, by one forward pass: float64 [L, vocabulary]."""
    sequence = torch.from_numpy(np.concatenate([prompt, tokens]))
    return model(sequence[None]).logits[0, len(prompt) - 1 : -1].double()


def log_probs_of(
    model: Qwen3ForCausalLM, prompt: np.ndarray, tokens: np.ndarray, sampling: Sampling | None = None
) -> np.ndarray:
    """Log-probabilities of the response under the distribution that `sampling` draws from: float64 [L]."""
    distribution = distribution_of(logits_of(model, prompt, tokens), sampling or Sampling(max_tokens=1))
    return distribution.gather(-1, torch.from_numpy(tokens)[:, None])[:, 0].numpy()


def distribution_of(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of all tokens: softmax(logits / temperature), restricted to the smallest set of most likely
    tokens that holds top_p, and renormalised. float64 [L, vocabulary]."""
    log_probs = torch.log_softmax(logits / sampling.temperature, -1)
    ordered, order = log_probs.exp().sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= sampling.top_p
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return torch.log_softmax(log_probs.masked_fill(outside, -torch.inf), -1)


def assert_greedy(model: Qwen3ForCausalLM, prompt: np.ndarray, completion: Completion) -> None:
    """Each token is the likeliest one after those before it. Which of two is likelier, if they are so by less than
    TOLERANCE, depends on the order in which an engine adds."""
    assert len(completion.tokens), f"sample {completion.sample_id} has no token"
    logits = logits_of(model, prompt, completion.tokens)
    chosen = logits.gather(-1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
    best = logits.max(-1)
    wrong = torch.nonzero(best.values - chosen > TOLERANCE)[:, 0].tolist()
    assert not wrong, (
        f"sample {completion.sample_id}: token {wrong[0]} is {completion.tokens[wrong[0]]}, a transformers forward of "
        f"version {completion.versions[wrong[0]]} says {best.indices[wrong[0]]}; {len(wrong)} of {len(logits)} tokens "
        "differ"
    )
