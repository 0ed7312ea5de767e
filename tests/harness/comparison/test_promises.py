"""What is promised of finished runs, and whether it is found where it does not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.acceptance.chaos.jobs import base
from harness.comparison.promises import FinishedRun, broken_promises
from tests.support.random_jobs import play

Changes = dict[str, Any]
WRONG: dict[str, tuple[Changes, str]] = {
    "trained in another iteration": ({"trained_iteration": 1}, "groups were torn"),
    "too old": ({"version_first": -9}, "which is too old"),
    "of a version to come": ({"version_last": 3}, "a lag outside of"),
    "finished before it began": ({"finished_at": -1.0}, "has the times"),
    "lost": ({"fate": "in_flight", "trained_iteration": None}, "iteration 0 trained"),
    "counted as another": ({"sample_id": 1}, "there twice"),
}


@pytest.fixture(scope="module")
def finished() -> FinishedRun:
    config = base("one_step_off")
    algorithm = replace(config.algorithm, batch_groups=4, group_size=2, micro_batch_groups=1)
    return play(replace(config, iterations=3, algorithm=algorithm)).finished


def test_a_run_that_kept_its_promises_broke_none(finished: FinishedRun) -> None:
    assert broken_promises(finished) == []


@pytest.mark.parametrize("wrong", WRONG)
def test_a_sample_that_breaks_one_is_found(finished: FinishedRun, wrong: str) -> None:
    changes, said = WRONG[wrong]
    first, *others = finished.samples
    broken = broken_promises(replace(finished, samples=[replace(first, **changes), *others]))
    assert any(said in line for line in broken), broken


def test_what_an_engine_sampled_that_was_started_again_may_be_newer_and_no_older(finished: FinishedRun) -> None:
    *others, last = finished.samples
    newer = replace(finished, samples=[*others, replace(last, version_first=2, version_last=2)])
    assert ["a lag outside of 1 to 1" in line for line in broken_promises(newer)] == [True]
    assert broken_promises(replace(newer, restarted=frozenset({f"rollout[{last.engine}]"}))) == []
    older = replace(finished, samples=[*others, replace(last, version_first=0)])
    restarted = replace(older, restarted=frozenset({f"rollout[{last.engine}]"}))
    assert any("a lag outside of 0 to 1" in line for line in broken_promises(restarted))


def test_times_of_two_hosts_are_in_order_as_far_as_their_clocks_tell(finished: FinishedRun) -> None:
    first, *others = finished.samples
    early = replace(finished, samples=[replace(first, started_at=first.admitted_at - 0.15), *others])
    assert ["has the times" in line for line in broken_promises(replace(early, clock_uncertainty_s=0.07))] == [True]
    assert broken_promises(replace(early, clock_uncertainty_s=0.08)) == []


def test_a_ledger_that_does_not_close_is_found(finished: FinishedRun) -> None:
    counts = {**finished.counts, "admitted": finished.counts["admitted"] + 1}
    assert any("the ledger admitted" in line for line in broken_promises(replace(finished, counts=counts)))
