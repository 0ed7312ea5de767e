"""Places of refused groups are dealt other prompts: on the virtual clock, where a draw says which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.cli.main import main
from harness.config import ConfigError, JobConfig
from harness.config.compose import compose_job
from harness.driver.session import simulate
from harness.metrics.samples import DEALT_AGAIN
from harness.runtime.runtime import parts_of
from tests.support.invariants import check_run
from tests.support.random_jobs import base, play

SCHEDULES = ("colocate_sync", "separated_sync", "one_step_off", "k_step_off", "delayed_update", "half_step")


def filtered(schedule: str, share: float | None, options: dict[str, Any] | None = None) -> JobConfig:
    config = base(schedule)
    return replace(
        config,
        iterations=5,
        schedule=replace(config.schedule, options=config.schedule.options | (options or {})),
        algorithm=replace(config.algorithm, batch_groups=8, micro_batch_groups=2, filter="zero_variance"),
        cost=replace(config.cost, filtered_share=share),
        cluster=replace(config.cluster, devices=4),
    )


@pytest.mark.parametrize("schedule", [*SCHEDULES, "fully_async"])
def test_every_schedule_trains_full_batches_of_kept_groups_and_pays_for_the_others(schedule: str) -> None:
    seconds = {}
    for share in (0.0, 0.5):
        run = play(filtered(schedule, share)).finished
        check_run(run)
        assert (run.counts["dropped_filtered"] > 0) == (share > 0)
        seconds[share] = max(span.end for span in run.timeline.spans)
    assert seconds[0.5] > 1.5 * seconds[0.0]


def test_which_groups_are_kept_depends_neither_on_the_schedule_nor_on_the_order_of_training() -> None:
    completion = filtered("fully_async", 0.5, {"order": "completion", "max_staleness": 1})
    runs = [play(filtered(schedule, 0.5)).finished for schedule in SCHEDULES] + [play(completion).finished]
    kept = [{sample.sample_id for sample in run.trained} for run in runs]
    assert all(one == kept[0] for one in kept)


def test_a_place_is_dealt_another_problem_each_time_that_none_is_planned_for_a_batch() -> None:
    recorder = simulate(filtered("colocate_sync", 0.5), 0)
    numbers = [record.group_id for record in recorder.samples()]
    assert len(set(numbers)) * recorder.group_size == len(numbers) and max(numbers) > DEALT_AGAIN


def test_the_metrics_say_how_many_groups_were_refused_and_how_often_a_place_was_dealt() -> None:
    found: list[Any] = []
    recorder = simulate(filtered("separated_sync", 0.5), 0, started=lambda s: s.recorder.listeners.append(found.append))
    refused = sum(row["filter/refused"] for row in found)
    assert refused * recorder.group_size == recorder.ledger.counts()["dropped_filtered"]
    assert all(row["filter/share"] == row["filter/refused"] / (row["filter/refused"] + 8) for row in found)
    assert max(row["filter/rounds"] for row in found) > 2


def test_a_batch_that_is_refused_again_and_again_ends_the_run_in_one_line() -> None:
    with pytest.raises(ExceptionGroup) as failure:
        simulate(filtered("fully_async", 1.0), 0)
    (told,) = {str(part) for part in parts_of(failure.value) if isinstance(part, ConfigError)}
    assert told.startswith("algorithm.filter=zero_variance refused 73 of 81 groups that were dealt for the 8 of batch")
    assert "algorithm.filter_rounds=10" in told


def test_the_command_ends_with_that_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = "algorithm.filter=zero_variance cost.filtered_share=1.0 backend=virtual iterations=2".split()
    assert main(["bench", "experiment=t", "schedule=colocate_sync", *settings]) == 2
    told = capsys.readouterr().err
    assert "raise algorithm.filter_rounds" in told and "Traceback" not in told


def test_a_simulation_has_to_be_told_which_share_is_refused() -> None:
    config = compose_job(["backend=virtual", "algorithm.filter=zero_variance"])
    with pytest.raises(ConfigError, match="algorithm.filter=zero_variance has no rewards to read on a simulated clock"):
        simulate(config, 0)
