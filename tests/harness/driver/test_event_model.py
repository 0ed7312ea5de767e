"""The fast event model against the schedules' own files on the virtual clock, draw by draw."""

from __future__ import annotations

import numpy as np
import pytest

from harness.config import JobConfig
from harness.config.compose import compose_job
from harness.config.registries import SCHEDULES
from harness.driver.event_model import difference, fast_steps, simulated_steps

SMALL = ["algorithm.batch_groups=16", "algorithm.group_size=2", "iterations=5"]
MEDIUM = ["algorithm.batch_groups=64", "algorithm.group_size=8", "iterations=4"]
SIZES = pytest.mark.parametrize(("size", "seeds"), [(SMALL, (0, 1)), (MEDIUM, (0,))], ids=["small", "medium"])


def job(schedule: str, *settings: str) -> JobConfig:
    split = ["schedule.split.rollout=actor", "schedule.split.actor=16"]
    if schedule != "colocate_sync":
        split = ["schedule.split.rollout=8", "schedule.split.actor=8"]
    beside = ["schedule.split.actor_fwd=actor", "schedule.split.reference=actor"]
    return compose_job(
        [
            *(f"schedule={schedule}", "model=qwen7b", "cluster.devices=16", "backend=virtual"),
            *("training.recompute_activations=true", "algorithm.micro_batch_groups=1", *split, *beside, *settings),
        ]
    )


@SIZES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_the_schedules_own_file_draw_by_draw(schedule: str, size: list[str], seeds: tuple[int, ...]) -> None:
    config = job(schedule, *size)
    for seed in seeds:
        fast, own = fast_steps(config, seed), simulated_steps(config, seed)
        assert fast.not_covered == ""
        for name in ("seconds", "generate_s", "wait_s", "lag_mean", "lag_worst"):
            np.testing.assert_allclose(getattr(fast, name), getattr(own, name), rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("fully_async", ["schedule.pause=abort", "schedule.max_staleness=2.5", "engine.slots=25"]),
        ("fully_async", ["schedule.pause=wait", "schedule.publish_every=2", "algorithm.kl_coef=.1"]),
        ("fully_async", ["schedule.order=completion", "schedule.on_stale=drop", "algorithm.kl_coef=.1"]),
        ("fully_async", ["schedule.order=completion", "schedule.on_stale=drop", "cost.reward_s_per_sample=.001"]),
        ("half_step", ["schedule.pause=wait", "algorithm.mini_batches=2"]),
        ("k_step_off", ["schedule.k=3", "schedule.split.actor_fwd=2", "schedule.split.rollout=6"]),
        ("delayed_update", ["cost.reward_s_per_sample=.02", "schedule.split.actor_fwd=2", "schedule.split.rollout=6"]),
        ("separated_sync", ["schedule.streaming=false", "algorithm.epochs=2", "engine.slots=20"]),
    ],
)  # fmt: skip
def test_where_order_at_equal_times_is_another_it_is_near(schedule: str, settings: list[str]) -> None:
    assert difference(job(schedule, *MEDIUM, *settings), 0) < 0.05


@pytest.mark.parametrize("schedule", ["colocate_sync", "one_step_off", "fully_async"])
def test_evaluation_checkpoints_conversion_and_other_dealing_last_as_in_the_simulation(schedule: str) -> None:
    costs = ["evaluation={seconds:9,every:2}", "checkpoint={seconds:7,every:3}", "convert_s=.3", "buckets=4"]
    others = [f"cost.{name}" for name in (*costs, "bucket_s=.01", "dealing=in_order", "padding=true")]
    steps = [*SMALL, "algorithm.batch_groups=32", "algorithm.mini_batches=2"]
    config = job(schedule, *steps, "cost.lengths.drift=1.2", *others)
    fast, own = fast_steps(config, 0), simulated_steps(config, 0)
    assert fast.not_covered == ""
    np.testing.assert_allclose(fast.seconds, own.seconds, rtol=1e-9)
    without = simulated_steps(job(schedule, *steps), 0)
    assert own.seconds.sum() > without.seconds.sum()


@SIZES
@pytest.mark.parametrize(
    "settings",
    [
        ["schedule.on_stale=drop", "schedule.max_staleness=.5"],
        ["schedule.on_stale=drop", "algorithm.recompute_log_probs=false", "algorithm.micro_batch_groups=2"],
        ["schedule.on_stale=drop", "schedule.publish_every=2", "algorithm.mini_batches=2", "schedule.pause=abort"],
        ["schedule.on_stale=wait", "schedule.max_staleness=1", "algorithm.micro_batch_groups=2"],
    ],
)
def test_as_completed_it_trains_drops_and_replaces_what_the_schedules_file_does(
    settings: list[str], size: list[str], seeds: tuple[int, ...]
) -> None:
    config = job("fully_async", *size, "schedule.order=completion", *settings)
    for seed in seeds:
        fast, own = fast_steps(config, seed), simulated_steps(config, seed)
        assert (fast.not_covered, fast.dropped) == ("", own.dropped)
        for name in ("seconds", "generate_s", "wait_s", "lag_mean", "lag_worst"):
            np.testing.assert_allclose(getattr(fast, name), getattr(own, name), rtol=1e-9, atol=1e-9, err_msg=name)


def test_what_it_does_not_cover_is_simulated_and_says_so() -> None:
    config = job("fully_async", *SMALL, "schedule.order=harness.transfer_queue.control.policies:Ready")
    found = fast_steps(config, 0)
    assert found.not_covered.startswith("order=harness")
    np.testing.assert_array_equal(found.seconds, simulated_steps(config, 0).seconds)
