"""Trained samples against completed ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from scipy import stats

from harness.comparison.runs import Cell
from harness.comparison.selection import (
    discarded_tokens,
    length_distance,
    length_ratio,
    sampled_tokens,
    selection_sentence,
    selects,
)

LENGTHS = [10, 20, 30, 40, 200, 300]


def run(*fates: str, judged: bool = True) -> Any:
    """Six samples; those without a fate are in flight."""
    told = [*fates, *["in_flight"] * (6 - len(fates))]
    rewards = [0.5 if fate == "trained" else 0.0 if judged else None for fate in told]
    columns = {
        "fate": told,
        "finished_at": [None if fate == "in_flight" else 1.0 for fate in told],
        "response_tokens": [0 if fate == "in_flight" else n for fate, n in zip(told, LENGTHS, strict=True)],
        "reward": pa.array(rewards, pa.float64()),
        "reward_failed": [False] * 6,
    }
    return SimpleNamespace(samples=pa.table(columns))


def cell(label: str, *runs: Any) -> Cell:
    return Cell(label, label, runs)


def test_lengths_of_trained_samples_are_held_against_those_of_all_completed_ones() -> None:
    found = run(*["trained"] * 4, "dropped_stale", "dropped_spare")
    assert sampled_tokens(found.samples) == {"trained": 100, "dropped_stale": 200, "dropped_spare": 300}
    assert discarded_tokens(found) == pytest.approx(5 / 6) and length_ratio(found) == 0.25
    assert length_distance(found) == pytest.approx(stats.ks_2samp(LENGTHS[:4], LENGTHS).statistic)


def test_baselines_and_what_is_in_flight_are_no_selection() -> None:
    assert not selects(run(*["trained"] * 4)) and not selects(run("dropped_baseline", *["trained"] * 5))
    assert selects(run("dropped_filtered", *["trained"] * 5))


def test_a_schedule_that_drops_long_answers_is_named_with_their_difficulty_where_that_is_known() -> None:
    even = cell("even", run(*["trained"] * 6))
    drops = ("trained",) * 4 + ("dropped_stale",) * 2
    assert selection_sentence([even, cell("short", run("dropped_stale", *["trained"] * 5))]) == ""
    (judged, unknown) = (selection_sentence([even, cell("fast", run(*drops, judged=one))]) for one in (True, False))
    assert judged.startswith("fast drops long answers: trained responses are 75% shorter") and "+0.167" in judged
    assert "difficulty: unknown" in unknown
