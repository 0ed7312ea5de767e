"""The fast event model against the schedules' own files on the virtual clock: random jobs, draw by draw."""

from dataclasses import replace

import numpy as np
import pytest

from harness.checks.layout import device_roles
from harness.config import JobConfig
from harness.config.compose import compose_job
from harness.config.placement import resolve_split
from harness.config.registries import find
from harness.cost_model.job_cost import simulated_cost
from harness.driver.event_model import fast_steps, simulated_steps
from harness.runtime.runtime import parts_of
from tests.support.every_schedule import EVERY_SCHEDULE

NEAR = 0.05
"""Of a step: how far the end of any of these may be (of others: docs/planner.md), where samples are rewarded one by one
for a filter that hears of groups, or groups of several batches come back."""

OF_ALL: dict[str, tuple[object, ...]] = {
    "algorithm.group_size": (2, 4, 8),
    "algorithm.mini_batches": (1, 2),
    "engine.slots": (8, 24, 256),
    "cost.prompt_tokens": (100, 512, 2000),
    "cost.prefix_caching": ("false", "true"),
    "cost.step_tokens": ("null", 64, 600),
    "cost.dealing": ("balanced", "in_order"),
    "cost.padding": ("false", "true"),
    "cost.evaluation": ("{seconds:0,every:1}", "{seconds:9,every:2}"),
    "cost.checkpoint": ("{seconds:0,every:1}", "{seconds:7,every:3}"),
    "cost.convert_s": (0, 0.3),
    "cost.reward_s_per_sample": (0, 0.02),
    "algorithm.kl_coef": (0, 0.1),
}
FILTERS: tuple[list[str], ...] = ([], ["algorithm.filter=zero_variance", "cost.filtered_share=.3"])
OF_SCHEDULE: dict[str, dict[str, tuple[object, ...]]] = {
    "separated_sync": {"schedule.streaming": ("true", "false"), "algorithm.epochs": (1, 2)},
    "k_step_off": {"schedule.k": (2, 3)},
    "half_step": {"schedule.pause": ("keep", "wait")},
    "lending": {
        "schedule.max_staleness": (0, 1, 2.5),
        "schedule.order": ("fifo", "completion"),
        "schedule.share": (0.1, 0.4, 1.0),
        "schedule.patience_s": (0.01, 1.0),
        "schedule.split.rollout": (2, 4),
    },
    "windowed": {
        "schedule.pause": ("keep", "abort", "wait"),
        "schedule.max_staleness": (0, 1, 2.5),
        "schedule.window": (0, 0.1, 0.5, 2),
        "cost.reward_s_per_sample": (0,),
    },
    "fully_async": {
        "schedule.pause": ("keep", "abort", "wait"),
        "schedule.max_staleness": (1, 2.5),
        "schedule.publish_every": (1, 2),
        "schedule.order": ("fifo", "completion"),
        "schedule.on_stale": ("wait", "drop"),
        "engine.keep_cache": ("false", "true"),
    },
}
CACHES = (None, 10_500, 25_000)
"""Tokens that the KV cache of an engine holds."""


def job(schedule: str, *settings: str) -> JobConfig:
    split = ["schedule.split.rollout=actor", "schedule.split.actor=16"]
    if not find("schedule", schedule).colocated:
        split = ["schedule.split.rollout=8", "schedule.split.actor=8"]
    if find("schedule", schedule).lends:
        split.append("schedule.split.lent=actor")
    beside = ["schedule.split.actor_fwd=actor", "schedule.split.reference=actor"]
    return compose_job(
        [
            *(f"schedule={schedule}", "model=qwen7b", "cluster.devices=16", "backend=virtual"),
            *("training.recompute_activations=true", "algorithm.micro_batch_groups=1", *split, *beside, *settings),
        ]
    )


def random_job(schedule: str, number: int) -> JobConfig:
    random = np.random.default_rng((number, *schedule.encode()))
    knobs = OF_ALL | OF_SCHEDULE.get(schedule, {})
    settings = [f"{name}={random.choice(np.array(values, object))}" for name, values in knobs.items()]
    settings += FILTERS[0 if find("schedule", schedule).lends else random.integers(2)]
    if "schedule.order=fifo" in settings and "schedule.on_stale=drop" in settings:
        settings.remove("schedule.on_stale=drop")
    config = job(schedule, "algorithm.batch_groups=32", "iterations=4", *settings)
    placement = resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))
    room = CACHES[random.integers(len(CACHES))]
    return replace(config, cost=replace(simulated_cost(config, placement), kv_tokens=room))


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_it_is_the_schedules_own_file_draw_by_draw(schedule: str, number: int) -> None:
    config = random_job(schedule, number)
    fast, own = fast_steps(config, number), simulated_steps(config, number)
    assert fast.not_covered == ""
    if config.refills and (schedule == "k_step_off" or config.cost.reward_s_per_sample):
        apart = np.abs(np.cumsum(fast.seconds) - np.cumsum(own.seconds)).max()
        assert apart < NEAR * own.seconds.mean()
        return
    assert fast.dropped == own.dropped
    for name in ("seconds", "generate_s", "wait_s", "lag_mean", "lag_worst", "lag_first"):
        np.testing.assert_allclose(getattr(fast, name), getattr(own, name), rtol=1e-9, atol=1e-9, err_msg=name)
    first = fast_steps(config, number, until=2)
    for name in ("seconds", "generate_s", "wait_s", "lag_mean", "lag_worst", "lag_first", "longest_s", "exposed_s"):
        np.testing.assert_array_equal(getattr(first, name), getattr(fast, name)[:2], err_msg=name)


@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_that_drift_and_scorers_of_their_own_are_simulated_alike(seed: int) -> None:
    split = ["schedule.split.actor_fwd=2", "schedule.split.rollout=6", "cost.lengths.drift=1.2"]
    config = job("delayed_update", "algorithm.batch_groups=16", "algorithm.group_size=2", "iterations=4", *split)
    np.testing.assert_allclose(fast_steps(config, seed).seconds, simulated_steps(config, seed).seconds, rtol=1e-9)


def test_what_it_does_not_cover_is_simulated_and_says_so() -> None:
    order = "schedule.order=harness.transfer_queue.control.policies:Ready"
    config = job("fully_async", "algorithm.batch_groups=16", "algorithm.group_size=2", "iterations=2", order)
    found = fast_steps(config, 0)
    assert found.not_covered.startswith("order=harness")
    np.testing.assert_array_equal(found.seconds, simulated_steps(config, 0).seconds)


def test_a_filter_that_refuses_too_many_ends_both() -> None:
    filters = ["algorithm.filter=zero_variance", "cost.filtered_share=.9", "algorithm.filter_rounds=2"]
    config = job("one_step_off", "algorithm.batch_groups=16", "algorithm.group_size=2", "iterations=2", *filters)
    for steps in (fast_steps, simulated_steps):
        with pytest.raises(ExceptionGroup) as refused:
            steps(config, 0)
        assert [str(part).count("algorithm.filter_rounds=2") for part in parts_of(refused.value)] == [1]
