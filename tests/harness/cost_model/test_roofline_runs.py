"""Whole simulated runs under roofline costs: never faster than the work allows, and better devices never slower."""

import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.checks.layout import device_roles, training_ranks
from harness.config import CostConfig, JobConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.config.placement import Placement, resolve_split
from harness.config.registries import SCHEDULES, find
from harness.cost_model.job_cost import simulated_cost
from harness.driver.recorder import Recorder
from harness.driver.session import simulate
from tests.support.every_schedule import EVERY_SCHEDULE
from tests.support.examples import examples

FIGURES = ("flops", "memory_bytes_per_s", "link_bytes_per_s")
APART = [name for name in SCHEDULES if not find("schedule", name).colocated]


def tail(sigma: float, mean: float = 1000.0, values: int = 32) -> LengthsConfig:
    """Quantiles of a log-normal, scaled to this mean: a wider one has the same mean, to a token."""
    drawn = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / values)) for i in range(values)]
    scaled = [max(1, round(mean * values * one / sum(drawn))) for one in drawn]
    return LengthsConfig(kind="trace", cap=max(scaled), values=tuple(scaled))


@cache
def base(schedule: str) -> JobConfig:
    return compose_job(
        [
            f"schedule={schedule}",
            *("backend=virtual", "model=qwen0.5b", "iterations=5", "warmup_iterations=1", "cluster.devices=64"),
            *(
                "algorithm.batch_groups=8",
                "algorithm.group_size=2",
                "algorithm.micro_batch_groups=1",
                "algorithm.reference=true",
            ),
            "device.per_node=64",  # whatever the number of devices, weights travel over links
        ]
    )


def job(schedule: str, engines: int = 4, ranks: int = 2, sigma: float = 0.8, **figures: float) -> JobConfig:
    """figures: factors on the device's."""
    config = base(schedule)
    apart: dict[str, int | str] = {"rollout": engines, "actor": ranks, "actor_fwd": "actor", "reference": "actor"}
    apart |= {"lent": "actor"} if find("schedule", schedule).lends else {}
    split = apart if schedule in APART else apart | {"rollout": "actor", "actor": engines}
    return replace(
        config,
        schedule=replace(config.schedule, split=split),
        cost=replace(config.cost, lengths=tail(sigma)),
        device=replace(config.device, **{name: by * getattr(config.device, name) for name, by in figures.items()}),
    )


def placement_of(config: JobConfig) -> Placement:
    return resolve_split(config.schedule.split, config.cluster.devices, device_roles(config))


def seconds(recorder: Recorder) -> float:
    start, end = recorder.timeline.elapsed_window()
    return end - start


# -- never below the bound


def least_seconds(config: JobConfig, cost: CostConfig, recorder: Recorder) -> float:
    """What no schedule could be faster than, by the costs alone: the work of each pool over its workers, the longest
    sample from its first token to its last."""
    placement = placement_of(config)
    trained = [sample for sample in recorder.samples() if sample.fate == "trained"]
    tokens = sum(sample.response_tokens for sample in trained)
    whole = [sample.prompt_tokens + sample.response_tokens for sample in trained]
    engines = len(placement.devices["rollout"]) // config.engine.tensor_parallel
    of_rollout = tokens * cost.decode_step_s_per_sample / engines
    of_longest = max(sample.response_tokens for sample in trained) * (cost.decode_step_s + cost.decode_weights_s)
    passes = sum(one * cost.train_s_per_token + one**2 * cost.train_s_per_pair for one in whole)
    of_actor = passes / training_ranks(config, placement) + config.iterations * cost.train_step_s
    return max(of_rollout, of_longest, of_actor)


@st.composite
def jobs(draw: st.DrawFn, schedule: str) -> JobConfig:
    """Pools, layouts, devices from slow to fast, short caches, tails."""
    together, tensor, pipeline = (draw(st.sampled_from([1, 2])) for _ in range(3))
    engines, ranks = draw(st.integers(2, 3)), draw(st.sampled_from([1, 2]))
    shared = math.lcm(together, tensor * pipeline)
    each = shared if find("schedule", schedule).lends else tensor * pipeline
    sizes = (engines * together, ranks * each) if schedule in APART else (2 * shared, 0)
    figures = {name: draw(st.sampled_from([0.1, 1.0, 10.0])) for name in FIGURES}
    config = job(schedule, *sizes, sigma=draw(st.sampled_from([0.1, 0.8, 1.5])), **figures)
    return replace(
        config,
        iterations=draw(st.integers(1, 4)),
        engine=replace(config.engine, tensor_parallel=together, slots=draw(st.sampled_from([2, 8, 64]))),
        training=replace(config.training, tensor_parallel=tensor, pipeline_parallel=pipeline),
    )


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_no_run_is_faster_than_its_work(schedule: str) -> None:
    @settings(max_examples=examples(6, least=3), suppress_health_check=list(HealthCheck))
    @given(config=jobs(schedule), seed=st.integers(0, 3))
    def holds(config: JobConfig, seed: int) -> None:
        recorder = simulate(config, seed)
        cost = simulated_cost(config, placement_of(config))
        assert 0 < recorder.timeline.fraction_of_bound() <= 1 + 1e-9
        assert seconds(recorder) >= least_seconds(config, cost, recorder) * (1 - 1e-9)
        for role in recorder.timeline.roles:
            assert -1e-9 <= recorder.timeline.idle(role) <= 1

    holds()


# -- better is never slower, worse never faster


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_more_of_what_is_short_never_slows_a_run_and_a_heavier_tail_never_speeds_it(schedule: str) -> None:
    """Rollout is the bottleneck of these jobs."""
    usual = seconds(simulate(job(schedule), 0))
    assert seconds(simulate(job(schedule, engines=8), 0)) <= usual
    assert seconds(simulate(job(schedule, memory_bytes_per_s=2.0), 0)) <= usual
    assert seconds(simulate(job(schedule, flops=2.0), 0)) <= usual
    assert seconds(simulate(job(schedule, sigma=0.01), 0)) <= usual <= seconds(simulate(job(schedule, sigma=1.4), 0))


# -- by hand


@pytest.mark.parametrize("devices", [1, 4])
def test_a_colocated_run_of_constant_lengths_without_switching_equals_arithmetic_by_hand(devices: int) -> None:
    config = job("colocate_sync", engines=devices)
    length, groups, group = 700, 8, 2
    factors = replace(
        config.cost,
        lengths=LengthsConfig(kind="constant", mean=float(length), cap=length),
        **dict.fromkeys(("sync_s", "offload_s", "reload_s"), 0.0),
    )
    config = replace(config, cost=factors, device=replace(config.device, host_bytes_per_s=1e30))
    cost = simulated_cost(config, placement_of(config))
    n, prompt = groups * group // devices, factors.prompt_tokens
    step = cost.decode_step_s + max(cost.decode_weights_s, n * cost.decode_step_s_per_sample)
    cached = sum(n * (prompt + done) for done in range(length))  # tokens in the cache, over all steps
    generate = length * step + cached * cost.decode_s_per_cached_token
    generate += n * (prompt * cost.prefill_s_per_token + prompt**2 * cost.prefill_s_per_pair)
    calls, whole = groups // devices, prompt + length  # a group for each rank in a call
    score = cost.call_s + cost.log_prob_call_s
    score += group * (whole * cost.log_prob_s_per_token + whole**2 * cost.log_prob_s_per_pair)
    train = cost.call_s + cost.train_call_s
    train += group * (whole * cost.train_s_per_token + whole**2 * cost.train_s_per_pair)
    by_hand = generate + calls * (2 * score + train) + cost.train_step_s
    ends = list(simulate(config, 0).timeline.iteration_ends.values())
    lasted = [after - before for before, after in zip([0.0, *ends], ends, strict=False)]
    assert lasted == pytest.approx([by_hand] * config.iterations, rel=1e-9)


# -- engines and ranks of several devices


def test_an_engine_of_two_devices_keeps_both_busy() -> None:
    config = job("fully_async", engines=4, ranks=4)
    config = replace(
        config, engine=replace(config.engine, tensor_parallel=2), training=replace(config.training, tensor_parallel=2)
    )
    timeline = simulate(config, 0).timeline
    engines = [place for (role, _), place in timeline.placement.items() if role == "rollout"]
    assert [place.devices for place in engines] == [("device 0", "device 1"), ("device 2", "device 3")]
    (actor,) = [place for (role, _), place in timeline.placement.items() if role == "actor"]
    assert len(actor.devices) == 4
    generated = {
        engine: sum(s.end - s.start for s in timeline.spans if s.engine == engine and s.kind == "generate")
        for engine in ("0", "1")
    }
    busy = timeline.busy_seconds("rollout", timeline.elapsed_window())
    assert busy == pytest.approx(sum(generated.values()) / 2, rel=0.05), "a mean over devices is one over engines"
