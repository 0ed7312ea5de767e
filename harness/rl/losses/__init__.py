"""Policy losses per token, and what each does about tokens that an older policy sampled.

Every loss takes log_probs, behaviour_log_probs, advantages (float32) and mask (bool), all of one shape, and returns
float32 of that shape, exactly 0 (as is its gradient) where mask is False, whatever stands there. Those of sequences
also take `lengths` (int64 [k]): then all tensors are [R], k sequences one after the other.

Micro-batches back-propagate the SUM of what is returned, weighed by `harness.rl.aggregation`; dividing the gradient
once by the batch's divisor, before clipping and the optimizer step, gives a mean over the batch without knowing its
size in advance (docs/algorithms.md). What looks at a whole batch (`of_batch`) is not the same when a batch is cut.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from harness.config import AlgorithmConfig
from harness.config.plugins import is_path, keywords, named_by
from harness.config.registries import find_function
from harness.rl.losses.ratios import Level, ratio_at

PolicyLoss = Callable[..., torch.Tensor]

TRUNCATING = ("tis", "decoupled_tis", "cispo", "dppo_tv", "dppo_kl")
"""Corrections that bound the weights of tokens that they keep."""

GIVEN = ("lengths", "proximal_log_probs", "entropies")
"""Keyword arguments that training gives to a loss that has them."""


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss that the settings name, with its options. It is called with all of `GIVEN`, float32 [R] but for lengths;
    proximal_log_probs is None where pi as it is now is the policy to stay near. Raises ConfigError for an option that
    it lacks, and for one of the user's that cannot be called as such."""
    name = algorithm.correction
    loss = find_function("algorithm.correction", name)
    options = keywords(loss, named_by(loss, algorithm.options), "algorithm.options", name, given=GIVEN)
    wanted = [given for given in GIVEN if given in inspect.signature(loss).parameters]

    def called(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        """The loss, where the mask is; a user's own may say anything off the mask."""
        mask = tensors[3]
        per_token = loss(*tensors, **options, **{name: given.get(name) for name in wanted})
        if per_token.shape != mask.shape:
            raise ValueError(f"the loss must be {list(mask.shape)}, not {list(per_token.shape)}")
        return per_token.masked_fill(~mask, 0.0) if is_path(name) else per_token

    return called


def token_gradients(losses: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Gradient of the sum of losses by each log-prob that they were made of: what the correction makes of a token.
    Leaves their graph as it was."""
    (gradients,) = torch.autograd.grad(losses.sum(), log_probs, retain_graph=True)
    return gradients


def unbounded_weights(
    algorithm: AlgorithmConfig,
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor | None:
    """Weights of tokens by a correction that truncates weights, without its bounds; None for another one, and where
    they are a response's by a proximal policy, which is not given here."""
    level: Level = algorithm.options.get("level", "token")
    if algorithm.correction not in TRUNCATING or (algorithm.correction == "decoupled_tis" and level != "token"):
        return None
    return ratio_at(level, log_probs.detach(), behaviour_log_probs, mask, lengths)


def clip_bounds(algorithm: AlgorithmConfig) -> dict[str, float]:
    """The bounds of `policy/clip_fraction`: `clip_low` and `clip_high`, where the loss is given them."""
    given = named_by(find_function("algorithm.correction", algorithm.correction), algorithm.options)
    return {name: float(value) for name, value in given.items() if name in ("clip_low", "clip_high")}
