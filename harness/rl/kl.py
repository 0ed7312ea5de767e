"""KL of the policy in training to another, estimated per token from tokens that it sampled itself.

Each takes log_probs, other_log_probs (float32) and mask (bool) of one shape, and returns float32 of that shape, 0 off
the mask. It is part of the loss, or, with a coefficient that is fixed or follows a target, of the reward
(`algorithm.kl_in=reward`). The estimators are Schulman's ("Approximating KL divergence", 2020).
"""

from collections.abc import Callable

import torch

from harness.config import AlgorithmConfig
from harness.config.registries import find_function
from harness.rl.losses.ratios import MAX_LOG_RATIO, log_ratio, policy_ratio, sequence_mean, sequence_sum

Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def k1(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi - log other: unbiased, of either sign. Its gradient says nothing of the KL: use it in rewards."""
    return log_ratio(log_probs, other_log_probs, mask)


def k2(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Half the square of that: biased, and its gradient in expectation is the KL's."""
    return 0.5 * log_ratio(log_probs, other_log_probs, mask).square()


def k3(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = log other - log pi: unbiased and never negative; GRPO's penalty, DeepSeekMath
    (arXiv 2402.03300), equation 4."""
    difference = log_ratio(other_log_probs, log_probs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def absolute(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|log pi - log other|."""
    return log_ratio(log_probs, other_log_probs, mask).abs()


def _with_gradient_of_k2(value: Estimator) -> Estimator:
    """The value of one, the gradient of k2 ("straight through")."""

    def estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gradient = k2(log_probs, other_log_probs, mask)
        return gradient - gradient.detach() + value(log_probs, other_log_probs, mask).detach()

    return estimate


k1_straight_through = _with_gradient_of_k2(k1)
k3_straight_through = _with_gradient_of_k2(k3)


def estimator_of(name: str) -> Estimator:
    """The estimator of this name, or the user's own by import path. Raises ConfigError where it cannot be called as
    such."""
    return find_function("algorithm.kl", name)


def loss_kl_of(algorithm: AlgorithmConfig) -> Callable[..., torch.Tensor] | None:
    """The KL to the reference as part of the loss, its coefficient included; None where there is none. It takes
    log_probs, behaviour_log_probs, reference_log_probs and mask.

    With `kl_unbiased` each token's estimate is weighed by pi / mu, through which it has a gradient, too: on tokens of
    mu the mean is then the KL, and the gradient that of the KL (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; TRL's
    use_bias_correction_kl). Raises ConfigError as `estimator_of`.
    """
    if not algorithm.has_loss_kl:
        return None
    estimate, coefficient, unbiased = estimator_of(algorithm.kl), algorithm.kl_coef, algorithm.kl_unbiased

    def loss_kl(
        log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        kl = coefficient * estimate(log_probs, reference, mask)
        return kl * policy_ratio(log_probs, behaviour_log_probs, mask) if unbiased else kl

    return loss_kl


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
