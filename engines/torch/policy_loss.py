"""The loss of a policy on one part of a micro-batch, by the settings of its algorithm."""

import numpy as np
import torch

from engines.torch.scoring import Scores
from harness.config import AlgorithmConfig
from harness.protocols import TrainBatch
from harness.rl.aggregation import LossSum
from harness.rl.diagnostics import diagnostics
from harness.rl.kl import loss_kl_of
from harness.rl.losses import clip_bounds, policy_loss, token_gradients, unbounded_weights
from harness.rl.losses.ratios import log_linear
from harness.rl.rejection import rejection_of


class PolicyLoss:
    """The loss that the settings name, with what is rejected, its KL term and its entropy term."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Raises ConfigError for names and options that are none."""
        self._algorithm, self._loss = algorithm, policy_loss(algorithm)
        self._rejection, self._kl = rejection_of(algorithm), loss_kl_of(algorithm)

    def __call__(self, found: Scores, batch: TrainBatch, aggregated: LossSum) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of a part, float32 [], differentiable in what was found, and the sums of its diagnostics."""
        algorithm, lengths = self._algorithm, batch.responses.lengths
        log_probs, entropies, _ = found

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(log_probs.device)

        mask = torch.ones_like(log_probs, dtype=torch.bool) if batch.mask is None else there(batch.mask.values)
        behaviour = there(batch.behaviour_log_probs.values)
        advantages = there(batch.advantages_of_tokens)
        old = None if batch.old_log_probs is None else there(batch.old_log_probs.values)
        frozen = None if batch.proximal_log_probs is None else there(batch.proximal_log_probs.values)
        proximal = {"proximal_log_probs": old if algorithm.train_on_old_log_probs else frozen}
        if algorithm.proximal == "log_linear":
            lags = torch.zeros_like(behaviour) if batch.lags is None else there(batch.lags.values)
            proximal = {"proximal_log_probs": log_linear(log_probs, behaviour, lags)}
        rows = there(lengths)
        kept = mask if self._rejection is None else self._rejection(log_probs.detach(), behaviour, mask, rows)
        given = {"lengths": rows, "entropies": entropies.detach(), **proximal}
        losses = self._loss(log_probs, behaviour, advantages, kept, **given)
        gradients = token_gradients(losses, log_probs)
        reference = None if batch.ref_log_probs is None else there(batch.ref_log_probs.values)
        if self._kl is not None and reference is not None:
            losses = losses + self._kl(log_probs, behaviour, reference, kept)
        if algorithm.entropy_coef > 0:
            losses = losses - algorithm.entropy_coef * entropies.masked_fill(~kept, 0.0)
        loss = aggregated(losses, kept, rows)
        same_version = None
        if batch.old_versions is not None:
            same_version = there(batch.versions.values == np.repeat(batch.old_versions, lengths))
        rejected = {} if self._rejection is None else {"rejected": float((mask & ~kept).sum())}
        return loss, rejected | diagnostics(
            log_probs.detach(),
            behaviour,
            advantages,
            mask,
            **clip_bounds(algorithm),
            entropies=entropies.detach(),
            reference_log_probs=reference,
            old_log_probs=old,
            same_version=same_version,
            gradients=gradients,
            unbounded=unbounded_weights(algorithm, log_probs, behaviour, mask, rows),
        )
