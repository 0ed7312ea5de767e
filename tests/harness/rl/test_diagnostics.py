import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config import AlgorithmConfig
from harness.rl.diagnostics import add_diagnostics, diagnostics, policy_metrics, router_metrics
from harness.rl.losses import policy_loss, token_gradients, unbounded_weights

OFF_POLICY = {
    f"policy/{name}"
    for name in (
        *("kl_behaviour", "kl_behaviour_k1", "kl_behaviour_reverse", "chi_squared", "effective_samples"),
        *("ratio_p01", "ratio_p50", "ratio_p99"),
    )
}
ALGORITHM = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3)


def test_the_clip_counts_only_where_it_stops_the_gradient() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    sums = diagnostics(ratios.log(), torch.zeros(1, 6), advantages, mask)
    assert (sums["tokens"], sums["clipped"]) == (5, 2)
    metrics = policy_metrics(sums)
    assert metrics["policy/clip_fraction"] == pytest.approx(0.4)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)
    assert set(metrics) == {"policy/clip_fraction", "policy/ratio_max", *OFF_POLICY}


def test_the_mismatch_is_taken_over_tokens_of_the_same_version_only() -> None:
    engine = torch.full((1, 4), -1.0)
    trainer = torch.tensor([[-1.0, -1.5, -9.0, torch.nan]])
    same = torch.tensor([[True, True, False, True]])
    mask = torch.tensor([[True, True, True, False]])
    sums = diagnostics(engine, engine, torch.ones(1, 4), mask, old_log_probs=trainer, same_version=same)
    d = torch.tensor(-0.5, dtype=torch.float64)
    assert sums["mismatch_tokens"] == 2
    assert policy_metrics(sums)["policy/mismatch_kl"] == pytest.approx((torch.exp(d) - d - 1).item() / 2)


def test_proximal_age_and_kl_coefficient_are_means_and_no_tokens_divide_by_zero() -> None:
    one = torch.zeros(1)
    common = diagnostics(one, one, one, one == 0)
    parts = [common | {"scored": 4.0, "scored_lag": 4.0}, common | {"scored": 4.0, "scored_lag": 0.0}]
    metrics = policy_metrics(functools.reduce(add_diagnostics, parts, {}))
    assert metrics["policy/proximal_lag"] == 0.5
    assert "policy/proximal_lag" not in policy_metrics(common)
    one = torch.zeros(1, 1)
    common = diagnostics(one, one, one, one == 0)
    parts = [common | {"kl_samples": 1.0, "kl_coef": 0.4}, common | {"kl_samples": 3.0, "kl_coef": 0.4}]
    assert policy_metrics(functools.reduce(add_diagnostics, parts, {}))["policy/kl_coef"] == pytest.approx(0.2)
    zeros = torch.zeros(2, 3)
    nothing = zeros.bool()
    sums = diagnostics(zeros, zeros, zeros, nothing, old_log_probs=zeros, same_version=nothing)
    assert policy_metrics(sums) == {"policy/clip_fraction": 0.0, "policy/ratio_max": 0.0}


def test_micro_batches_add_up_to_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    values = {
        key: -torch.rand(6, 5, generator=random)
        for key in ("log_probs", "behaviour_log_probs", "entropies", "reference_log_probs", "old_log_probs")
    }
    values["advantages"] = torch.randn(6, 5, generator=random)
    values["mask"] = torch.rand(6, 5, generator=random) < 0.6
    values["same_version"] = torch.rand(6, 5, generator=random) < 0.5

    def part(rows: slice) -> dict[str, float]:
        return diagnostics(**{key: value[rows] for key, value in values.items()})

    values["gradients"] = torch.randn(6, 5, generator=random) * (torch.rand(6, 5, generator=random) < 0.5)
    values["unbounded"] = torch.rand(6, 5, generator=random)
    whole = part(slice(0, 6))
    parts = functools.reduce(add_diagnostics, [part(slice(0, 1)), part(slice(1, 4)), part(slice(4, 6))], {})
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert parts[key] == pytest.approx(value)
    expected = {"clip_fraction", "ratio_max", "entropy", "kl_ref", "mismatch_kl", "left_out", "cut"}
    assert set(policy_metrics(whole)) == {f"policy/{name}" for name in expected} | OFF_POLICY
    for key, value in policy_metrics(whole).items():
        assert policy_metrics(parts)[key] == pytest.approx(value, rel=1e-12)
    mask = values["mask"]
    assert policy_metrics(whole)["policy/entropy"] == pytest.approx(values["entropies"][mask].mean().item())


# -- how far from the policy that sampled


def drawn(probabilities: torch.Tensor, others: torch.Tensor, tokens: int) -> dict[str, float]:
    """Metrics over every token as often as the second distribution draws it: means are then expectations."""
    counts = (others * tokens).round().long()
    log_probs, behaviour = (p.log().repeat_interleave(counts) for p in (probabilities, others))
    ones = torch.ones_like(log_probs)
    return policy_metrics(diagnostics(log_probs, behaviour, ones, ones.bool()))


def test_divergences_and_quantiles_are_those_of_the_distributions() -> None:
    pi, mu = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    metrics = drawn(pi, mu, tokens=1000)
    forward, reverse = float((mu * (mu / pi).log()).sum()), float((pi * (pi / mu).log()).sum())
    chi_squared = float((pi.square() / mu).sum() - 1)
    assert metrics["policy/kl_behaviour_k1"] == pytest.approx(forward)
    assert metrics["policy/kl_behaviour"] == pytest.approx(forward)
    assert metrics["policy/kl_behaviour_reverse"] == pytest.approx(reverse)
    assert metrics["policy/chi_squared"] == pytest.approx(chi_squared)
    assert metrics["policy/effective_samples"] == pytest.approx(1 / (1 + chi_squared))
    d = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 0.4
    zeros = torch.zeros_like(d)
    metrics = policy_metrics(diagnostics(d, zeros, zeros, zeros == 0))
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = d.quantile(share, interpolation="lower").exp().item()
        assert metrics[f"policy/ratio_{name}"] == pytest.approx(exact, rel=0.0051)


def test_the_policy_that_sampled_is_not_off_policy_and_what_is_not_a_number_ends_nothing() -> None:
    same = torch.full((5,), -1.0)
    metrics = policy_metrics(diagnostics(same, same, same, same < 0))
    zero = {"kl_behaviour", "kl_behaviour_k1", "kl_behaviour_reverse", "chi_squared"}
    assert all(metrics[name] == float(name.removeprefix("policy/") not in zero) for name in OFF_POLICY)
    broken = torch.tensor([-1.0, math.nan, -1.0, -math.inf, -1.0])
    assert policy_metrics(diagnostics(broken, same, same, same < 0))["policy/ratio_p50"] == 1.0


LEFT_OUT_AND_CUT: dict[str, tuple[dict[str, Any], int, int | None]] = {
    # ratios .1, .9, 1, 1.5, 3, 9 of tokens whose advantages are 1, then the same with -1
    "none": ({}, 0, None),
    "clip": ({}, 3 + 1, None),
    "dual_clip": ({}, 3 + 1 + 1, None),
    "mis": ({}, 2 * 2, None),
    "decoupled": ({"options": {"cap": 2.0}}, 2 * 6, None),
    "decoupled_tis": ({}, 1 + 4, 12 - 5),
    "tis": ({}, 0, 2 * 2),
    "cispo": ({}, 0, 2 * 3),
}


@pytest.mark.parametrize("correction", LEFT_OUT_AND_CUT)
def test_what_a_correction_leaves_out_and_cuts_is_counted_by_what_it_does(correction: str) -> None:
    settings, left_out, cut = LEFT_OUT_AND_CUT[correction]
    algorithm = replace(ALGORITHM, correction=correction, **settings)
    log_probs = torch.tensor([0.1, 0.9, 1.0, 1.5, 3.0, 9.0] * 2 + [1.0]).log()
    behaviour, lengths = torch.zeros(13), torch.tensor([6, 7])
    advantages, mask = torch.tensor([1.0] * 6 + [-1.0] * 6 + [0.0]), torch.ones(13, dtype=torch.bool)
    if algorithm.has_proximal:
        given = {"proximal_log_probs": torch.full((13,), 1.0)}  # e of what sampled: beyond the cap
    else:
        given = {"proximal_log_probs": None}  # type: ignore[dict-item]
    log_probs.requires_grad_()
    losses = policy_loss(algorithm)(log_probs, behaviour, advantages, mask, lengths=lengths, **given)
    sums = diagnostics(
        log_probs,
        behaviour,
        advantages,
        mask,
        gradients=token_gradients(losses, log_probs),
        unbounded=unbounded_weights(algorithm, log_probs, behaviour, mask, lengths),
    )
    assert (sums["left_out"], sums.get("cut")) == (left_out, cut)


def test_the_load_of_experts_is_that_of_all_micro_batches_in_the_mean_over_layers() -> None:
    one = {"routed_0_0": 3.0, "routed_0_1": 1.0, "routed_1_0": 2.0, "routed_1_1": 2.0}
    other = {"routed_0_0": 1.0, "routed_0_1": 3.0, "routed_1_0": 4.0, "routed_1_1": 0.0}
    passes = {"routings": 2.0, "router_entropy": 0.5}
    sums = add_diagnostics(one | passes, other | passes)
    assert router_metrics(sums) == {"router/load_max": (1.0 + 1.5) / 2, "router/entropy": 0.25}
