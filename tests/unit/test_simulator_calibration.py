"""A cost model is found again from the times that it makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.config import CostConfig
from harness.runner.compose import compose_job
from harness.simulator.calibration import Measured, calibrate, fit

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
    offload_s=0.0,
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


def what_it_makes(cost: CostConfig, noise: float = 0.0) -> Measured:
    random = np.random.default_rng(0)

    def noisy(seconds: np.ndarray) -> np.ndarray:
        return seconds * np.exp(noise * random.standard_normal(seconds.shape))

    samples = random.choice([32, 128], size=40).astype(np.float64)
    longest = random.integers(8, 13, size=40).astype(np.float64)
    sampled, prompts = np.rint(samples * random.uniform(4, 7, size=40)), samples * 6
    scored, trained = random.uniform(200, 900, size=(2, 160))
    copy_s = cost.weight_bytes / cost.host_bytes_per_s
    decoding = longest * cost.decode_step_s + sampled * cost.decode_step_s_per_sample
    return Measured(
        generate_s=noisy(decoding + prompts * cost.prefill_s_per_token),
        longest=longest,
        sampled=sampled,
        prompts=prompts,
        wake_s=noisy(np.full(40, cost.reload_s + 2 * copy_s)),
        log_prob_s=noisy(cost.call_s + scored * cost.log_prob_s_per_token),
        log_prob_tokens=scored,
        train_s=noisy(cost.call_s + trained * cost.train_s_per_token),
        train_tokens=trained,
        step_s=noisy(np.full(40, cost.train_step_s)),
        transfer_s=noisy(np.full(80, cost.sync_s + copy_s)),
        lengths=np.array([3, 5, 5, 9]),
        prompt_tokens=6.2,
    )


def test_costs_are_found_again_from_exact_times() -> None:
    found = calibrate(what_it_makes(TRUTH), BASE)

    for name in (*COSTS, *FIXED):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name


def test_costs_are_found_again_from_noisy_times() -> None:
    found = calibrate(what_it_makes(TRUTH, noise=0.05), BASE)

    for name in (*COSTS, *FIXED):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.25), name


def test_lengths_and_prompts_are_those_that_were_seen_and_the_rest_is_kept() -> None:
    found = calibrate(what_it_makes(TRUTH), BASE)

    assert (found.lengths.kind, found.lengths.values, found.lengths.cap) == ("trace", (3, 5, 5, 9), 9)
    assert found.prompt_tokens == 6
    assert (found.name, found.weight_bytes) == (BASE.name, BASE.weight_bytes)
    assert (found.network_bytes_per_s, found.host_bytes_per_s) == (BASE.network_bytes_per_s, BASE.host_bytes_per_s)


def test_one_disturbed_piece_of_work_changes_nothing() -> None:
    measured = what_it_makes(TRUTH)
    disturbed = measured.log_prob_s.copy()
    disturbed[7] *= 20

    found = calibrate(replace(measured, log_prob_s=disturbed), BASE)

    assert found.call_s == pytest.approx(TRUTH.call_s, rel=1e-6)
    assert found.log_prob_s_per_token == pytest.approx(TRUTH.log_prob_s_per_token, rel=1e-6)


def test_a_cost_that_would_be_negative_is_none_and_the_others_are_fitted_without_it() -> None:
    amounts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])

    costs = fit(np.array([3.0, 2.0, 1.0]), amounts)

    np.testing.assert_allclose(costs, [2.0, 0.0])


def test_transfers_faster_than_the_hosts_memory_cost_nothing_beyond_it() -> None:
    measured = replace(what_it_makes(TRUTH), transfer_s=np.full(4, 1e-9))

    assert calibrate(measured, BASE).sync_s == 0.0


def test_costs_per_billion_parameters_cannot_be_fitted_to_one_model() -> None:
    with pytest.raises(ValueError, match="cost=gpu is per billion parameters"):
        calibrate(what_it_makes(TRUTH), compose_job(["cost=gpu"]).cost)
