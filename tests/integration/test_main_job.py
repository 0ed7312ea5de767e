"""The README's job, a sixth of it, under two schedules: it learns, its lags are bounded, its ledger closes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from harness.config.compose import compose_job
from harness.driver.initial_weights import initial_model
from harness.metrics.manifest import identity_of
from harness.metrics.run_files import load_ledger, load_manifest, load_metrics, load_samples, load_timeline
from harness.metrics.samples import FATES
from harness.rl import warm_start as recipe
from harness.tasks import make_task
from tests.support.forked_drivers import Drivers
from tests.support.real_runs import bench

ITERATIONS = 20  # after a dozen it has learnt most of what it learns in 120
ROWS = 16 * 8
SETTINGS = ("algorithm.reference=true", f"iterations={ITERATIONS}")


@pytest.fixture(scope="module", autouse=True)
def warm_start(results: Path) -> None:
    """Half as long as the real one, which would take a third of all that these tests take."""
    config = compose_job([])
    with patch.object(recipe, "warm_start", partial(recipe.warm_start, steps=200)):
        initial_model(config.model, make_task(config), results)


@pytest.fixture(scope="module")
def fully_async(results: Path) -> Path:
    """By the command, with all that it writes."""
    return bench(results, "main", "schedule=fully_async", *SETTINGS)


@pytest.fixture(scope="module")
def colocate_sync(results: Path, drivers: Drivers) -> Path:
    """On two devices: two rollout engines, a training world of two."""
    return drivers.bench(results, "main_colocated", "schedule=colocate_sync", *SETTINGS)


@pytest.fixture(params=["fully_async", "colocate_sync"])
def run(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def exact_match(folder: Path, of: slice) -> float:
    values = [metrics["reward/exact_match"] for metrics in load_metrics(folder)][of]
    return sum(values) / len(values)


def test_the_policy_learns(run: Path) -> None:
    assert exact_match(run, slice(0, 3)) < 0.45
    assert exact_match(run, slice(-8, None)) > 0.5


def test_every_admitted_sample_is_trained_once(run: Path) -> None:
    ledger, samples = load_ledger(run), load_samples(run).to_pydict()
    assert ledger["admitted"] == ITERATIONS * ROWS
    assert ledger["admitted"] == sum(ledger[fate] for fate in FATES)
    assert sorted(samples["sample_id"]) == list(range(ITERATIONS * ROWS))
    assert samples["trained_iteration"] == [sample // ROWS for sample in samples["sample_id"]]


def test_colocate_sync_has_no_lag_at_any_token(colocate_sync: Path) -> None:
    samples = load_samples(colocate_sync).to_pydict()
    assert set(samples["lag_worst"]) == {0}
    assert samples["version_first"] == samples["version_last"] == samples["trained_iteration"]


def test_fully_async_stays_within_its_bound_and_uses_it(fully_async: Path) -> None:
    lags = load_samples(fully_async).to_pydict()["lag_worst"]
    assert max(lags) <= 2
    assert any(lag > 0 for lag in lags)


def test_times_of_a_sample_are_in_order(run: Path) -> None:
    samples = load_samples(run).to_pydict()
    times = [samples[name] for name in ("admitted_at", "started_at", "finished_at", "trained_at")]
    assert all(0 <= a <= s <= f <= t for a, s, f, t in zip(*times, strict=True))


def test_every_role_left_spans_on_the_devices_it_was_given(run: Path) -> None:
    timeline = load_timeline(run)
    assert {span.role for span in timeline.spans} == {
        "rollout",
        "actor",
        "actor_fwd",
        "reference",
        "reward",
        "advantages",
    }
    pools = {place.pool for (role, _), place in timeline.placement.items() if role in ("rollout", "actor")}
    assert len(pools) == (1 if identity_of(load_manifest(run)).schedule == "colocate_sync" else 2)


def test_roles_that_share_devices_work_in_turn(colocate_sync: Path) -> None:
    """On each device of the colocated pool no two computations overlap; copies of new weights may (they are moves)."""
    timeline = load_timeline(colocate_sync)
    for device in ("device 0", "device 1"):
        spans = [s for s in timeline.spans if timeline.placement[s.role, s.engine].devices == (device,)]
        work = sorted((s.start, s.end) for s in spans if s.kind not in ("wait_for_samples", "load_weights"))
        assert len(work) > 4 * ITERATIONS
        overlaps = [(a, b) for a, b in zip(work, work[1:], strict=False) if b[0] < a[1] - 1e-6]
        assert not overlaps


def test_everything_the_layout_promises_is_there(fully_async: Path) -> None:
    promised = {"config.yaml", "manifest.json", "metrics.jsonl", "samples.parquet", "trace.json", "ledger.json", "DONE"}
    plots = {"reward.png", "staleness.png", "gantt.png", "idle.png"}
    assert promised | plots <= {path.name for path in fully_async.iterdir()}
    assert json.loads((fully_async / "trace.json").read_text())["traceEvents"]
    assert len(load_metrics(fully_async)) == ITERATIONS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy's, of MLflow's own tables
def test_mlflow_mirrors_the_run(fully_async: Path) -> None:
    from mlflow.tracking import MlflowClient

    results = fully_async.parents[2]
    client = MlflowClient(tracking_uri=f"sqlite:///{results / 'mlflow.db'}")
    identity = identity_of(load_manifest(fully_async))
    experiment = client.get_experiment_by_name(identity.experiment)
    assert experiment is not None
    children = [
        found
        for found in client.search_runs([experiment.experiment_id])
        if found.info.run_name == f"{identity.cell} seed={identity.seed}"
    ]
    (mirrored,) = children
    assert mirrored.info.status == "FINISHED"
    assert mirrored.data.tags["schedule"] == identity.schedule
    history = client.get_metric_history(mirrored.info.run_id, "reward/exact_match")
    written = [metrics["reward/exact_match"] for metrics in load_metrics(fully_async)]
    assert [point.value for point in sorted(history, key=lambda point: point.step)] == written
    assert "gantt.png" in {artifact.path for artifact in client.list_artifacts(mirrored.info.run_id)}
