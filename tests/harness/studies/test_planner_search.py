"""Branch and bound against looking at everything; fronts; the largest parts of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cost_model.cost import largest_share_s
from harness.studies.planner.search import Prospect, front, search
from harness.studies.planner.work import LengthSamples
from harness.transfer_queue import Ragged


@dataclass(frozen=True)
class Seconds:
    seconds: float


TIMES = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.01, 1), st.floats(0.1, 100)), min_size=1, max_size=30)
"""(seconds, bound as a share of them, what seems likely) of every candidate."""


def prospects(times: list[tuple[float, float, float]]) -> list[Prospect[int]]:
    return [Prospect(i, seconds * share, likely) for i, (seconds, share, likely) in enumerate(times)]


@given(TIMES)
def test_with_budget_to_spare_the_best_is_the_best_of_all(times: list[tuple[float, float, float]]) -> None:
    found = search(prospects(times), lambda i: Seconds(times[i][0]), budget=len(times))
    assert found.tried[0][1].seconds == min(seconds for seconds, _, _ in times)
    assert (found.left, found.gap) == (None, 0.0)
    assert len(found.tried) + found.pruned == len(times)


@given(TIMES, st.integers(1, 5))
def test_a_spent_budget_says_how_much_better_the_best_could_be(
    times: list[tuple[float, float, float]], budget: int
) -> None:
    found = search(prospects(times), lambda i: Seconds(times[i][0]), budget)
    best = found.tried[0][1].seconds
    assert len(found.tried) <= budget
    assert min(seconds for seconds, _, _ in times) >= best * (1 - found.gap) * (1 - 1e-12)


def test_nothing_is_run_that_its_bound_rules_out() -> None:
    ran: list[int] = []

    def run(i: int) -> Seconds:
        ran.append(i)
        return Seconds(10.0)

    search([Prospect(0, 5.0, 6.0), Prospect(1, 10.0, 11.0), Prospect(2, 9.0, 12.0)], run, budget=3)
    assert ran == [0, 2]


def test_a_search_among_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to search"):
        search([], lambda i: Seconds(1.0), 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_what_is_not_on_the_front_is_beaten_and_what_is_on_it_is_not(points: list[tuple[int, int]]) -> None:
    kept = front(points, gain=lambda p: p[0], price=lambda p: p[1])
    for gain, price in points:
        better = any(g >= gain and p <= price and (g, p) != (gain, price) for g, p in points)
        assert ((gain, price) in kept) == (not better)


@given(st.lists(st.integers(1, 50), min_size=8, max_size=8), st.integers(1, 8), st.integers(1, 5))
def test_micro_batches_are_cut_as_the_simulated_engines_cut_them(lengths: list[int], rows: int, parts: int) -> None:
    costs = {"s_per_token": 0.5, "s_per_pair": 0.1}
    seconds = LengthSamples(np.array([lengths]), prompt=3, group_size=2).slowest_s(rows, parts, **costs)
    for micro, start in enumerate(range(0, 8, rows)):
        here = lengths[start : start + rows]
        prompts, responses = (Ragged.from_rows([np.array([n]) for n in column]) for column in ([3] * len(here), here))
        assert seconds[0, micro] == pytest.approx(largest_share_s(prompts, responses, parts, **costs))
