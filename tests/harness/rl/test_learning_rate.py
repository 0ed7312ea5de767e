from dataclasses import replace
from itertools import pairwise

import pytest

from harness.config import TrainingConfig
from harness.config.compose import compose_job
from harness.cost_model.shape import parameters
from harness.rl.learning_rate import learning_rate, peak_rate, policy_settings

JOB = compose_job([])
STEPS = 20


def rates(*settings: str) -> list[float]:
    algorithm = compose_job([f"algorithm.{setting}" for setting in settings]).algorithm
    return [learning_rate(algorithm, 1, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize(("model", "rate"), [("tiny", 5e-4), ("qwen0.5b", 1e-6), ("qwen7b", 1e-6)])
def test_auto_goes_by_the_size_of_the_model(model: str, rate: float) -> None:
    assert peak_rate(JOB.algorithm, parameters(compose_job([f"model={model}"]).model)) == rate


def test_a_rate_that_is_given_stays_without_warm_up_rises_with_it_and_need_not_decay() -> None:
    assert peak_rate(replace(JOB.algorithm, learning_rate=0.01), 10**9) == 0.01
    adapters = TrainingConfig(lora_rank=8)
    assert policy_settings(JOB.algorithm, adapters, 10**9).learning_rate == pytest.approx(1e-5)
    assert policy_settings(replace(JOB.algorithm, learning_rate=0.01), adapters, 10**9).learning_rate == 0.01
    assert set(rates("learning_rate=5e-4")) == {5e-4}
    found = rates("learning_rate=1.0", "warmup_steps=4")
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and found[-1] == 1.0
    algorithm = replace(JOB.algorithm, learning_rate=1.0, warmup_steps=30, decay="linear")
    assert [learning_rate(algorithm, 1, step, STEPS) for step in (0, 19)] == [1 / 30, 20 / 30]


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_it_falls_to_its_share_at_the_last_step_and_is_half_way_half_way(decay: str, half: float) -> None:
    found = rates("learning_rate=1.0", "warmup_steps=3", f"decay={decay}", "decay_to=0.1")
    assert found[3] == 1.0 and found[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(found[3:]))
    assert found[11] == pytest.approx(half)
