"""Every loss, advantage, aggregation and KL against the function of the same meaning in verl: value and gradient.

On 200 random batches and 50 extreme ones (ratios of e^-30 to e^30, equal rewards, responses of one token). Where the
two differ by what they are, the case says how and why.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import AlgorithmConfig
from harness.config.registries import AGGREGATIONS, KL_ESTIMATORS, REJECTIONS
from harness.rl.advantages import advantages_of
from harness.rl.diagnostics import off_policy_metrics, off_policy_sums
from harness.rl.kl import RewardKL, estimator_of, less_costs
from harness.rl.log_probs import head_log_probs
from harness.rl.losses import policy_loss
from harness.rl.rejection import rejection_of
from harness.rl.token_advantages import gae_of, token_advantages_of
from harness.rl.value_loss import value_losses, value_sums
from tests.support.policy_batches import EXTREME, RANDOM, Case, aggregated, algorithm

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl: make test-oracle")
actor_config = pytest.importorskip("verl.workers.config").ActorConfig
algo_config = pytest.importorskip("verl.trainer.config").AlgoConfig
policy_loss_config = pytest.importorskip("verl.workers.config").PolicyLossConfig
rollout_correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

torch_functional = pytest.importorskip("verl.utils.torch_functional")

pytestmark = pytest.mark.oracle

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def ours(case: Case, chosen: AlgorithmConfig, aggregation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of the batch, and its gradient in log_probs [R]."""
    log_probs = case.log_probs.clone().requires_grad_()
    losses = policy_loss(chosen)(log_probs, case.behaviour, case.advantages, case.mask, lengths=case.lengths)
    return aggregated(case, losses, aggregation, log_probs)


def theirs(
    case: Case, name: str, aggregation: str, low: float, high: float, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = case.log_probs.clone().requires_grad_()
    config = actor_config(
        strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, clip_ratio_low=low, clip_ratio_high=high, **settings
    )
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=case.padded(case.behaviour),
        log_prob=case.padded(log_probs),
        advantages=case.padded(case.advantages),
        response_mask=case.padded(case.mask.float()),
        loss_agg_mode=aggregation,
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


TOKEN_MEAN = ("token_mean", "token-mean")
SEQUENCE_MEAN = ("sequence_mean_token_mean", "seq-mean-token-mean")
LOSSES: dict[str, tuple[dict[str, Any], str, tuple[str, str], dict[str, Any]]] = {
    "clip": ({}, "vanilla", TOKEN_MEAN, {"low": 0.2, "high": 0.2, "clip_ratio_c": 1e30}),  # no dual clip
    "dual_clip": ({}, "vanilla", TOKEN_MEAN, {"low": 0.2, "high": 0.2}),
    "none": ({}, "gpg", TOKEN_MEAN, {"low": 0.2, "high": 0.2}),
    "cispo": ({"options": {"low": 0.9, "high": 0.3}}, "cispo", TOKEN_MEAN, {"low": 0.9, "high": 0.3}),
    "gspo": ({}, "gspo", SEQUENCE_MEAN, {"low": 3e-4, "high": 4e-4}),
    "geo_mean": ({}, "geo_mean", SEQUENCE_MEAN, {"low": 0.4, "high": 0.4}),
    "sapo": ({}, "sapo", SEQUENCE_MEAN, {"low": 0.2, "high": 0.2}),
    "dro": (
        {"options": {"penalty": 0.3}},
        "dro",
        TOKEN_MEAN,
        {"low": 0.2, "high": 0.2, "policy_loss": policy_loss_config(dro_beta=0.3)},
    ),
    "dppo_tv": ({}, "dppo_tv", TOKEN_MEAN, {"low": 0.2, "high": 0.2, "clip_ratio_c": 20.0}),
    "dppo_kl": ({}, "dppo_kl", TOKEN_MEAN, {"low": 0.2, "high": 0.2, "clip_ratio_c": 20.0}),
    "kl_cov": (
        {"options": {"share": 0.1, "kl_coef": 0.5}},
        "kl_cov",
        TOKEN_MEAN,
        {"low": 0.2, "high": 0.2, "policy_loss": policy_loss_config(kl_cov_ratio=0.1, ppo_kl_coef=0.5)},
    ),
}
"""Here: name and settings; there: name; aggregation, here and there; settings there."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_verl_in_value_and_gradient(name: str) -> None:
    settings, their_name, (aggregation, their_aggregation), their_settings = LOSSES[name]
    compared = 0
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        if _cut_off_elsewhere(name, case):
            continue
        compared += 1
        found = ours(case, algorithm(correction=name, **settings), aggregation)
        expected = theirs(case, their_name, their_aggregation, **their_settings)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE, msg=lambda text, n=number: f"batch {n}: {text}")
    assert compared >= RANDOM


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("most", [3.0, None])
def test_a_clip_on_a_recomputed_policy_has_the_truncated_weights_of_verl(level: str, most: float | None) -> None:
    """Its rollout correction in decoupled mode; without its dual clip, and with it, as by default there."""
    chosen = algorithm(correction="decoupled_tis", options={"level": level, "cap": 2.0, "most": most})
    config = actor_config(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, clip_ratio_c=most or 1e30)
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        mask, proximal = case.padded(case.mask.float()), (case.behaviour + case.log_probs) / 2
        away = case.padded((proximal - case.behaviour).masked_fill(~case.mask, 0.0))
        weights, _ = rollout_correction.compute_rollout_correction_weights(away, mask, level, 2.0)
        one, other = (case.log_probs.clone().requires_grad_() for _ in range(2))
        given = {"proximal_log_probs": proximal, "lengths": case.lengths}
        losses = policy_loss(chosen)(one, case.behaviour, case.advantages, case.mask, **given)
        found = aggregated(case, losses, "token_mean", one)
        expected, _ = core_algos.get_policy_loss_fn("vanilla")(
            old_log_prob=case.padded(proximal),
            log_prob=case.padded(other),
            advantages=case.padded(case.advantages),
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=weights,
        )
        torch.testing.assert_close(found[0], expected.detach(), **TOLERANCE)
        torch.testing.assert_close(found[1], torch.autograd.grad(expected, other)[0], **TOLERANCE)


def test_a_geometric_mean_counts_responses_without_a_token_as_verl_does() -> None:
    for number in range(RANDOM):
        case = Case(number)
        for place in list(case.sequences())[::2]:
            case.mask[place] = False
        log_probs = case.log_probs.clone().requires_grad_()
        losses = policy_loss(algorithm(correction="geo_mean"))(
            log_probs, case.behaviour, case.advantages, case.mask, lengths=case.lengths
        )
        found = aggregated(case, losses, "sequence_mean_token_mean", log_probs, count_empty=True)
        expected = theirs(case, "geo_mean", "seq-mean-token-mean", 0.4, 0.4)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def _cut_off_elsewhere(name: str, case: Case) -> bool:
    """Where log-ratios are cut off: here at +-20 in every loss, so that float32 never overflows; in verl's gspo at +10
    only, and in kl_cov and geo_mean nowhere."""
    away = (case.log_probs - case.behaviour).masked_fill(~case.mask, 0.0).abs().max()
    return bool(away > {"gspo": 10.0, "kl_cov": 20.0}.get(name, torch.inf))


def test_clip_cov_is_that_of_verl_where_it_draws_all_candidates() -> None:
    """Which of them are drawn is chance on both sides: with a share of 1 all are."""
    for number in range(RANDOM):
        case = Case(number)
        found = ours(
            case, algorithm(correction="clip_cov", options={"share": 1.0, "low": 0.3, "high": 5.0}), "token_mean"
        )
        settings = policy_loss_config(clip_cov_ratio=1.0, clip_cov_lb=0.3, clip_cov_ub=5.0)
        expected = theirs(case, "clip_cov", "token-mean", 0.2, 0.2, policy_loss=settings)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_an_aggregation_is_that_of_verl(kind: str) -> None:
    their_kind = kind.replace("sequence", "seq").replace("_", "-")
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        log_probs = case.log_probs.clone().requires_grad_()
        losses = (log_probs.square() * 0.1).masked_fill(~case.mask, 0.0)
        found = aggregated(case, losses, kind, log_probs)
        expected = core_algos.agg_loss(case.padded(losses), case.padded(case.mask.float()), their_kind)
        torch.testing.assert_close(found[0], expected.detach(), **TOLERANCE)
        torch.testing.assert_close(found[1], torch.autograd.grad(expected, log_probs)[0], **TOLERANCE)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_an_estimator_of_the_kl_is_that_of_verl(kind: str) -> None:
    """But for k3 beyond 10, which verl cuts off: its gradient is 0 there, and ours goes on."""
    for number in range(RANDOM):
        case = Case(number)
        everywhere = torch.ones_like(case.mask)
        one, other = (case.log_probs.clone().requires_grad_() for _ in range(2))
        found, expected = (
            estimator_of(kind)(one, case.behaviour, everywhere),
            core_algos.kl_penalty(other, case.behaviour, kind),
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)
        gradients = (torch.autograd.grad(kl.sum(), of)[0] for kl, of in ((found, one), (expected, other)))
        torch.testing.assert_close(*gradients, **TOLERANCE)


class Groups:
    """Rewards [groups, n] and lengths, and the same as verl takes them."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng(number)
        shape = (int(random.integers(1, 5)), int(random.integers(2, 9)))
        kinds: list[Callable[[], np.ndarray]] = [
            lambda: random.random(shape),
            lambda: random.integers(0, 2, shape).astype(float),
            lambda: random.random(shape) * 1e4,
        ]
        self.rewards = torch.from_numpy(kinds[number % len(kinds)]()).float()
        self.lengths = torch.from_numpy(random.integers(1, 20, shape))
        self.equal = (self.rewards.amax(1) == self.rewards.amin(1)).repeat_interleave(shape[1])
        self.mask = (torch.arange(int(self.lengths.max())) < self.lengths.flatten()[:, None]).float()
        self.token_rewards = torch.zeros_like(self.mask)
        self.token_rewards[torch.arange(len(self.mask)), self.lengths.flatten() - 1] = self.rewards.flatten()
        self.index = np.repeat(np.arange(shape[0]), shape[1])


def _with_config(name: str, **settings: Any) -> Callable[[Groups], torch.Tensor]:
    def call(groups: Groups) -> torch.Tensor:
        advantages, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=groups.token_rewards.clone(),
            response_mask=groups.mask,
            index=groups.index,
            config=algo_config(norm_adv_by_std_in_grpo=settings.get("norm_adv_by_std_in_grpo", True)),
            **settings,
        )
        return advantages[:, 0]

    return call


ADVANTAGES: dict[str, tuple[dict[str, Any], Callable[[Groups], torch.Tensor]]] = {
    "grpo": ({}, _with_config("grpo")),
    "dr_grpo": ({"advantage": "dr_grpo"}, _with_config("grpo", norm_adv_by_std_in_grpo=False)),
    "rloo": ({"advantage": "rloo"}, _with_config("rloo")),
    "remax": ({"advantage": "remax"}, lambda groups: _remax(groups)),
    "opo": ({"advantage": "opo"}, _with_config("opo")),
    "grpo_passk": ({"advantage": "best_of_k"}, _with_config("grpo_passk")),
    "reinforce_plus_plus": ({"advantage": "reinforce_plus_plus"}, _with_config("reinforce_plus_plus")),
    "reinforce_plus_plus_baseline": (
        {"advantage": "reinforce_plus_plus_baseline"},
        _with_config("reinforce_plus_plus_baseline"),
    ),
    "gpg": ({"advantage": "gpg"}, lambda groups: _with_config("gpg", f_norm=1.0)(groups) * _gpg_factor(groups)),
}


@pytest.mark.parametrize("weights", [{"right": 1.0}, {"right": 1.0, "short": 0.25}])
def test_parts_of_rewards_are_compared_as_verl_does(weights: dict[str, float]) -> None:
    """But for parts that are equal throughout a group: exactly 0 here, what rounding leaves there."""
    compare = advantages_of(algorithm(advantage="gdpo", options={"parts": weights}))
    for number in range(RANDOM + EXTREME):
        groups = Groups(number)
        random = np.random.default_rng(number)
        extras = random.normal(0, 1, (*groups.rewards.shape, len(weights))).astype(np.float32)
        found = compare(groups.rewards, groups.lengths, extras=torch.from_numpy(extras).double()).flatten()
        expected, _ = core_algos.get_adv_estimator_fn("gdpo")(
            token_level_rewards=groups.token_rewards,
            response_mask=groups.mask,
            index=groups.index,
            config={"gdpo_reward_keys": list(weights), "gdpo_reward_weights": list(weights.values())},
            non_tensor_batch={name: extras[:, :, place].flatten() for place, name in enumerate(weights)},
            batch={
                "prompts": torch.zeros(len(groups.mask), 1),
                "attention_mask": torch.cat([torch.ones(len(groups.mask), 1), groups.mask], 1).long(),
            },
        )
        torch.testing.assert_close(found, expected[:, 0], rtol=1e-5, atol=1e-5)


def _remax(groups: Groups) -> torch.Tensor:
    """verl is given the rewards of greedy responses; here each is the first of its group."""
    compared = groups.rewards[:, 0].repeat_interleave(groups.rewards.shape[1])
    advantages, _ = core_algos.compute_remax_outcome_advantage(
        groups.token_rewards.clone(), compared, groups.mask, algo_config()
    )
    return advantages[:, 0]


def _gpg_factor(groups: Groups) -> float:
    """verl divides by the share of rewards that are not 0; the paper, and ours, by that of groups that differ."""
    differ = float((~groups.equal).float().mean())
    return float(groups.rewards.ne(0).float().mean()) / differ if differ else 0.0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_verl(name: str) -> None:
    """But for groups of equal rewards: exactly 0 here, what rounding leaves there."""
    settings, expected = ADVANTAGES[name]
    for number in range(RANDOM + EXTREME):
        groups = Groups(number)
        found = advantages_of(algorithm(**settings))(groups.rewards, groups.lengths).flatten()
        if not name.startswith("reinforce"):  # which compares batches, and cannot be held to a group
            assert found[groups.equal].eq(0).all()
        scale = float(groups.rewards.abs().max())  # float32 sums of large rewards differ by their order
        compared = ~groups.equal if not name.startswith("reinforce") else torch.ones_like(groups.equal)
        if bool(groups.rewards.amax() == groups.rewards.amin()):
            assert found.eq(0).all()
            continue
        torch.testing.assert_close(found[compared], expected(groups)[compared], rtol=1e-5, atol=1e-6 * max(1.0, scale))


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_a_kl_in_the_reward_and_its_coefficient_are_those_of_verl(kind: str) -> None:
    """Batch after batch, so that each coefficient follows from all KLs before it."""
    settings = {"kl": kind, "kl_in": "reward", "kl_coef": 0.05, "kl_target": 0.1, "kl_horizon": 500}
    found = RewardKL(algorithm(**settings))
    expected = core_algos.AdaptiveKLController(0.05, 0.1, 500)
    for number in range(RANDOM):
        case = Case(number)
        rewards = torch.from_numpy(np.random.default_rng(number).random((1, len(case.lengths)))).float()
        costs = found(case.behaviour, case.log_probs, case.mask, case.lengths)
        shown = less_costs(rewards, costs, case.lengths)
        mask = case.padded(case.mask.float())
        kl = core_algos.kl_penalty(case.padded(case.behaviour), case.padded(case.log_probs), kind) * mask
        torch.testing.assert_close(shown[0], rewards[0] - expected.value * kl.sum(1), rtol=1e-5, atol=1e-5)
        expected.update(float((kl.sum(1) / (mask.sum(1) + 1e-8)).mean()), len(case.lengths))
        assert found.coefficient == pytest.approx(expected.value, rel=1e-5)
    assert found.coefficient != 0.05


def _bounds_of(measure: str) -> tuple[tuple[float | None, float | None], str, str]:
    """Here; there: name and bounds. verl's k1 is bounded by ratios of mu over pi, the others by a largest value."""
    level, _, estimator = measure.partition("_")
    theirs = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean", "max": "seq_max"}[level]
    if estimator == "ratio":
        return (0.8, 2.0), f"{theirs}_k1", "0.5_1.25"
    if estimator == "k1":
        return (float(np.log(0.8)), float(np.log(1.25))), f"{theirs}_k1", "0.8_1.25"
    return (None, 0.05), f"{theirs}_{estimator}", "0.05"


@pytest.mark.parametrize("measure", [name for name in REJECTIONS if not name.endswith("difference")])
def test_what_is_left_out_by_a_measure_is_what_verl_leaves_out(measure: str) -> None:
    bounds, name, there = _bounds_of(measure)
    left = rejection_of(algorithm(rejection={measure: bounds}))
    kept = sampled = 0
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        found = left(case.log_probs, case.behaviour, case.mask, case.lengths)
        away = case.padded((case.log_probs - case.behaviour).masked_fill(~case.mask, 0.0))
        expected, _ = rollout_correction.compute_rollout_rejection_mask(
            away, case.padded(case.mask.float()), name, there
        )
        assert torch.equal(case.padded(found).float(), expected), f"batch {number}"
        kept, sampled = kept + int(found.sum()), sampled + int(case.mask.sum())
    assert 0 < kept < sampled


BOUNDS = {"tis": (None, 2.0), "mis": (0.5, 5.0)}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", BOUNDS)
def test_weights_that_are_truncated_or_masked_are_those_of_verl(name: str, level: str) -> None:
    """The gradient of a policy gradient is its weights. verl masks by its rejection, of ratios of mu over pi, and does
    not count what is masked in what losses are divided by; here it counts."""
    low, high = BOUNDS[name]
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        _, found = ours(case, algorithm(correction=name, options={"level": level}), "token_mean")
        mask = case.padded(case.mask.float())
        away = case.padded((case.log_probs - case.behaviour).masked_fill(~case.mask, 0.0))
        weights, _ = rollout_correction.compute_rollout_correction_weights(
            away, mask, level, high if name == "tis" else torch.inf
        )
        if low is not None:
            measure = {"token": "token_k1", "sequence": "seq_sum_k1"}[level]
            kept, _ = rollout_correction.compute_rollout_rejection_mask(away, mask, measure, f"{1 / high}_{1 / low}")
            weights = weights * kept
        expected = -weights[case.there] * case.advantages / case.mask.sum()
        torch.testing.assert_close(found, expected.masked_fill(~case.mask, 0.0), **TOLERANCE)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_normalised_are_those_of_verl(level: str) -> None:
    """The gradient of a policy gradient is its weights. But where all weights are next to nothing, and verl leaves them
    so."""
    compared = 0
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        chosen = algorithm(correction="tis_normalised", options={"level": level})
        _, found = ours(case, chosen, "token_mean")
        mask = case.padded(case.mask.float())
        away = case.padded(case.log_probs - case.behaviour)
        weights, told = rollout_correction.compute_rollout_correction_weights(
            away, mask, level, 2.0, rollout_is_batch_normalize=True
        )
        if told["rollout_is_batch_norm_factor"] == 1.0:
            continue
        compared += 1
        expected = -weights[case.there] * case.advantages / case.mask.sum()
        torch.testing.assert_close(found, expected.masked_fill(~case.mask, 0.0), **TOLERANCE)
    assert compared >= RANDOM


def test_what_is_told_of_the_distance_from_the_behaviour_policy_is_what_verl_tells() -> None:
    """But for chi-squared: the mean of r^2 - 1 there, of (r - 1)^2 here, which is never negative."""
    for number in range(RANDOM):
        case = Case(number)
        log_probs, behaviour, mask = case.log_probs.double(), case.behaviour.double(), case.mask
        found = off_policy_metrics(off_policy_sums(log_probs, behaviour, mask), float(mask.sum()))
        there = (case.padded(log_probs), case.padded(behaviour), case.padded(mask.double()))
        told = rollout_correction.compute_offpolicy_metrics(*there)
        ratios = (log_probs - behaviour).exp()
        weights = rollout_correction.compute_is_metrics(
            rollout_is_weights=case.padded(ratios),
            raw_rollout_is_weights=case.padded(ratios),
            log_ratio_for_metrics=there[0] - there[1],
            response_mask=there[2],
            rollout_is="token",
            rollout_is_threshold=1e30,
        )
        assert found["kl_behaviour_k1"] == pytest.approx(told["kl"], rel=1e-6, abs=1e-6)
        assert found["kl_behaviour"] == pytest.approx(told["k3_kl"], rel=1e-6, abs=1e-6)
        chi_squared = told["chi2_token"] - 2 * (float(ratios[mask].mean()) - 1)
        assert found["chi_squared"] == pytest.approx(chi_squared, rel=1e-6, abs=1e-6)
        assert found["effective_samples"] == pytest.approx(weights["rollout_is_eff_sample_size"], rel=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_gae_is_that_of_verl(gamma: float, lam: float, kl_in_reward: bool) -> None:
    """Advantages, whitened and not, and returns, at the tokens that were sampled; with what a KL costs at each. verl's
    arithmetic is that of its inputs, here float64; it whitens always, and loses a reward that comes where nothing was
    sampled."""
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        random = np.random.default_rng(number)
        size = 100.0 if number >= RANDOM else 1.0
        rewards = torch.from_numpy(random.normal(0, size, len(case.lengths))).float()
        values = torch.from_numpy(random.normal(0, size, len(case.mask))).float()
        sampled = case.padded(case.mask.double())
        last = (sampled * torch.arange(1, sampled.shape[1] + 1)).argmax(1)
        token_rewards = torch.zeros_like(sampled)
        token_rewards[torch.arange(len(rewards)), last] = rewards.double()
        costs = None
        if kl_in_reward:
            costs = torch.from_numpy(random.exponential(size, len(case.mask))).float().masked_fill(~case.mask, 0.0)
            token_rewards -= case.padded(costs).double()
        advantages, returns = core_algos.compute_gae_advantage_return(
            token_rewards, case.padded(values).double(), sampled, gamma, lam
        )
        options = {"gamma": gamma, "lam": lam}
        found = gae_of(algorithm(advantage="gae", options=options))(rewards, values, case.mask, case.lengths, costs)
        for one, other, within in zip(found, (advantages, returns), (1e-6, 1e-6 * size), strict=True):
            expected = other[case.there][case.mask].float()
            torch.testing.assert_close(one[case.mask], expected, rtol=1e-6, atol=within)


class Turns(Groups):
    """Groups with a policy: what log-probs it found, and the sum of its squared probabilities, at every token [R]. With
    `environment`, some tokens were written by one, the last of a response among them."""

    def __init__(self, number: int, environment: bool) -> None:
        super().__init__(number)
        random = np.random.default_rng(number)
        lengths = self.lengths.flatten()
        tokens = int(lengths.sum())
        spread = 30.0 if number >= RANDOM else 2.0
        logits = torch.from_numpy(random.normal(0, spread, (tokens, 7)))
        chosen = torch.from_numpy(random.integers(0, 7, tokens))
        self.log_probs = logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
        self.sum_of_squares = logits.softmax(-1).square().sum(-1)
        self.there = self.mask.bool()
        self.sampled = torch.from_numpy(random.random(tokens) < (0.7 if environment else 2.0))
        self.sampled[lengths.cumsum(0) - lengths] = True  # of each response its first
        self.rewards = self.rewards.float() / max(1.0, float(self.rewards.amax()))
        kept = self.padded(self.sampled.double())
        last = (kept * torch.arange(1, kept.shape[1] + 1)).argmax(1)
        self.token_rewards = torch.zeros_like(kept)
        self.token_rewards[torch.arange(len(last)), last] = self.rewards.double().flatten()

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """[R] -> [k, T], 0 where there is nothing."""
        return torch.zeros(self.there.shape, dtype=values.dtype).masked_scatter(self.there, values)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_is_that_of_verl(name: str, zero_tail: bool) -> None:
    """Without an environment that of one turn as well, which does not pass over what one wrote. verl's arithmetic is
    that of its inputs, here float64. In groups of equal rewards, tokens that are compared have exactly 0 here; there
    what 1e-8 in the denominator leaves, which is much where all squares are small."""
    options = {"zero_tail": zero_tail}
    by_token = token_advantages_of(algorithm(advantage="optimal_token_baseline", options=options))
    for number in range(RANDOM + EXTREME):
        case = Turns(number, environment=name.startswith("tir"))
        squares = (1 - 2 * case.log_probs.exp() + case.sum_of_squares).float()
        expected, _ = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=case.token_rewards,
            response_mask=case.padded(case.sampled.double()),
            index=case.index,
            old_log_probs=case.padded(case.log_probs),
            sum_pi_squared=case.padded(2 * case.log_probs.exp() - 1 + squares.double()),
            handle_zero_tail=zero_tail,
        )
        lengths = case.lengths.flatten()
        found = by_token.columns(case.rewards, squares, case.sampled, lengths)["advantage"]
        flat = expected[case.there].float()
        compared = ~case.equal.repeat_interleave(lengths) | (squares > 0.02)
        torch.testing.assert_close(found[compared], flat[compared], **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_squares_of_gradients_are_made_of_the_sums_of_squared_probabilities_of_verl(temperature: float) -> None:
    for number in range(RANDOM + EXTREME):
        random = np.random.default_rng(number)
        size = 10.0 if number >= RANDOM else 1.0
        hidden, weight = (torch.from_numpy(random.normal(0, size, shape)).float() for shape in ((9, 4), (11, 4)))
        tokens = torch.from_numpy(random.integers(0, 11, 9))
        *_, found = head_log_probs(hidden, weight, tokens, temperature, gradient_squares=True)
        scaled = (hidden @ weight.T).div(temperature)
        sums = torch_functional.calculate_sum_pi_squared_from_logits(scaled.double())
        expected = 1 - 2 * scaled.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1).exp() + sums
        rounding = 1e-6 * max(1.0, float(scaled.abs().max()) / 10)  # of the largest logit, in float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("clip", [0.5, 0.05])
def test_the_loss_of_values_is_that_of_verl(aggregation: str, clip: float) -> None:
    for number in range(RANDOM + EXTREME):
        case = Case(number)
        random = np.random.default_rng(number)
        size = 100.0 if number >= RANDOM else 1.0
        drawn = random.normal(0, size, (3, len(case.mask)))
        predictions, values, returns = (torch.from_numpy(row).float() for row in drawn)
        one, other = (predictions.clone().requires_grad_() for _ in range(2))
        losses = value_losses(one, values, returns, case.mask, clip=clip)
        found = aggregated(case, losses, aggregation, one)
        expected, share = core_algos.compute_value_loss(
            *(case.padded(part) for part in (other, returns, values)),
            case.padded(case.mask.float()),
            clip,
            aggregation.replace("sequence", "seq").replace("_", "-"),
        )
        torch.testing.assert_close(found[0], expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[1], torch.autograd.grad(expected, other)[0], **TOLERANCE)
        sums = value_sums(predictions, values, returns, case.mask, clip=clip)
        assert sums["clipped"] / sums["tokens"] == pytest.approx(float(share), abs=1e-6)
