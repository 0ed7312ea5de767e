from pathlib import Path

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.rl.filters import every_group, filter_of, given_to_filter

REWARDS = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.1, 0.1, 0.1]])


def algorithm(name: str, **options: object) -> AlgorithmConfig:
    return AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, filter=name, options=options)


def kept(name: str, **options: object) -> list[bool]:
    keep = filter_of(algorithm(name, **options))
    assert keep is not None
    there = {"lengths": torch.tensor([[3, 5, 4], [9, 9, 9], [1, 2, 3]])}
    return keep(REWARDS, **{given: there[given] for given in given_to_filter(algorithm(name))}).tolist()


def test_without_a_filter_there_is_none_and_its_name_keeps_every_group() -> None:
    assert filter_of(algorithm("none")) is None and every_group(REWARDS).all()


def test_groups_whose_rewards_are_all_equal_have_no_variance() -> None:
    assert kept("zero_variance") == [False, True, False]


def test_a_filter_of_ones_own_is_named_by_its_path_and_given_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_a_filter_says_of_a_group_does_not_depend_on_the_groups_beside_it() -> None:
    keep = filter_of(algorithm("tests.support.filters:even"))
    assert keep is not None
    lengths = torch.tensor([[3, 5, 4], [9, 9, 9], [1, 2, 4]])
    alone = [keep(rewards, lengths=of) for rewards, of in zip(REWARDS.split(1), lengths.split(1), strict=True)]
    assert keep(REWARDS, lengths=lengths).tolist() == torch.cat(alone).tolist() == [True, False, False]
