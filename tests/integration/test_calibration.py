"""Costs fitted to real runs, and what becomes of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from harness.cli import main as cli
from harness.config import ConfigError, CostConfig
from harness.config.compose import compose_job
from harness.cost_model.calibration.runs import base_job, calibrate_runs, read_run
from harness.driver.simulate import simulate
from tests.integration.conftest import FIRST_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

SHOWN = ("decode_step_s", "prefill_s_per_token", "log_prob_s_per_token", "train_s_per_token", "train_step_s", "sync_s")


@pytest.mark.parametrize("run", ["colocated", "separated", "separated_streaming"])
def test_a_real_run_shows_what_its_pieces_cost(fresh: dict[str, Path], run: str) -> None:
    base = base_job([])
    found = calibrate_runs([fresh[run]], base, "mine")

    assert all(
        getattr(found.cost, name) >= 0 and getattr(found.cost, name) != getattr(base.cost, name) for name in SHOWN
    )
    assert found.cost.decode_step_s + found.cost.decode_step_s_per_sample > 0
    assert {phase.name for phase in found.phases} >= {"generation", "scoring", "training", "optimizer", "weights"}
    assert ("reload_s" in found.unseen) == (run != "colocated")


def test_costs_of_a_run_are_written_read_and_simulated_with(
    fresh: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    other_seed = fresh["colocated"].parent / "seed=1"

    assert cli.main(["calibrate", f"run={fresh['colocated']}", f"run={other_seed}", "name=mine"]) == 0

    job = compose_job([f"cost={tmp_path / 'costs' / 'mine.yaml'}", "iterations=3", "cluster.devices=2"])
    assert isinstance(job.cost, CostConfig)
    both = calibrate_runs([fresh["colocated"], other_seed], base_job([]), "mine").cost
    for name, value in asdict(both).items():
        if isinstance(value, float):
            assert getattr(job.cost, name) == pytest.approx(value, rel=1e-5), name
    assert len(simulate(job, 0).timeline.iteration_ends) == 3


def test_only_finished_runs_are_read_and_names_name_files(fresh: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no finished run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="name=a/b cannot name a file"):
        calibrate_runs([fresh["colocated"]], base_job([]), "a/b")
