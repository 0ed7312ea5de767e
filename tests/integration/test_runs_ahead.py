"""Real runs in which samples may lag, one of every schedule and option that bounds the lag in its own way."""

from pathlib import Path

import pytest

from harness.comparison.conservation import check_conservation
from harness.comparison.promises import read_finished
from harness.comparison.runs import read_run
from harness.metrics.run_files import load_ledger, load_metrics, load_samples
from harness.report.summary import RunSummary
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_devices, check_run
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

SHORT = f"{SMALL} iterations=5 algorithm.batch_groups=4 algorithm.group_size=4 algorithm.micro_batch_groups=2"
DRAINED = (
    "schedule=fully_async schedule.max_staleness=0.5 schedule.pause=wait algorithm.correction=tis "
    "algorithm.kl_coef=0.01 task=expand model.warm_start=false iterations=6 smoke=true"
)
"""Half a batch ahead, engines drained before each update, TIS, and a KL to the reference in the loss."""
STREAM = "schedule=fully_async schedule.max_staleness=1"
HALF = "schedule.max_staleness=0.5"
DROP = f"schedule=fully_async schedule.order=completion {HALF} schedule.on_stale=drop"
TWO_RANKS = "cluster.devices=3 schedule.split.actor=2 algorithm.reference=true algorithm.micro_batch_groups=1"
LONGER = "task=expand engine.slots=8"
SHORT_RUNS = {
    "one_step_off": "schedule=one_step_off",
    "k_step_off": "schedule=k_step_off",
    "delayed_update": "schedule=delayed_update",
    "half_step": "schedule=half_step cluster.devices=3 schedule.split.rollout=2",
    "completion_drop": f"{DROP} {LONGER}",
    "completion_on_two_ranks": f"{DROP} {LONGER} {TWO_RANKS}",
    "windowed": f"schedule=windowed {HALF} schedule.window=0.5 {LONGER} algorithm.max_token_staleness=0",
    "lending": f"schedule=lending schedule.order=completion {HALF} schedule.patience_s=0.001 {TWO_RANKS}",
    "every_second_version": f"{STREAM} schedule.publish_every=2 algorithm.mini_batches=2",
    "begun_again": f"{STREAM} schedule.pause=abort {LONGER}",
    "caches_kept": f"{STREAM} engine.keep_cache=true {LONGER}",
    "one_pool": (
        "schedule=tests.support.colocated_stream:ColocatedStream cluster.devices=1 schedule.max_staleness=1 "
        "algorithm.reference=true"
    ),
}
RUNS = {name: f"{SHORT} {settings}" for name, settings in SHORT_RUNS.items()} | {"drained": DRAINED}
FIXED = {"one_step_off": 1, "k_step_off": 3, "delayed_update": 1}
"""Schedules whose worst lag is always the same."""


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    return drivers.bench_all(results, RUNS)


@pytest.fixture
def drained(runs: dict[str, Path]) -> Path:
    return runs["drained"]


@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_keeps_what_its_schedule_promises(runs: dict[str, Path], name: str) -> None:
    run = read_finished(runs[name])
    check_run(run)
    check_devices(run)
    kept = check_conservation([read_run(runs[name])])
    assert kept.problems == () and kept.tokens > 0
    worst = RunSummary(runs[name]).lag_worst
    assert worst == FIXED[name] if name in FIXED else worst <= 1


def test_a_cache_is_older_than_the_weights_only_where_it_was_kept_while_these_changed(runs: dict[str, Path]) -> None:
    for name in RUNS:
        samples = load_samples(runs[name]).to_pydict()
        for span, age in zip(samples["span"], samples["cache_age"], strict=True):
            assert (age > 0) == (span > 1 and name == "caches_kept"), name


def test_engines_get_every_second_version_and_the_last(runs: dict[str, Path]) -> None:
    samples = load_samples(runs["every_second_version"]).to_pydict()
    assert set(samples["version_first"]) == {0, 2, 4}
    lags = dict(zip(samples["trained_iteration"], samples["lag_worst"], strict=True))
    assert lags == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}, "what a version may start is trained before the next one comes"


def test_tokens_that_lag_are_masked_and_counted(runs: dict[str, Path]) -> None:
    samples = load_samples(runs["windowed"]).to_pydict()
    assert 0 < sum(samples["stale_tokens"]) < sum(samples["response_tokens"])
    assert any(metrics["token_ledger/masked"] > 0 for metrics in load_metrics(runs["windowed"]))


def test_the_drained_run_has_no_mixed_sample_and_a_fresh_second_half(drained: Path) -> None:
    assert set(load_samples(drained).to_pydict()["span"]) == {1}
    samples = load_samples(drained).to_pydict()
    assert set(samples["lag_worst"]) == {0, 1}
    rows, half = 16 * 8, 8 * 8
    lags = zip(samples["sample_id"], samples["lag_worst"], strict=True)
    # Only groups of a batch's first half may be sampled a version early.
    assert {sample % rows >= half for sample, lag in lags if lag == 1} == {False}
    kl = [metrics["policy/kl_ref"] for metrics in load_metrics(drained)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-7
    mismatches = [metrics["policy/mismatch_kl"] for metrics in load_metrics(drained) if "policy/mismatch_kl" in metrics]
    assert mismatches and max(mismatches) < 1e-8
    ledger = load_ledger(drained)
    assert ledger["admitted"] == ledger["trained"] == 6 * 16 * 8
