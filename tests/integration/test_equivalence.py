"""At staleness 0 a schedule changes when things happen, and nothing else: same tokens, rewards, weights, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Bench

from harness.metrics.responses import read_responses
from harness.metrics.run_files import load_ledger, load_samples

pytestmark = pytest.mark.slow

# From random weights, so that no warm start is needed; rewards are rare but not absent, and every update moves weights.
SMALL = ("model.warm_start=false", "iterations=4", "smoke=true")


@pytest.fixture(scope="module")
def colocated(bench: Bench) -> Path:
    return bench("colocated", "schedule=colocate_sync", "cluster.devices=1", *SMALL)


@pytest.fixture(scope="module")
def colocated_again(bench: Bench) -> Path:
    return bench("colocated_again", "schedule=colocate_sync", "cluster.devices=1", *SMALL)


@pytest.fixture(scope="module")
def streaming(bench: Bench) -> Path:
    return bench("streaming", "schedule=fully_async", "schedule.max_staleness=0", "cluster.devices=2", *SMALL)


def same_bits(one: Path, other: Path) -> None:
    columns = ["sample_id", "group_id", "response_tokens", "reward", "exact_match", "lag_worst", "version_first"]
    assert load_samples(one).select(columns).equals(load_samples(other).select(columns))
    ours, theirs = (read_responses(folder / "responses.parquet") for folder in (one, other))
    assert ours.column("response").equals(theirs.column("response"))
    assert ours.column("log_probs").equals(theirs.column("log_probs"))
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()


def test_a_rerun_of_colocate_sync_is_bitwise_equal(colocated: Path, colocated_again: Path) -> None:
    same_bits(colocated, colocated_again)


def test_fully_async_at_staleness_0_is_bitwise_equal_to_colocate_sync(colocated: Path, streaming: Path) -> None:
    same_bits(colocated, streaming)


def test_the_runs_did_learn_something_from_each_other_s_weights(colocated: Path, bench: Bench) -> None:
    """Another seed gives other tokens and weights: the equalities above are not between runs that stand still."""
    other = bench("colocated", "schedule=colocate_sync", "cluster.devices=1", *SMALL, seed=1)
    ours, theirs = (read_responses(folder / "responses.parquet") for folder in (colocated, other))
    assert not ours.column("response").equals(theirs.column("response"))
    assert (colocated / "weights.safetensors").read_bytes() != (other / "weights.safetensors").read_bytes()


def test_no_lag_at_staleness_0(colocated: Path, streaming: Path) -> None:
    for folder in (colocated, streaming):
        samples = load_samples(folder).to_pydict()
        assert set(samples["lag_worst"]) == {0} and set(samples["span"]) == {1}
        assert set(samples["fate"]) == {"trained"} and len(samples["fate"]) == 4 * 128
        assert load_ledger(folder)["admitted"] == 4 * 128
