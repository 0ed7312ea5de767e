from pathlib import Path

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.rl.shaping import shaping_of

LENGTHS = torch.tensor([[4, 8, 9, 12]])


def shaped(rewards: list[float], *steps: str, longest: int = 12, **options: object) -> list[float]:
    algorithm = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, shaping=list(steps), options=options)
    shaping = shaping_of(algorithm, longest)
    assert shaping is not None
    return shaping(torch.tensor([rewards]), LENGTHS)[0].tolist()


def test_the_last_tokens_that_there_are_cost_more_the_more_of_them_are_used() -> None:
    assert shaped([1, 1, 1, 1], "overlong", overlong_buffer=4) == [1, 1, 0.75, 0]
    assert shaped([1, 1, 1, 1], "overlong", overlong_buffer=4, overlong_factor=2.0) == [1, 1, 0.5, -1]


def test_a_response_pays_for_its_length_beside_the_longest_of_its_group() -> None:
    assert shaped([1, 1, 1, 1], "length", length_price=0.6) == pytest.approx([0.8, 0.6, 0.55, 0.4])


def test_steps_are_taken_in_the_order_of_the_setting() -> None:
    bounds = {"reward_low": -1.0, "reward_high": 1.0, "reward_scale": 4.0, "reward_bias": -0.5}
    assert shaped([0, 0.5, 0.6, 1], "scale", "clip", **bounds) == pytest.approx([-1, 0, 0.4, 1])
    assert shaped([0, 0.5, 0.6, 3], "clip", "scale", **bounds) == pytest.approx([-2, 0, 0.4, 2])


def test_a_step_of_ones_own_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_shaping.py").write_text(
        "def per_token(rewards, *, lengths, power=1.0):\n    return rewards / lengths**power\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shaped([4, 8, 9, 12], "own_shaping:per_token") == [1, 1, 1, 1]
    assert shaped([4, 8, 9, 12], "own_shaping:per_token", power=0.0) == [4, 8, 9, 12]


def test_a_step_of_ones_own_gets_one_group_at_a_time_as_no_bit_may_depend_on_how_many_come() -> None:
    steps = ["tests.support.advantages:touchy"]
    shaping = shaping_of(AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, shaping=steps), 8)
    rewards, lengths = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(6, 4, dtype=torch.int64)
    assert shaping is not None
    parts = [shaping(*part) for part in zip(rewards.split(1), lengths.split(1), strict=True)]
    assert torch.equal(shaping(rewards, lengths), torch.cat(parts))


@pytest.mark.parametrize(
    ("steps", "options", "told"),
    [
        (["overlong"], {}, "algorithm.options.overlong_buffer has no value"),
        (["overlong"], {"overlong_buffer": 13}, "overlong_buffer=13 is more than the 12 tokens"),
        (["clip"], {"reward_low": 1.0, "reward_high": 0.0}, "reward_low=1.0 is not below reward_high=0.0"),
        (["length"], {"length_price": -1.0}, "algorithm.options.length_price=-1.0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(steps: list[str], options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        shaped([0, 0, 0, 0], *steps, **options)
