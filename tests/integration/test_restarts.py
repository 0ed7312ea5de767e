"""Real runs whose roles are killed, and that go on by themselves (docs/faults.md)."""

from pathlib import Path

import pytest

from harness.comparison.promises import read_finished
from harness.metrics.done import is_done
from harness.metrics.run_files import load_ledger, load_manifest
from tests.support import between_steps
from tests.support.forked_drivers import Drivers, Kill, folder_of, forked_drivers
from tests.support.invariants import check_run
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

SETTINGS = (*SMALL.split(), "iterations=10")
SAVED = ("checkpoint.every=2",)
BACK = "all went back to version"
CASES: dict[str, tuple[tuple[str, ...], list[Kill], list[tuple[str, str]]]] = {
    "host_and_engine": (
        ("schedule=separated_sync", "cluster.devices=2"), [("device[0]", 2), ("host", 4), ("device[0]", 7)],
        [
            ("rollout[0]", version := "started again with version"), ("reward[0]", "started again"),
            ("rollout[0]", version),
        ],
    ),
    "host_with_a_filter": (
        ("schedule=one_step_off", "cluster.devices=2", "algorithm.filter=tests.support.filters:even"), [("host", 3)],
        [("filter[0]", "started again")],
    ),
    "trainer_and_queue": (
        ("schedule=separated_sync", "cluster.devices=2", *SAVED), [("device[1]", 4), ("queue", 7)],
        [("actor[0]", BACK), ("queue", BACK)],
    ),
    "all_roles_of_a_device": (
        ("schedule=colocate_sync", "cluster.devices=1", "algorithm=ppo", *SAVED), [("device[0]", 5)],
        [("critic[0]", BACK)],
    ),
    "trainer_of_a_pipeline": (
        ("schedule=one_step_off", "cluster.devices=2", *SAVED), [("device[1]", 6)], [("actor[0]", BACK)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_a_run_whose_roles_are_killed_ends_bit_for_bit_as_ever(case: str, results: Path, drivers: Drivers) -> None:
    settings, kills, expected = CASES[case]
    code, said = drivers.run_killed(results, f"restarts_{case}", (*SETTINGS, *settings), kills)
    assert code == 0 and "Traceback" not in said, said
    broken, whole = folder_of(results, f"restarts_{case}"), drivers.whole(results, *SETTINGS, *settings)
    ledger = load_ledger(broken)
    restarts = ledger["restarts"]
    assert len(restarts) == len(expected)
    for restart, (role, done) in zip(restarts, expected, strict=True):
        assert role in restart["roles"] and restart["done"].startswith(done) and restart["took_s"] > 0
        assert f"{restart['why']}; {restart['done']}, at work again after" in said
    assert sum(BACK in done for _, done in expected) == len(load_manifest(broken).get("resumed", []))
    check_run(read_finished(broken))
    check_equal(broken, whole)


def test_a_run_whose_only_engine_dies_between_two_steps_of_a_batch_goes_back_and_ends_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(between_steps.FOLDER, str(tmp_path))
    settings = (*SETTINGS, "schedule=separated_sync", "cluster.devices=2", "restarts.limit=1")
    settings += (*between_steps.SETTINGS, *SAVED)
    with forked_drivers() as drivers:  # which see that folder, and so do their workers
        code, said = drivers.run_killed(tmp_path, "broken", settings, [])
        whole = drivers.bench(tmp_path, "whole", *settings)
    assert code == 0 and "Traceback" not in said, said
    assert "died during generate" in said and "all went back to version 2" in said
    broken = folder_of(tmp_path, "broken")
    check_run(read_finished(broken))
    check_equal(broken, whole)


def test_a_run_without_checkpoints_says_which_setting_would_have_saved_it(results: Path, drivers: Drivers) -> None:
    settings = (*SETTINGS, "schedule=separated_sync", "cluster.devices=2")
    code, said = drivers.run_killed(results, "unsaved", settings, [("device[1]", 2)])
    assert code == 1 and "Traceback" not in said, said
    assert "actor[0] died" in said and "nothing was saved: checkpoint.every=10 would have let the run go on" in said
    assert not is_done(folder_of(results, "unsaved"))


def test_what_dies_again_and_again_ends_the_run_in_one_line(results: Path, drivers: Drivers) -> None:
    settings = (*SETTINGS, "schedule=separated_sync", "cluster.devices=2", "restarts.limit=1")
    code, said = drivers.run_killed(results, "again_and_again", settings, [("host", 2), ("host", 4)])
    assert code == 1 and "Traceback" not in said, said
    assert "it was started again 1 times before (restarts.limit=1)" in said
