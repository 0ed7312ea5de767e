"""A cost model is found again from the times that it makes, and from runs that were simulated with it, by what the
timeline and the samples say."""

from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

from harness.calibration.fitting import fit, fit_undisturbed
from harness.calibration.recorded import WorkTimes, decode_steps, measured, together, turns
from harness.calibration.runs import calibrate, trace
from harness.config import CostConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.driver.session import simulate
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span

BASE = compose_job(["cost=tiny_cpu"]).cost
TRUTH = replace(
    BASE, decode_step_s=0.002, decode_step_s_per_sample=3e-5, prefill_s_per_token=1e-5, log_prob_s_per_token=1e-5,
    train_s_per_token=3.1e-5, train_step_s=0.004, call_s=0.006, sync_s=0.005, offload_s=0.003, reload_s=0.01,
    prompt_tokens=6,
)  # fmt: skip
COSTS = ("decode_step_s", "decode_step_s_per_sample")
COSTS += tuple(f"{work}_s_per_token" for work in ("prefill", "log_prob", "train"))
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
        generate_s=noisy(decoding + prompts * cost.prefill_s_per_token), steps=longest, sampled=sampled,
        cached=sampled * 9, prompts=prompts, prompt_pairs=prompts * 6,
        wake_s=noisy(np.full(40, cost.reload_s + copy_s)), sleep_s=noisy(np.full(40, cost.offload_s + copy_s)),
        log_prob_s=noisy(cost.call_s + scored * cost.log_prob_s_per_token), log_prob_tokens=scored,
        log_prob_pairs=scored * 12, train_s=noisy(cost.call_s + trained * cost.train_s_per_token),
        train_tokens=trained, train_pairs=trained * 12, step_s=noisy(np.full(40, cost.train_step_s)),
        host_copy_s=noisy(np.full(80, cost.sync_s + copy_s)), broadcast_s=np.array([]),
        lengths=np.array([3, 5, 5, 9]), prompt_tokens=6.2,
    )  # fmt: skip


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


# -- from simulated runs

ALONE = ("schedule=colocate_sync", "cluster.devices=1")
APART = ("schedule=separated_sync", "schedule.streaming=false", "cluster.devices=3", "schedule.split.rollout=2")
RUN = replace(TRUTH, prompt_tokens=32, lengths=LengthsConfig(kind="lognormal", mean=40, sigma=0.7, cap=200))
LONG = replace(
    RUN,
    decode_s_per_cached_token=2e-7,
    prefill_s_per_pair=4e-9,
    log_prob_s_per_pair=4e-9,
    train_s_per_pair=2e-8,
    prompt_tokens=400,
    lengths=LengthsConfig(kind="lognormal", mean=500, sigma=0.7, cap=2000),
)
PAIRS = ("decode_s_per_cached_token", "prefill_s_per_pair", "log_prob_s_per_pair", "train_s_per_pair")


@cache
def simulated(cost: CostConfig, slots: int, *settings: str) -> WorkTimes:
    job = compose_job(["cost=tiny_cpu", "iterations=4", "algorithm.group_size=4", *settings])
    job = replace(job, cost=cost, engine=replace(job.engine, slots=slots))
    run = simulate(job, 0)
    samples = pd.DataFrame([asdict(sample) for sample in run.samples()])
    algorithm = job.algorithm
    return measured(
        run.timeline,
        samples,
        slots=slots,
        micro_batch=algorithm.micro_batch_groups * algorithm.group_size,
        warmup=1,
        mini_batches=algorithm.mini_batches,
        epochs=algorithm.epochs,
    )


def runs(cost: CostConfig, *settings: str, slots: int = 128) -> WorkTimes:
    """Two of them, of different micro-batches."""
    sizes = (("algorithm.micro_batch_groups=4",), ("algorithm.batch_groups=8", "algorithm.micro_batch_groups=2"))
    return together([simulated(cost, slots, *settings, *size) for size in sizes])


def test_all_that_shows_on_one_shared_device_is_found_again() -> None:
    base = replace(RUN, decode_step_s=1.0, train_s_per_token=1.0, reload_s=9.0, offload_s=9.0)
    found = calibrate(runs(RUN, *ALONE), base)
    for name in (*COSTS, *FIXED):
        assert getattr(found.cost, name) == pytest.approx(getattr(RUN, name), rel=1e-6), name
    assert all(phase.error is not None and phase.error < 1e-6 for phase in found.phases)


@pytest.mark.parametrize("where", [ALONE, APART])
def test_of_several_optimizer_steps_a_batch_the_same_is_found(where: tuple[str, ...]) -> None:
    several = ("algorithm.mini_batches=2", "algorithm.epochs=3", "algorithm.correction=decoupled")
    base = replace(RUN, decode_step_s=1.0, train_s_per_token=1.0, train_step_s=9.0)
    found = calibrate(runs(RUN, *where, *several, "algorithm.proximal=trainer"), base)
    for name in (*COSTS, "call_s", "train_step_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(RUN, name), rel=1e-6), name


def test_pools_of_their_own_show_all_but_what_sharing_costs() -> None:
    base = replace(RUN, decode_step_s=1.0, train_s_per_token=1.0, reload_s=9.0, offload_s=8.0)
    found = calibrate(runs(RUN, *APART), base)
    for name in (*COSTS, "call_s", "train_step_s", "sync_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(RUN, name), rel=1e-6), name
    assert (found.cost.reload_s, found.cost.offload_s) == (9.0, 8.0)
    assert {"reload_s", "offload_s", "network_bytes_per_s", "host_bytes_per_s"} <= set(found.unseen)


def test_attention_and_slots_are_told_apart_in_longer_runs() -> None:
    found = calibrate(runs(LONG, *ALONE), RUN)
    for name in (*COSTS, *PAIRS, "call_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(LONG, name), rel=1e-6), name
    found = calibrate(runs(RUN, *ALONE, slots=16), RUN)
    assert found.cost.decode_step_s == pytest.approx(RUN.decode_step_s, rel=0.05)  # groups start whole
    assert decode_steps([5, 3, 4, 2], 2) == 7
    assert decode_steps([5, 3, 4, 2], 9) == 5


def test_calls_of_one_size_make_scoring_a_third_of_training() -> None:
    one_size = replace(RUN, lengths=LengthsConfig(kind="constant", mean=40, cap=40))
    found = calibrate(simulated(one_size, 128, *ALONE), RUN).cost
    assert found.train_s_per_token == pytest.approx(3 * found.log_prob_s_per_token)
    tokens = 8 * 4 * (32 + 40)
    for per_token, name in ((found.log_prob_s_per_token, "log_prob"), (found.train_s_per_token, "train")):
        truth = RUN.call_s + tokens * getattr(RUN, f"{name}_s_per_token")
        assert found.call_s + tokens * per_token == pytest.approx(truth, rel=0.01), name


def test_runs_that_lagged_or_ended_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="some samples lagged.*use a run of a synchronous schedule"):
        simulated(RUN, 128, "schedule=one_step_off", "cluster.devices=2")
    timeline = Timeline({("rollout", "0"): Place("all", ("device 0",))})
    timeline.end_iteration(0, 1.0)
    with pytest.raises(ValueError, match="1 iterations are no more than the 4"):
        measured(timeline, pd.DataFrame(), slots=1, micro_batch=1, warmup=4)


def test_a_turn_has_the_time_before_it_in_which_nobody_worked() -> None:
    places = {("rollout", "0"): Place("a", ("device 0",)), ("actor", "0"): Place("b", ("device 1",))}
    places |= {("reward", "0"): Place("host", ("host",))}
    timeline = Timeline(places)
    timeline.add(
        [
            Span("rollout", "0", "generate", 1.0, 4.0, 0, 0),
            Span("reward", "0", "reward", 4.0, 4.4, 0, 0),
            Span("actor", "0", "wait_for_samples", 0.0, 4.5, 0, 0),
            Span("actor", "0", "update_actor", 4.5, 6.0, 0, 0),
            Span("actor", "0", "publish_weights", 6.25, 7.0, 1, 0),
            Span("rollout", "0", "load_weights", 6.5, 7.0, 1, 0),
        ]
    )
    timeline.end_iteration(0, 7.0)
    found = {turn.span.kind: turn.seconds for turn in turns(timeline)[0]}
    expected = {"generate": 4.0, "update_actor": 2.0, "publish_weights": 1.0, "load_weights": 0.5}
    assert found == pytest.approx(expected)
