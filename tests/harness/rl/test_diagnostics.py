import functools

import pytest
import torch

from harness.rl.diagnostics import add_diagnostics, diagnostics, policy_metrics


def test_the_clip_counts_only_where_it_stops_the_gradient() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    sums = diagnostics(ratios.log(), torch.zeros(1, 6), advantages, mask)
    assert (sums["tokens"], sums["clipped"]) == (5, 2)
    metrics = policy_metrics(sums)
    assert metrics["policy/clip_fraction"] == pytest.approx(0.4)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)
    assert set(metrics) == {"policy/clip_fraction", "policy/ratio_max"}


def test_the_mismatch_is_taken_over_tokens_of_the_same_version_only() -> None:
    engine = torch.full((1, 4), -1.0)
    trainer = torch.tensor([[-1.0, -1.5, -9.0, torch.nan]])
    same = torch.tensor([[True, True, False, True]])
    mask = torch.tensor([[True, True, True, False]])
    sums = diagnostics(engine, engine, torch.ones(1, 4), mask, old_log_probs=trainer, same_version=same)
    d = torch.tensor(-0.5, dtype=torch.float64)
    assert sums["mismatch_tokens"] == 2
    assert policy_metrics(sums)["policy/mismatch_kl"] == pytest.approx((torch.exp(d) - d - 1).item() / 2)


def test_the_proximal_policy_is_as_old_as_the_samples_say_on_average() -> None:
    common = {"tokens": 1.0, "clipped": 0.0, "ratio_max": 1.0}
    parts = [common | {"scored": 4.0, "scored_lag": 4.0}, common | {"scored": 4.0, "scored_lag": 0.0}]
    metrics = policy_metrics(functools.reduce(add_diagnostics, parts, {}))
    assert metrics["policy/proximal_lag"] == 0.5
    assert "policy/proximal_lag" not in policy_metrics(common)


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

    whole = part(slice(0, 6))
    parts = functools.reduce(add_diagnostics, [part(slice(0, 1)), part(slice(1, 4)), part(slice(4, 6))], {})
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert parts[key] == pytest.approx(value)
    expected = {"clip_fraction", "ratio_max", "entropy", "kl_ref", "mismatch_kl"}
    assert set(policy_metrics(whole)) == {f"policy/{name}" for name in expected}
    mask = values["mask"]
    assert policy_metrics(whole)["policy/entropy"] == pytest.approx(values["entropies"][mask].mean().item())


def test_a_batch_without_tokens_has_no_metrics_that_divide_by_zero() -> None:
    zeros = torch.zeros(2, 3)
    nothing = zeros.bool()
    sums = diagnostics(zeros, zeros, zeros, nothing, old_log_probs=zeros, same_version=nothing)
    assert policy_metrics(sums) == {"policy/clip_fraction": 0.0, "policy/ratio_max": 0.0}
