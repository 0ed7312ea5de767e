"""A paced run: real processes, queue and weight transfers around engines that last as long as the cost model says."""

from pathlib import Path

import pytest

from harness.comparison.promises import FinishedRun, read_finished
from harness.cost_model.cost import transfer_times
from harness.driver.session import simulate
from harness.metrics.run_files import load_manifest
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_run

pytestmark = [pytest.mark.slow]

EARLY_S = 1e-3
"""A timer may ring so much too soon: an event loop's clock has a resolution."""


@pytest.fixture(scope="module")
def folder(results: Path, drivers: Drivers) -> Path:
    """The schedule with the most to pace: copies that travel in the background, to cohorts that load in turn."""
    return drivers.bench(
        results,
        "paced",
        *("schedule=half_step", "backend=paced", "cost=tiny_cpu", "cluster.devices=3", "schedule.split.rollout=2"),
        *("iterations=3", "smoke=true"),
        *("algorithm.batch_groups=4", "algorithm.micro_batch_groups=2"),
        *("cost.weight_bytes=10000000", "cost.network_bytes_per_s=100000000"),
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> FinishedRun:
    return read_finished(folder)


def test_a_paced_run_keeps_what_its_schedule_promises(run: FinishedRun) -> None:
    check_run(run)


def test_what_lent_engines_hand_over_counts_once_where_engines_are_processes(results: Path, drivers: Drivers) -> None:
    folder = drivers.bench(
        results,
        "lent",
        *("schedule=lending", "schedule.patience_s=0.001", "backend=paced", "cost=tiny_cpu", "cluster.devices=3"),
        *("schedule.split.rollout=1", "iterations=3", "smoke=true", "engine.slots=8"),
        *("algorithm.batch_groups=4", "algorithm.micro_batch_groups=1"),
    )
    run = read_finished(folder)
    check_run(run)
    assert {span.kind for span in run.timeline.spans if span.role == "lent"} >= {"generate"}


def test_a_paced_run_is_called_paced(folder: Path) -> None:
    assert load_manifest(folder)["backend"] == "paced"


def test_a_paced_run_makes_the_samples_of_the_virtual_one(run: FinishedRun) -> None:
    virtual = simulate(run.config, seed=0).samples()
    assert [sample.response_tokens for sample in run.samples] == [sample.response_tokens for sample in virtual]


def test_no_paced_work_is_faster_than_the_cost_model(run: FinishedRun) -> None:
    cost = run.config.cost
    transfer = transfer_times(cost, "host_staged")
    least = {
        "publish_weights": transfer.send_s,
        "stage_weights": transfer.stage_s,
        "load_weights": transfer.load_s,
        "update_actor": cost.train_step_s,
        "old_log_prob": cost.call_s,
    }
    seen = {kind: min(s.end - s.start for s in run.timeline.spans if s.kind == kind) for kind in least}
    assert {kind: seconds for kind, seconds in seen.items() if seconds < least[kind] - EARLY_S} == {}
