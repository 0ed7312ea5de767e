"""The README's job, a sixth of it, under two schedules: it learns, its lags are bounded, its ledger closes."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from harness.comparison.promises import read_finished
from harness.config.compose import compose_job
from harness.driver.model_folders import initial_model
from harness.metrics.run_files import load_metrics
from harness.rl import warm_start as recipe
from harness.tasks import make_task
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_devices, check_run
from tests.support.real_runs import bench

pytestmark = pytest.mark.slow

ITERATIONS = 20  # after a dozen it has learnt most of what it learns in 120
SETTINGS = ("algorithm.reference=true", f"iterations={ITERATIONS}")


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    """One by the command, with all that it writes; one on two devices: two rollout engines, a training world of two."""
    config = compose_job([])
    with patch.object(recipe, "warm_start", partial(recipe.warm_start, steps=200)):  # half as long as the real one
        initial_model(config.model, make_task(config), results)
    colocated = drivers.bench(results, "main_colocated", "schedule=colocate_sync", *SETTINGS)
    return {"fully_async": bench(results, "main", "schedule=fully_async", *SETTINGS), "colocate_sync": colocated}


@pytest.mark.parametrize(("schedule", "pools", "lags"), [("fully_async", 2, {0, 1, 2}), ("colocate_sync", 1, {0})])
def test_policies_learn_by_every_sample_once(runs: dict[str, Path], schedule: str, pools: int, lags: set[int]) -> None:
    matches = [metrics["reward/exact_match"] for metrics in load_metrics(runs[schedule])]
    assert len(matches) == ITERATIONS and sum(matches[:3]) / 3 < 0.45 and sum(matches[-8:]) / 8 > 0.5
    run = read_finished(runs[schedule])
    check_run(run)
    check_devices(run)
    assert len(run.trained) == run.counts["admitted"] == ITERATIONS * 16 * 8
    found = {sample.lag_worst for sample in run.trained}
    assert found <= lags and max(lag or 0 for lag in found) >= min(1, max(lags))
    every = {"rollout", "actor", "actor_fwd", "reference", "reward", "advantages"}
    assert {span.role for span in run.timeline.spans} == every
    places = run.timeline.placement.items()
    assert len({place.pool for (role, _), place in places if role in ("rollout", "actor")}) == pools


def test_everything_the_layout_promises_is_there(runs: dict[str, Path]) -> None:
    promised = {"config.yaml", "manifest.json", "metrics.jsonl", "samples.parquet", "trace.json", "ledger.json", "DONE"}
    plots = {"reward.png", "staleness.png", "gantt.png", "idle.png"}
    assert promised | plots <= {path.name for path in runs["fully_async"].iterdir()}
    assert json.loads((runs["fully_async"] / "trace.json").read_text())["traceEvents"]
