"""A cost model is found again from the times that it makes."""

from dataclasses import replace

import numpy as np
import pytest

from harness.calibration.fitting import fit, fit_undisturbed
from harness.calibration.recorded import WorkTimes
from harness.calibration.runs import calibrate, trace
from harness.config import CostConfig
from harness.config.compose import compose_job

BASE = compose_job(["cost=tiny_cpu"]).cost
TRUTH = replace(
    BASE,
    decode_step_s=0.002,
    decode_step_s_per_sample=3e-5,
    prefill_s_per_token=1e-5,
    log_prob_s_per_token=1e-5,
    train_s_per_token=4e-5,
    train_step_s=0.004,
    call_s=0.006,
    sync_s=0.005,
    offload_s=0.003,
    reload_s=0.01,
    prompt_tokens=6,
)
COSTS = (
    "decode_step_s",
    "decode_step_s_per_sample",
    "prefill_s_per_token",
    "log_prob_s_per_token",
    "train_s_per_token",
)
FIXED = ("train_step_s", "call_s", "sync_s", "offload_s", "reload_s")


def what_it_makes(cost: CostConfig, noise: float = 0.0) -> WorkTimes:
    random = np.random.default_rng(0)

    def noisy(seconds: np.ndarray) -> np.ndarray:
        return seconds * np.exp(noise * random.standard_normal(seconds.shape))

    samples = random.choice([32, 128], size=40).astype(np.float64)
    longest = random.integers(8, 13, size=40).astype(np.float64)
    sampled, prompts = np.rint(samples * random.uniform(4, 7, size=40)), samples * 6
    scored, trained = random.uniform(200, 900, size=(2, 160))
    copy_s = cost.weight_bytes / cost.host_bytes_per_s
    decoding = longest * cost.decode_step_s + sampled * cost.decode_step_s_per_sample
    return WorkTimes(
        generate_s=noisy(decoding + prompts * cost.prefill_s_per_token),
        steps=longest,
        sampled=sampled,
        cached=sampled * 9,
        prompts=prompts,
        prompt_pairs=prompts * 6,
        wake_s=noisy(np.full(40, cost.reload_s + copy_s)),
        sleep_s=noisy(np.full(40, cost.offload_s + copy_s)),
        log_prob_s=noisy(cost.call_s + scored * cost.log_prob_s_per_token),
        log_prob_tokens=scored,
        log_prob_pairs=scored * 12,
        train_s=noisy(cost.call_s + trained * cost.train_s_per_token),
        train_tokens=trained,
        train_pairs=trained * 12,
        step_s=noisy(np.full(40, cost.train_step_s)),
        host_copy_s=noisy(np.full(80, cost.sync_s + copy_s)),
        broadcast_s=np.array([]),
        lengths=np.array([3, 5, 5, 9]),
        prompt_tokens=6.2,
    )


def test_costs_are_found_again_from_exact_and_noisy_times() -> None:
    found = calibrate(what_it_makes(TRUTH), BASE).cost

    for name in (*COSTS, *FIXED):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    found = calibrate(what_it_makes(TRUTH, noise=0.05), BASE).cost

    for name in (*COSTS, *FIXED):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.25), name


def test_lengths_are_those_seen_and_a_long_trace_becomes_quantiles() -> None:
    found = calibrate(what_it_makes(TRUTH), BASE).cost

    assert (found.lengths.kind, found.lengths.values, found.lengths.cap) == ("trace", (3, 5, 5, 9), 9)
    assert found.prompt_tokens == 6
    assert (found.name, found.weight_bytes) == (BASE.name, BASE.weight_bytes)
    assert (found.network_bytes_per_s, found.host_bytes_per_s) == (BASE.network_bytes_per_s, BASE.host_bytes_per_s)
    lengths = np.random.default_rng(0).integers(1, 5000, 20_000)

    kept = trace(lengths)

    assert kept.cap == lengths.max() and len(kept.values) < 1000
    assert np.mean(kept.values) == pytest.approx(lengths.mean(), rel=1e-3)


def test_disturbed_work_changes_nothing_and_a_small_unit_is_found_exactly() -> None:
    measured = what_it_makes(TRUTH)
    disturbed = measured.log_prob_s.copy()
    disturbed[7] *= 20

    found = calibrate(replace(measured, log_prob_s=disturbed), BASE).cost

    assert found.call_s == pytest.approx(TRUTH.call_s, rel=1e-6)
    assert found.log_prob_s_per_token == pytest.approx(TRUTH.log_prob_s_per_token, rel=1e-6)
    random = np.random.default_rng(0)
    amounts = np.stack([np.ones(30), random.uniform(1e3, 1e5, 30), random.uniform(1e6, 1e10, 30)], axis=1)
    truth = np.array([0.0, 3e-6, 2e-10])

    found = fit(amounts @ truth, amounts, 1 / (amounts @ truth))

    np.testing.assert_allclose(found.costs, truth, rtol=1e-9, atol=1e-12)
    assert found.error < 1e-9 and (found.timings, found.left_out) == (30, 0)
    seconds, amounts = np.array([1.0, 1.0, 1.0, 1.0, 9.0]), np.ones((5, 1))

    assert (fit(seconds, amounts).left_out, fit_undisturbed(seconds, amounts).left_out) == (0, 1)
    with pytest.raises(ValueError, match="no timings"):
        fit(np.array([]), np.ones((0, 1)))


def test_a_cost_below_nothing_is_none_and_units_that_come_together_are_told_apart_from_none() -> None:
    amounts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])

    costs = fit(np.array([3.0, 2.0, 1.0]), amounts).costs

    np.testing.assert_allclose(costs, [2.0, 0.0])
    measured = replace(what_it_makes(TRUTH), host_copy_s=np.full(4, 1e-9))

    assert calibrate(measured, BASE).cost.sync_s == 0.0
    random = np.random.default_rng(0)
    tokens = random.uniform(980, 1020, 40)
    seconds = (0.01 + 1e-5 * tokens) * np.exp(0.1 * random.standard_normal(40))

    assert fit(seconds, np.stack([np.ones(40), tokens], axis=1)).doubtful.all()
    assert not fit(seconds, np.stack([np.ones(40)], axis=1)).doubtful.any()
