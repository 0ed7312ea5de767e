"""Asynchronous runs that are made again: by what was recorded of their order of arrival, equal to the last bit."""

from pathlib import Path

import pytest

from harness.comparison.equivalence import differences
from harness.metrics.arrivals import ARRIVALS
from harness.metrics.run_files import load_ledger, load_manifest, load_samples
from tests.support.forked_drivers import Drivers
from tests.support.real_runs import SMALL

pytestmark = pytest.mark.slow

SETTINGS = (*SMALL.split(), "iterations=10")
TWO_ENGINES = "cluster.devices=3 schedule.split.rollout=2"
COMPLETION = f"{TWO_ENGINES} schedule=fully_async schedule.order=completion schedule.max_staleness=2"
RUNS = (
    "cluster.devices=2 schedule=fully_async schedule.max_staleness=2 schedule.pause=wait",
    f"{COMPLETION} schedule.on_stale=wait",
    f"{COMPLETION} schedule.on_stale=drop schedule.pause=abort algorithm.micro_batch_groups=1 algorithm.mini_batches=2",
    "cluster.devices=4 schedule=fully_async schedule.order=completion schedule.split.rollout=2",
    f"{TWO_ENGINES} schedule=windowed schedule.window=1",
    "cluster.devices=4 schedule=half_step schedule.split.rollout=3",
)


def replayed(drivers: Drivers, results: Path, folder: Path, settings: str) -> None:
    again = f"again_{folder.parents[1].name}"
    here = drivers.bench(results, again, *SETTINGS, *settings.split(), f"replay='{folder.parent}'")
    assert load_manifest(here)["replays"] == str(folder)
    ours, theirs = load_ledger(here), load_ledger(folder)
    for ledger in (ours, theirs):
        if tokens := ledger.get("tokens"):  # a replay samples only what was kept, and begins nothing again
            tokens["generated"] -= tokens.pop("begun_again")
    assert {name: ours[name] for name in theirs} == theirs  # one that went on has no count of tokens
    assert differences(here, folder) == []


@pytest.mark.parametrize("settings", RUNS)
def test_a_replay_is_the_recorded_run_bit_for_bit(settings: str, results: Path, drivers: Drivers) -> None:
    there = drivers.bench(results, f"recorded_{RUNS.index(settings)}", *SETTINGS, *settings.split())
    assert max(load_samples(there)["lag_worst"].to_pylist()) > 0, "under staleness"
    replayed(drivers, results, there, settings)


def test_a_run_that_was_killed_and_went_on_is_replayed_as_one(results: Path, drivers: Drivers) -> None:
    settings = f"{TWO_ENGINES} schedule=fully_async schedule.max_staleness=2"
    told = (*SETTINGS, *settings.split(), "checkpoint.every=2")
    drivers.killed(results, "recorded_killed", told, 6)
    there = drivers.bench(results, "recorded_killed", *told)
    assert load_samples(there)["row"].null_count == 0, "of what was admitted before and after"
    assert load_manifest(there)["resumed"] and (there / ARRIVALS).read_bytes().count(b"\n") == 11
    replayed(drivers, results, there, settings)
