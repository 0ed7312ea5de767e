"""Costs are found again from runs that were simulated with them, by what the timeline and the samples say."""

from dataclasses import asdict, replace
from functools import cache

import pandas as pd
import pytest

from harness.calibration.recorded import WorkTimes, decode_steps, measured, together, turns
from harness.calibration.runs import calibrate
from harness.config import CostConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.driver.session import simulate
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span

ALONE = ("schedule=colocate_sync", "cluster.devices=1")
APART = ("schedule=separated_sync", "schedule.streaming=false", "cluster.devices=3", "schedule.split.rollout=2")
TRUTH = CostConfig(
    name="truth",
    decode_step_s=0.02,
    decode_step_s_per_sample=3e-4,
    prefill_s_per_token=2e-5,
    log_prob_s_per_token=2e-5,
    train_s_per_token=7e-5,
    train_step_s=0.4,
    weight_bytes=501248.0,
    call_s=0.06,
    network_bytes_per_s=5e6,
    host_bytes_per_s=5e7,
    sync_s=0.05,
    offload_s=0.07,
    reload_s=0.1,
    prompt_tokens=32,
    lengths=LengthsConfig(kind="lognormal", mean=40, sigma=0.7, cap=200),
)
LONG = replace(
    TRUTH,
    decode_s_per_cached_token=2e-7,
    prefill_s_per_pair=4e-9,
    log_prob_s_per_pair=4e-9,
    train_s_per_pair=2e-8,
    prompt_tokens=400,
    lengths=LengthsConfig(kind="lognormal", mean=500, sigma=0.7, cap=2000),
)
COSTS = (
    "decode_step_s",
    "decode_step_s_per_sample",
    "prefill_s_per_token",
    "log_prob_s_per_token",
    "train_s_per_token",
)
FIXED = ("call_s", "train_step_s", "sync_s", "reload_s", "offload_s")
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
    base = replace(TRUTH, decode_step_s=1.0, train_s_per_token=1.0, reload_s=9.0, offload_s=9.0)

    found = calibrate(runs(TRUTH, *ALONE), base)

    for name in (*COSTS, *FIXED):
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert all(phase.error is not None and phase.error < 1e-6 for phase in found.phases)


@pytest.mark.parametrize("where", [ALONE, APART])
def test_of_several_optimizer_steps_a_batch_the_same_is_found(where: tuple[str, ...]) -> None:
    several = ("algorithm.mini_batches=2", "algorithm.epochs=3", "algorithm.correction=decoupled")
    base = replace(TRUTH, decode_step_s=1.0, train_s_per_token=1.0, train_step_s=9.0)

    found = calibrate(runs(TRUTH, *where, *several, "algorithm.proximal=trainer"), base)

    for name in (*COSTS, "call_s", "train_step_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name


def test_pools_of_their_own_show_all_but_what_sharing_costs() -> None:
    base = replace(TRUTH, decode_step_s=1.0, train_s_per_token=1.0, reload_s=9.0, offload_s=8.0)

    found = calibrate(runs(TRUTH, *APART), base)

    for name in (*COSTS, "call_s", "train_step_s", "sync_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert (found.cost.reload_s, found.cost.offload_s) == (9.0, 8.0)
    assert {"reload_s", "offload_s", "network_bytes_per_s", "host_bytes_per_s"} <= set(found.unseen)


def test_attention_and_slots_are_told_apart_in_longer_runs() -> None:
    found = calibrate(runs(LONG, *ALONE), TRUTH)

    for name in (*COSTS, *PAIRS, "call_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(LONG, name), rel=1e-6), name
    found = calibrate(runs(TRUTH, *ALONE, slots=16), TRUTH)

    assert found.cost.decode_step_s == pytest.approx(TRUTH.decode_step_s, rel=0.05)  # groups start whole
    assert decode_steps([5, 3, 4, 2], 2) == 7
    assert decode_steps([5, 3, 4, 2], 9) == 5


def test_calls_of_one_size_make_scoring_a_third_of_training() -> None:
    one_size = replace(TRUTH, lengths=LengthsConfig(kind="constant", mean=40, cap=40))

    found = calibrate(simulated(one_size, 128, *ALONE), TRUTH).cost

    assert found.train_s_per_token == pytest.approx(3 * found.log_prob_s_per_token)
    tokens = 8 * 4 * (32 + 40)
    for per_token, name in ((found.log_prob_s_per_token, "log_prob"), (found.train_s_per_token, "train")):
        truth = TRUTH.call_s + tokens * getattr(TRUTH, f"{name}_s_per_token")
        assert found.call_s + tokens * per_token == pytest.approx(truth, rel=0.01), name


def test_runs_that_lagged_or_ended_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="some samples lagged.*use a run of a synchronous schedule"):
        simulated(TRUTH, 128, "schedule=one_step_off", "cluster.devices=2")
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
