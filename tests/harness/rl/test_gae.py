"""Advantages from values, and the loss of values; verl's functions are held against them in tests/oracle."""

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.rl.token_advantages import gae, gae_of
from harness.rl.value_loss import value_losses, value_metrics, value_sums

LENGTHS = torch.tensor([3, 4, 1])
MASK = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
REWARDS = torch.tensor([1.0, 0.5, 0.0])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0, 0.6, 9.0, 0.2])


def algorithm(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, advantage="gae", **settings)  # type: ignore[arg-type]


def test_an_advantage_is_reward_less_value_or_the_error_of_one_step() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, LENGTHS)
    torch.testing.assert_close(advantages, torch.tensor([0.9, 0.8, 0.7, 0.1, 0.0, -0.1, 0.0, -0.2]))
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.5, 0.0, 0.0]))
    advantages, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.0)
    expected = [0.5 * 0.2 - 0.1, 0.5 * 0.3 - 0.2, 1.0 - 0.3, 0.5 * 0.6 - 0.4, 0.0, 0.5 - 0.6, 0.0, -0.2]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_costs_are_taken_off_and_what_an_environment_wrote_changes_nothing() -> None:
    costs = torch.tensor([0.1, 0.2, 0.3, 0.0, 5.0, 0.4, 5.0, 0.5])
    advantages, _ = gae(REWARDS, VALUES, MASK, LENGTHS, costs, gamma=0.5, lam=0.0)
    expected, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.0)
    torch.testing.assert_close(advantages, (expected - costs).masked_fill(~MASK, 0.0))
    together, _ = gae(REWARDS, VALUES, MASK, LENGTHS, costs)
    whole = torch.tensor([0.6, 0.4, 0.5])
    first = REWARDS - whole  # without discount
    torch.testing.assert_close(together[[0, 3, 7]], first - VALUES[[0, 3, 7]])
    # Not even where its values are no numbers.
    odd = VALUES.masked_fill(~MASK, torch.nan)
    for one, other in zip(
        gae(REWARDS, odd, MASK, LENGTHS, lam=0.9), gae(REWARDS, VALUES, MASK, LENGTHS, lam=0.9), strict=True
    ):
        assert torch.equal(one, other)


def test_advantages_are_whitened_over_sampled_tokens_alone_and_do_not_depend_on_others() -> None:
    together, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.9, lam=0.8)
    alone, _ = gae(REWARDS[1:2], VALUES[3:7], MASK[3:7], LENGTHS[1:2], gamma=0.9, lam=0.8)
    assert torch.equal(together[3:7], alone)
    advantages, returns = gae_of(algorithm())(REWARDS, VALUES, MASK, LENGTHS)
    plain, expected = gae_of(algorithm(normalise_std=False))(REWARDS, VALUES, MASK, LENGTHS)
    torch.testing.assert_close(advantages[MASK].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages[MASK].std(), torch.tensor(1.0))
    assert advantages[~MASK].eq(0).all() and torch.equal(returns, expected) and not torch.equal(plain, advantages)
    with pytest.raises(ConfigError, match=r"algorithm\.options\.lam"):
        gae_of(algorithm(options={"lam": 1.5}))


def test_values_clip_their_gradient_and_sum_to_metrics() -> None:
    predictions = torch.tensor([0.0, 2.0, 0.1], requires_grad=True)
    values, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    losses = value_losses(predictions, values, returns, torch.tensor([True, True, False]), clip=0.5)
    torch.testing.assert_close(losses.detach(), torch.tensor([0.5, 0.5, 0.0]))
    moved = torch.tensor([0.8], requires_grad=True)  # on the way to its return, beyond the clip
    (gradient,) = torch.autograd.grad(value_losses(moved, values[:1], returns[:1], MASK[:1], clip=0.5).sum(), moved)
    assert gradient == 0.0
    (gradient,) = torch.autograd.grad(value_losses(moved, values[:1], returns[:1], MASK[:1], clip=None).sum(), moved)
    torch.testing.assert_close(gradient, torch.tensor([-0.2]))
    returns = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    sums = value_sums(VALUES, VALUES, returns, MASK, clip=0.5) | {"samples": 3.0, "lag": 6.0, "lag_max": 4.0}
    metrics = value_metrics(sums)
    kept = returns[MASK]
    assert metrics["critic/explained_variance"] == pytest.approx(
        float(1 - (kept - VALUES[MASK]).var() / kept.var()), abs=1e-6
    )
    assert metrics["critic/loss"] == pytest.approx(float((kept - VALUES[MASK]).square().mean() / 2))
    assert metrics["critic/lag"] == 2.0 and metrics["critic/clip_fraction"] == 0.0
