"""Scores of predictions: proper, of systems kept from the priors, and none that moves unseen."""

import math
from pathlib import Path

import numpy as np
import pytest

from harness.config.compose import EXPERIMENTS
from harness.prediction.evidence import StepRow
from harness.prediction.posterior import Given
from harness.prediction.scores import (
    SCORES,
    TOLERANCE,
    TRUTHS,
    Score,
    crps,
    how_often,
    own_phases_s,
    published_tables,
    read_scores,
    read_summaries,
    score_table,
    summary,
    write_scores,
    write_summaries,
)
from harness.prediction.table import read_evidence
from harness.prediction.truths import made_truths, score_truths


def test_scores_are_of_the_normal_distribution_and_of_own_phases() -> None:
    draws = np.random.default_rng(0).normal(2.0, 3.0, 20_000)
    at_mean = 3.0 * (math.sqrt(2 / math.pi) - 1 / math.sqrt(math.pi))  # Gneiting and Raftery (2007), section 4.2
    assert crps(draws, 2.0) == pytest.approx(at_mean, rel=0.02)
    assert crps(np.array([5.0]), 2.0) == 3.0
    sync = StepRow("a:1", "colocate_sync", 4, 4, step_s=100.0, rollout_s=40.0, old_log_prob_s=20.0, update_s=30.0)
    row = StepRow("a:2", "one_step_off", 2, 2, step_s=90.0, old_log_prob_s=25.0, update_s=45.0)
    assert (own_phases_s(row, sync, "train"), own_phases_s(row, sync, "sync")) == (80.0, 60.0)


@pytest.mark.parametrize(
    ("table", "given", "rows"),
    [
        ("relax", "sync", ["fully_async max_staleness=1 on 8+8"]),
        ("verl_fully_async", "train", ["fully_async on 64+64"]),
    ],
)
def test_no_row_moves_without_its_score(table: str, given: Given, rows: list[str]) -> None:
    committed = {(one.row, one.given): one for one in read_scores(SCORES) if one.source == table}
    for now in score_table(EXPERIMENTS / f"papers/{table}.csv", given, rows):
        before = committed[now.row, now.given]
        for name in ("median_s", "low_s", "high_s"):
            assert getattr(now, name) == pytest.approx(getattr(before, name), rel=TOLERANCE), (
                f"{now.row}: {name} has moved; cadence predict --score makes the table anew: is it better?"
            )


def test_published_steps_are_scored_blind_and_simulated_ones_predicted() -> None:
    for path in published_tables():
        evidence = read_evidence(path)
        rows = {str(row) for row in evidence.asked if row.step_s}
        for given in ("train", "sync"):
            assert {one.row for one in read_scores(SCORES) if (one.source, one.given) == (path.stem, given)} == rows
        assert evidence.system, f"{path.with_suffix('.yaml')} does not say whose runs they are"
    scores = score_truths(made_truths(6))
    assert [one.given for one in scores] == ["train", "train", "sync", "sync", "train", "train"]
    assert all(abs(one.off) < 1.0 for one in scores) and summary(scores).own_phases_skill > 0


def test_scores_are_read_as_they_were_written_and_their_coverage_is_told(tmp_path: Path) -> None:
    scores = [Score("a", "b", "train", 9.0, 10.0, high - 6, high, 0.1, 9.9, 8.0, "c; d") for high in (8.0, 12.0)]
    write_scores(tmp_path / "a.csv", scores)
    write_summaries(tmp_path / "b.csv", scores)
    assert read_scores(tmp_path / "a.csv") == scores
    assert [(one.rows, one.covered) for one in read_summaries(tmp_path / "b.csv")] == [(2, 0.5)]
    share = sum(one.rows * one.covered for one in read_summaries(TRUTHS)) / 400
    assert f"held {share:.0%} of 400 simulated steps" in how_often()
