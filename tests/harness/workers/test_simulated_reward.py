"""Rewards that take time: on the host, one sample after the other, while engines go on generating."""

from dataclasses import replace

import pytest

from harness.config import CostConfig
from harness.config.compose import compose_job
from harness.driver.session import simulate
from harness.protocols import Span

GROUP, BATCH, ITERATIONS = 2, 4, 2


def spans(schedule: str, sample_s: float) -> list[Span]:
    settings = ["cost=tiny_cpu", f"schedule={schedule}", f"iterations={ITERATIONS}", "cluster.devices=4"]
    sizes = [f"algorithm.batch_groups={BATCH}", f"algorithm.group_size={GROUP}", "algorithm.micro_batch_groups=1"]
    config = compose_job([*settings, *sizes, "backend=virtual"])
    assert isinstance(config.cost, CostConfig)
    return list(simulate(replace(config, cost=replace(config.cost, reward_s_per_sample=sample_s)), 0).timeline.spans)


@pytest.mark.parametrize("schedule", ["separated_sync", "fully_async"])
def test_scoring_takes_its_time_in_turn_and_beside_generation(schedule: str) -> None:
    seen = spans(schedule, 0.002)
    scored = sorted((span.start, span.end) for span in seen if span.role == "reward")
    assert sum(end - start for start, end in scored) == pytest.approx(ITERATIONS * BATCH * GROUP * 0.002)
    assert all(end - start <= GROUP * 0.002 + 1e-9 for start, end in scored), "who waits for a group gets it early"
    assert all(before[1] <= after[0] for before, after in zip(scored[:-1], scored[1:], strict=True))
    generated = [(span.start, span.end) for span in seen if span.kind == "generate"]
    assert any(
        start < end_of_one and end > start_of_one for start, end in generated for start_of_one, end_of_one in scored
    )


def test_slow_rewards_hold_up_training_and_free_ones_do_not() -> None:
    def trained_at(sample_s: float) -> float:
        return max(span.end for span in spans("separated_sync", sample_s) if span.role == "actor")

    free, slow = trained_at(0.0), trained_at(1.0)
    assert ITERATIONS * BATCH * GROUP < slow < ITERATIONS * BATCH * GROUP + free
