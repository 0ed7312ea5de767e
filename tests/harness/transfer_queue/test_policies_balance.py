"""Shares of equal size and nearly equal weight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.transfer_queue.control.policies import SPLITS, balanced, contiguous
from tests.support.examples import examples


def heaviest(parts: list[np.ndarray], weights: np.ndarray) -> int:
    return max(int(weights[part].sum()) for part in parts)


def all_cuts(units: tuple[int, ...], sizes: list[int]) -> Iterator[list[np.ndarray]]:
    if not sizes:
        yield []
        return
    for part in combinations(units, sizes[0]):
        rest = tuple(unit for unit in units if unit not in part)
        for parts in all_cuts(rest, sizes[1:]):
            yield [np.array(part, np.int64), *parts]


def lengths(seed: int, count: int) -> np.ndarray:
    """A long tail, capped: response lengths."""
    return np.minimum(np.random.default_rng(seed).lognormal(6, 1, count), 8192).astype(np.int64)


@settings(max_examples=examples(300))
@given(weights=st.lists(st.integers(0, 1000), max_size=40), shares=st.integers(1, 9))
def test_every_unit_is_in_one_share_and_shares_differ_by_no_more_than_the_heaviest(
    weights: list[int], shares: int
) -> None:
    array = np.array(weights, np.int64)
    parts = balanced(array, shares)
    assert [part.size for part in parts] == [part.size for part in contiguous(array, shares)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(weights)))
    assert all((np.diff(part) > 0).all() for part in parts), "a share keeps the order of its units"
    sums = [int(array[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= max(weights, default=0)


@pytest.mark.parametrize(("count", "shares"), [(6, 2), (8, 2), (10, 2), (7, 3), (9, 3), (8, 4)])
def test_it_comes_close_to_the_best_cut_there_is(count: int, shares: int) -> None:
    ratios = []
    for seed in range(20):
        weights = lengths(seed, count)
        sizes = [part.size for part in contiguous(weights, shares)]
        best = min(heaviest(parts, weights) for parts in all_cuts(tuple(range(count)), sizes))
        ratios.append(heaviest(balanced(weights, shares), weights) / best)
    assert np.mean(ratios) <= 1.03 and max(ratios) <= 1.2, ratios


@pytest.mark.parametrize(("count", "shares"), [(16, 2), (32, 4), (30, 4), (64, 8), (512, 8)])
def test_the_slowest_rank_has_less_to_do_than_with_contiguous_shares(count: int, shares: int) -> None:
    for seed in range(20):
        weights = lengths(seed, count)
        with_the_heaviest = weights.max() + np.sort(weights)[: count // shares - 1].sum()
        parts = balanced(weights, shares)
        assert heaviest(parts, weights) < heaviest(contiguous(weights, shares), weights)
        assert heaviest(parts, weights) <= 1.1 * max(weights.sum() / shares, with_the_heaviest)


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_fewer_units_than_ranks_leave_the_last_ranks_without(name: str) -> None:
    parts = SPLITS[name](np.array([4, 7]), 3, np.array([1, 5]))
    assert [part.size for part in parts] == [1, 1, 0]
    assert sorted(np.concatenate(parts).tolist()) == [4, 7]
