"""Samples that take longer than their limit: cut where they are, or their groups dropped and others dealt instead."""

from dataclasses import replace

import pytest

from harness.acceptance.chaos.jobs import base
from harness.config import ConfigError, JobConfig, LatencyConfig, LengthsConfig
from harness.config.compose import compose_job
from harness.config.registries import SCHEDULES, find
from harness.driver.session import simulate
from harness.runtime.runtime import parts_of
from tests.support.invariants import check_run
from tests.support.random_jobs import play

HANGS = LatencyConfig(kind="lognormal", mean=0.5, sigma=1.5)  # seconds; the longest of some hundred takes fifty


def limited(schedule: str, what: str, limit_s: float, tools: LatencyConfig | None = HANGS) -> JobConfig:
    config = base(schedule)
    cost = replace(config.cost, lengths=LengthsConfig(kind="lognormal", mean=300.0, sigma=1.0, cap=4000))
    if tools is not None:
        turns = LengthsConfig(kind="lognormal", mean=2.0, sigma=1.0, cap=4)
        cost = replace(cost, turns=turns, tool_latency=tools)
    return replace(
        config,
        iterations=5,
        algorithm=replace(config.algorithm, batch_groups=8, group_size=4, micro_batch_groups=2),
        cost=cost,
        cluster=replace(config.cluster, devices=4),
        engine=replace(config.engine, on_straggler=what, sample_limit_s=limit_s),
    )


def tools_of(schedule: str) -> LatencyConfig | None:
    """What samples of this schedule may play with."""
    return None if find("schedule", schedule).lends else HANGS


@pytest.mark.parametrize(
    ("schedule", "tools"),
    [*((name, tools_of(name)) for name in SCHEDULES), ("colocate_sync", None), ("fully_async", None)],
)
def test_what_takes_too_long_ends_at_its_limit_and_is_trained(schedule: str, tools: LatencyConfig | None) -> None:
    run = play(limited(schedule, "cut", 2.0, tools))
    check_run(run.finished)
    trained = run.finished.trained
    cut = [sample for sample in trained if sample.finish_reason == "cut"]
    assert 0 < len(cut) < len(trained)
    for sample in trained:
        assert sample.finished_at is not None and sample.started_at is not None and sample.response_tokens > 0
        # A decode step, and the time of a transfer, more; what is set aside for a while is there for longer.
        own = find("schedule", schedule)
        assert own.awaits_completion or own.lends or sample.finished_at - sample.started_at < 2.1
    shares = [metrics["straggler/cut"] for metrics in run.metrics]
    assert sum(shares) / len(shares) == pytest.approx(len(cut) / len(trained))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_place_of_a_group_that_takes_too_long_is_dealt_another(schedule: str) -> None:
    tools = tools_of(schedule)
    run = play(limited(schedule, "drop", 4.0 if tools else 2.0, tools))
    check_run(run.finished)  # full batches, a closed ledger, the bounds of the schedule
    dropped = run.finished.counts["dropped_straggler"]
    assert dropped > 0 and dropped == sum(metrics["straggler/dropped"] for metrics in run.metrics) * 4
    assert run.metrics[-1]["ledger/dropped_straggler"] == dropped
    assert run.finished.counts["dropped_filtered"] == 0


def test_a_limit_changes_nothing_without_stragglers_stands_beside_filters_and_may_be_too_low() -> None:
    config = limited("fully_async", "drop", 4.0)
    algorithm = replace(config.algorithm, filter="zero_variance")
    run = play(replace(config, algorithm=algorithm, cost=replace(config.cost, filtered_share=0.3)))
    check_run(run.finished)
    assert run.finished.counts["dropped_straggler"] > 0 and run.finished.counts["dropped_filtered"] > 0
    unlimited = replace(base("fully_async"), iterations=4)
    of_engine = replace(unlimited.engine, on_straggler="cut", sample_limit_s=1e6)
    runs = [play(config).finished for config in (unlimited, replace(unlimited, engine=of_engine))]
    assert runs[0].samples == runs[1].samples and runs[0].timeline.spans == runs[1].timeline.spans
    with pytest.raises(ExceptionGroup) as failure:
        simulate(limited("one_step_off", "drop", 0.01), 0)
    (told,) = {str(part) for part in parts_of(failure.value) if isinstance(part, ConfigError)}
    assert told.startswith("engine.on_straggler=drop after engine.sample_limit_s=0.01 refused ")
    assert "raise engine.sample_limit_s, or raise algorithm.filter_rounds" in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["engine.on_straggler=cut"], "on_straggler=cut needs a limit; set engine.sample_limit_s"),
        (["engine.sample_limit_s=60"], "on_straggler=wait limits nothing; set engine.on_straggler=cut or drop"),
        (["engine.sample_limit_s=0", "engine.on_straggler=cut"], "engine.sample_limit_s"),
        (["engine.on_straggler=kill"], "engine.on_straggler"),
    ],
)
def test_a_limit_that_cannot_be_is_one_line(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_job(settings)
    assert told in str(refused.value) and "\n" not in str(refused.value)
