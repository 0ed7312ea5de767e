"""What verl and TRL lack, against float64 NumPy written from the published formula: value and gradient.

Sources whose packages cannot be installed beside ours are named with the file that has the formula: slime, AReaL and
prime-rl. Gradients are by hand. What is compared runs in float64, too: formulas, not rounding. No package is needed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.rl.advantages import advantages_of
from harness.rl.filters import filter_of
from harness.rl.losses import policy_loss
from harness.rl.losses.ratios import log_linear
from harness.rl.rejection import rejection_of
from harness.rl.shaping import shaping_of
from tests.support.policy_batches import NUMBERS, RANDOM, Case, algorithm

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
CUT_OFF = 20.0  # of log-ratios, here; none of the sources has one
Arrays = tuple[np.ndarray, np.ndarray]


class Batch:
    """A case in float64. away: log pi - log mu, what is cut off of it, and 0 off the mask."""

    def __init__(self, number: int) -> None:
        self.case = case = Case(number)
        self.log_pi, self.log_mu, self.advantages = (
            each.double().numpy() for each in (case.log_probs, case.behaviour, case.advantages)
        )
        self.mask = case.mask.numpy()
        self.raw = np.where(self.mask, self.log_pi - self.log_mu, 0.0)
        self.away = np.clip(self.raw, -CUT_OFF, CUT_OFF)

    def of_sequence(self, values: np.ndarray, reduce: Callable[[np.ndarray], float]) -> np.ndarray:
        """reduce(its values on the mask), at every token of each response."""
        out = np.empty_like(values)
        for place in self.case.sequences():
            out[place] = reduce(values[place][self.mask[place]])
        return out


def ppo(away: np.ndarray, advantages: np.ndarray, kept: np.ndarray, raw: np.ndarray) -> Arrays:
    """Loss of each token and its derivative by log pi, with bounds .8 and 1.2 (PPO, equation 7)."""
    ratio = np.exp(away)
    plain, bounded = -ratio * advantages, -np.clip(ratio, 0.8, 1.2) * advantages
    slope = np.where((plain < bounded) | (np.abs(raw) > CUT_OFF), 0.0, -ratio * advantages)
    return np.where(kept, np.maximum(plain, bounded), 0.0), np.where(kept, slope, 0.0)


def opsm(batch: Batch) -> Arrays:
    """slime, slime/utils/ppo_utils.py, compute_opsm_mask and compute_policy_loss; DeepSeek-V3.2, section 3.1."""
    far = batch.of_sequence(-batch.raw, np.mean) > 0.05
    return ppo(batch.away, batch.advantages, batch.mask & ~(far & (batch.advantages < 0)), batch.raw)


def m2po(batch: Batch) -> Arrays:
    """AReaL, areal/trainer/ppo/actor.py, _get_m2po_loss_mask; M2PO, algorithm 1: the farthest token goes, one after
    the other. AReaL measures the proximal policy, here it is the policy in training."""
    farthest_last = sorted(np.flatnonzero(batch.mask), key=lambda token: abs(batch.raw[token]))
    while len(farthest_last) > 1 and np.mean(batch.raw[farthest_last] ** 2) >= 0.04:
        farthest_last.pop()
    kept = np.zeros_like(batch.mask)
    kept[farthest_last] = True
    return ppo(batch.away, batch.advantages, kept, batch.raw)


def weighted(batch: Batch, weights: np.ndarray) -> Arrays:
    """-w A log pi with constant weights."""
    slope = np.where(batch.mask, -weights * batch.advantages, 0.0)
    return slope * batch.log_pi, slope


def geometric(batch: Batch) -> np.ndarray:
    return np.exp(np.clip(batch.of_sequence(batch.raw, np.mean), -CUT_OFF, CUT_OFF))


def tis_geometric(batch: Batch) -> Arrays:
    """AReaL, areal/utils/functional/functional.py, apply_rejection_sampling: level sequence, metric ratio, clamp."""
    return weighted(batch, np.minimum(geometric(batch), 2.0))


def mis_geometric(batch: Batch) -> Arrays:
    """The same, action mask; what is masked still counts in the denominator, there as here."""
    weights = geometric(batch)
    return weighted(batch, np.where((weights >= 0.5) & (weights <= 5.0), weights, 0.0))


def tis_normalised_geometric(batch: Batch) -> Arrays:
    """Owen (2013), section 9.2, of sequences."""
    weights = np.minimum(geometric(batch), 2.0)
    first = [place.start for place in batch.case.sequences()]
    return weighted(batch, weights / max(np.mean(weights[first]), 1e-8))


def topr(batch: Batch) -> Arrays:
    """TOPR (arXiv 2503.14286), equation 8, with the sign of the advantage; ROLL's, of tokens, is
    roll/pipeline/agentic/agentic_actor_pg_worker.py, _compute_topr_loss."""
    whole = np.exp(np.clip(batch.of_sequence(batch.raw, np.sum), -CUT_OFF, CUT_OFF))
    return weighted(batch, np.where(batch.advantages > 0, 1.0, np.clip(whole, 0.0, 1.0)))


LOSSES: dict[str, tuple[dict[str, Any], Callable[[Batch], Arrays]]] = {
    "topr": ({"correction": "topr"}, topr),
    "opsm": ({"correction": "opsm", "options": {"most_kl": 0.05}}, opsm),
    "m2po": ({"correction": "m2po"}, m2po),
    "tis, geometric": ({"correction": "tis", "options": {"level": "geometric"}}, tis_geometric),
    "mis, geometric": ({"correction": "mis", "options": {"level": "geometric"}}, mis_geometric),
    "tis_normalised, geometric": (
        {"correction": "tis_normalised", "options": {"level": "geometric"}},
        tis_normalised_geometric,
    ),
}


def compare(batch: Batch, settings: dict[str, Any], expected: Arrays, **given: Any) -> None:
    log_probs = torch.from_numpy(batch.log_pi).requires_grad_()
    tensors = (torch.from_numpy(batch.log_mu), torch.from_numpy(batch.advantages), batch.case.mask)
    losses = policy_loss(algorithm(**settings))(log_probs, *tensors, lengths=batch.case.lengths, **given)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    torch.testing.assert_close(losses.detach(), torch.from_numpy(expected[0]), **TOLERANCE)
    torch.testing.assert_close(gradient, torch.from_numpy(expected[1]), **TOLERANCE)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_its_formula(name: str) -> None:
    settings, formula = LOSSES[name]
    without = 0
    for number in NUMBERS:
        batch = Batch(number)
        expected = formula(batch)
        without += int((expected[1][batch.mask] == 0).sum())
        compare(batch, settings, expected)
    assert without or name.startswith(("tis", "topr")), "nothing was left out: the test shows little"


@pytest.mark.parametrize("cap", [1.5, None])
def test_decoupled_on_a_log_linear_proximal_policy_is_that_of_areal(cap: float | None) -> None:
    """AReaL, areal/trainer/ppo/actor.py, compute_prox_logp_approximations (loglinear), and ppo_actor_loss_fn with its
    masking of weights above a bound; A-3PO (arXiv 2512.06547). There versions are given: the behaviour's, and the one
    that the step in training makes, one above the proximal policy's."""
    for number in NUMBERS:
        batch = Batch(number)
        made, sampled_by = 9, np.random.default_rng(number).integers(0, 9, len(batch.mask))
        share = np.clip((made - 1 - sampled_by) / (made - sampled_by), 0.0, 1.0)
        proximal = (1 - share) * batch.log_mu + share * batch.log_pi
        lags = torch.from_numpy(made - 1 - sampled_by)
        ours = log_linear(torch.from_numpy(batch.log_pi), torch.from_numpy(batch.log_mu), lags)
        torch.testing.assert_close(ours, torch.from_numpy(proximal), **TOLERANCE)
        weights = np.exp(np.clip(np.where(batch.mask, proximal - batch.log_mu, 0.0), -CUT_OFF, CUT_OFF))
        weights = np.where(weights <= (np.inf if cap is None else cap), weights, 0.0)
        raw = np.where(batch.mask, batch.log_pi - proximal, 0.0)
        value, slope = ppo(np.clip(raw, -CUT_OFF, CUT_OFF), batch.advantages, batch.mask, raw)
        settings = {"correction": "decoupled", "proximal": "log_linear", "options": {"cap": cap}}
        compare(batch, settings, (weights * value, weights * slope), proximal_log_probs=ours)


def drawn(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of groups, some of them equal, and lengths, [groups, n]. Extreme ones are large, or all but equal."""
    random = np.random.default_rng(number)
    shape = (int(random.integers(1, 5)), int(random.integers(2, 9)))
    rewards = random.integers(0, 2, shape).astype(float) if number % 2 else random.random(shape)
    if number >= RANDOM:
        rewards = rewards * 1e6 if number % 2 else 1.0 + rewards * 1e-3
    return rewards.astype(np.float32), random.integers(1, 33, shape)


def of_each_group(formula: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """0 where all rewards of a group are equal."""

    def groups(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
        return np.stack([formula(row) if np.ptp(row) else np.zeros_like(row) for row in rewards.astype(np.float64)])

    return groups


def max_rl(row: np.ndarray) -> np.ndarray:
    """prime-rl, src/prime_rl/orchestrator/algo/max_rl.py; MaxRL (arXiv 2602.02710)."""
    return (row - row.mean()) / row.mean() if row.mean() > 0 else np.zeros_like(row)


def population(row: np.ndarray) -> np.ndarray:
    """GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the deviation over n; verl's is over n - 1."""
    return (row - row.mean()) / (row.std() + 1e-6)


def batch_std(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Lite PPO (arXiv 2508.08221), section 4.1; TRL, _generate_and_score_completions, scale_rewards=batch."""
    exact = rewards.astype(np.float64)
    return (exact - exact.mean(axis=1, keepdims=True)) / (exact.std(ddof=1) + 1e-6)


def best_of_all(row: np.ndarray) -> np.ndarray:
    """Pass@k with k = n (arXiv 2503.19595), section 3, not divided."""
    second, first = np.sort(row)[-2:]
    return np.where(np.arange(len(row)) == row.argmax(), first - second, 0.0)


ADVANTAGES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "max_rl": ({"advantage": "max_rl"}, of_each_group(max_rl)),
    "group over n": ({"options": {"unbiased": False}}, of_each_group(population)),
    "best_of_k": ({"advantage": "best_of_k", "normalise_std": False}, of_each_group(best_of_all)),
    "batch_std": ({"advantage": "batch_std"}, batch_std),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_their_formula(name: str) -> None:
    settings, formula = ADVANTAGES[name]
    for number in NUMBERS:
        rewards, lengths = drawn(number)
        found = advantages_of(algorithm(**settings))(torch.from_numpy(rewards), torch.from_numpy(lengths))
        np.testing.assert_allclose(found.numpy(), formula(rewards, lengths), rtol=1e-6, atol=1e-6)


LONGEST = 32
SHAPED: dict[str, tuple[dict[str, float], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "overlong": (  # DAPO (arXiv 2503.14476), equation 13; verl's DAPO reward manager has the factor
        {"overlong_buffer": 8, "overlong_factor": 0.5},
        lambda r, length: r + np.minimum(0.0, -(length - (LONGEST - 8)) / 8 * 0.5),
    ),
    "length": (  # prime-rl, src/prime_rl/orchestrator/algo/grpo.py, but for its factor, the group's mean reward
        {"length_price": 0.3},
        lambda r, length: r - 0.3 * length / length.max(axis=1, keepdims=True),
    ),
    "scale": ({"reward_scale": 5.0, "reward_bias": -0.5}, lambda r, _: (r - 0.5) * 5.0),  # AReaL, PPOActor
    "clip": ({"reward_low": -0.25, "reward_high": 0.75}, lambda r, _: np.minimum(np.maximum(r, -0.25), 0.75)),
}
"""Options, and rewards and lengths [groups, n] -> rewards. AReaL: areal/trainer/ppo/actor.py; its clip is symmetric."""


@pytest.mark.parametrize("name", SHAPED)
def test_shaped_rewards_are_those_of_their_formula(name: str) -> None:
    options, formula = SHAPED[name]
    shaping = shaping_of(algorithm(shaping=[name], options=options), LONGEST)
    for number in NUMBERS:
        rewards, lengths = drawn(number)
        found = shaping(torch.from_numpy(rewards), torch.from_numpy(lengths))
        np.testing.assert_allclose(found.numpy(), formula(rewards.astype(np.float64), lengths), rtol=1e-6, atol=1e-6)


DIFFERENCES: dict[str, Callable[[np.ndarray], float]] = {"token": np.mean, "sequence": np.sum, "geometric": np.mean}


@pytest.mark.parametrize("level", DIFFERENCES)
def test_bounds_on_differences_of_probabilities_are_those_of_roll(level: str) -> None:
    """ROLL, roll/utils/train_infer_corrections.py, compute_train_infer_correction with diff_enabled and its bounds."""
    left = rejection_of(algorithm(rejection={f"{level}_difference": (-0.2, 0.2)}))
    kept = sampled = 0
    for number in NUMBERS:
        batch, case = Batch(number), Case(number)
        values = np.exp(batch.log_pi) - np.exp(batch.log_mu)
        if level != "token":
            values = batch.of_sequence(values, DIFFERENCES[level])
        found = left(*(torch.from_numpy(of) for of in (batch.log_pi, batch.log_mu, batch.mask)), case.lengths)
        assert found.tolist() == ((np.abs(values) <= 0.2) & batch.mask).tolist()
        kept, sampled = kept + int(found.sum()), sampled + int(batch.mask.sum())
    assert 0 < kept < sampled


def test_groups_that_are_kept_are_those_of_dynamic_sampling() -> None:
    """DAPO (arXiv 2503.14476), equation 11, for rewards of any kind: as verl, which keeps a deviation above 0."""
    keep = filter_of(algorithm(filter="zero_variance"))
    for number in NUMBERS:
        rewards, _ = drawn(number)
        expected = [len(set(row.tolist())) > 1 for row in rewards]
        assert keep(torch.from_numpy(rewards)).tolist() == expected
