"""The KL to the reference as part of the reward (`algorithm.kl_in=reward`), with a coefficient that is fixed or follows
a target."""

from __future__ import annotations

import torch

from harness.config import AlgorithmConfig
from harness.rl.kl import estimator_of
from harness.rl.losses.ratios import sequence_mean, sequence_sum

_MOST_ERROR = 0.2


class RewardKL:
    """The cost of the KL to the reference, token by token: beta KL_t, which is taken off the rewards.

    The KL is estimated by `algorithm.kl` from the log-probabilities with which the tokens were sampled, the behaviour
    policy's: Ziegler et al. (arXiv 1909.08593), equation 2. Without `algorithm.kl_target` beta stays
    `algorithm.kl_coef`. With one, each call is taken for a batch, and sets beta for the next one: calls have to be made
    batch by batch, in order.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.coefficient = algorithm.kl_coef
        self._estimate, self._target, self._horizon = (
            estimator_of(algorithm.kl),
            algorithm.kl_target,
            algorithm.kl_horizon,
        )

    def __call__(
        self, log_probs: torch.Tensor, reference_log_probs: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Log-probs float32 [R] and mask bool [R], one response after the other, of lengths int64 [k]. Returns costs,
        float32 [R], 0 where the mask is False."""
        per_token = self._estimate(log_probs, reference_log_probs, mask)
        costs = self.coefficient * per_token
        if self._target is not None:
            mean = float(sequence_mean(per_token.double(), mask, lengths).mean())
            self.coefficient = adapted(self.coefficient, mean, len(lengths), self._target, self._horizon)
        return costs


def less_costs(rewards: torch.Tensor, costs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rewards float64 [groups, n], each without what all of its response's tokens cost, float32 [R] of lengths
    int64 [groups n]."""
    return rewards - sequence_sum(costs, lengths).view_as(rewards)


def adapted(coefficient: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """The coefficient after a batch of so many samples, whose mean KL per token was `kl` (nats): larger by
    samples / horizon times the relative error of the KL, which counts as .2 at most.

    Ziegler et al. (arXiv 1909.08593), section 2.2; the mean of a response's tokens, then of responses, as in verl.
    """
    error = min(max(kl / target - 1.0, -_MOST_ERROR), _MOST_ERROR)
    return coefficient * (1.0 + error * samples / horizon)


def reward_kl_of(algorithm: AlgorithmConfig) -> RewardKL | None:
    """None where no KL is part of the reward."""
    return RewardKL(algorithm) if algorithm.has_reward_kl else None
