from pathlib import Path

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.rl.filters import every_group, filter_of, given_to_filter
from harness.rl.shaping import shaping_of

LENGTHS = torch.tensor([[4, 8, 9, 12]])


def shaped(rewards: list[float], *steps: str, longest: int = 12, **options: object) -> list[float]:
    algorithm = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, shaping=list(steps), options=options)
    shaping = shaping_of(algorithm, longest)
    assert shaping is not None
    return shaping(torch.tensor([rewards]), LENGTHS)[0].tolist()


def test_steps_cost_by_length_in_the_order_of_the_setting() -> None:
    assert shaped([1, 1, 1, 1], "overlong", overlong_buffer=4) == [1, 1, 0.75, 0]
    assert shaped([1, 1, 1, 1], "overlong", overlong_buffer=4, overlong_factor=2.0) == [1, 1, 0.5, -1]
    assert shaped([1, 1, 1, 1], "length", length_price=0.6) == pytest.approx([0.8, 0.6, 0.55, 0.4])
    bounds = {"reward_low": -1.0, "reward_high": 1.0, "reward_scale": 4.0, "reward_bias": -0.5}
    assert shaped([0, 0.5, 0.6, 1], "scale", "clip", **bounds) == pytest.approx([-1, 0, 0.4, 1])
    assert shaped([0, 0.5, 0.6, 3], "clip", "scale", **bounds) == pytest.approx([-2, 0, 0.4, 2])


def test_a_step_of_ones_own_gets_one_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def per_token(rewards, *, lengths, power=1.0):\n    return rewards / lengths**power\n"
    (tmp_path / "own_shaping.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert shaped([4, 8, 9, 12], "own_shaping:per_token") == [1, 1, 1, 1]
    assert shaped([4, 8, 9, 12], "own_shaping:per_token", power=0.0) == [4, 8, 9, 12]
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


REWARDS = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.1, 0.1, 0.1]])


def algorithm(name: str, **options: object) -> AlgorithmConfig:
    return AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, filter=name, options=options)


def kept(name: str, **options: object) -> list[bool]:
    keep = filter_of(algorithm(name, **options))
    assert keep is not None
    there = {"lengths": torch.tensor([[3, 5, 4], [9, 9, 9], [1, 2, 3]])}
    return keep(REWARDS, **{given: there[given] for given in given_to_filter(algorithm(name))}).tolist()


def test_a_filter_keeps_groups_by_themselves() -> None:
    assert filter_of(algorithm("none")) is None and every_group(REWARDS).all()
    assert kept("zero_variance") == [False, True, False]
    keep = filter_of(algorithm("tests.support.filters:even"))
    assert keep is not None
    lengths = torch.tensor([[3, 5, 4], [9, 9, 9], [1, 2, 4]])
    alone = [keep(rewards, lengths=of) for rewards, of in zip(REWARDS.split(1), lengths.split(1), strict=True)]
    assert keep(REWARDS, lengths=lengths).tolist() == torch.cat(alone).tolist() == [True, False, False]


def test_a_filter_of_ones_own_is_given_what_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_filters.py").write_text(
        "def short(rewards, *, lengths, most: int = 4):\n    return lengths.float().mean(dim=1) <= most\n"
        "def broken(rewards):\n    return rewards\n"
        "class No: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kept("own_filters:short") == [True, False, True]
    assert kept("own_filters:short", most=3) == [False, False, True]
    with pytest.raises(ValueError, match=r"must return bool \[groups\] = \[1\], not float32 \[1, 3\]"):
        kept("own_filters:broken")
    with pytest.raises(ConfigError, match=r"algorithm.filter=own_filters:No cannot be called as keep\(rewards\)"):
        kept("own_filters:No")
    with pytest.raises(ConfigError, match="algorithm.options.most"):
        kept("own_filters:short", most="none")
