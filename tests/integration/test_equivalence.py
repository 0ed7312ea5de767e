"""At staleness 0 a schedule changes when things happen, and nothing else: same tokens, rewards, weights, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FIRST_TIMEOUT_S

from harness.metrics.responses import read_responses
from harness.metrics.run_files import load_ledger, load_metrics, load_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

LEARNT = ("reward/", "response_length/", "policy/", "staleness/", "ledger/")
"""Metrics that say nothing of time."""


def same_bits(one: Path, other: Path) -> None:
    columns = ["sample_id", "group_id", "response_tokens", "reward", "exact_match", "lag_worst", "version_first"]
    assert load_samples(one).select(columns).equals(load_samples(other).select(columns))
    ours, theirs = (read_responses(folder / "responses.parquet") for folder in (one, other))
    assert ours.column("response").equals(theirs.column("response"))
    assert ours.column("log_probs").equals(theirs.column("log_probs"))
    assert learnt(one) == learnt(other)
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()


def learnt(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in metrics.items() if name.startswith(LEARNT)} for metrics in load_metrics(folder)
    ]


@pytest.mark.parametrize("other", ["colocated_again", "separated", "separated_streaming", "async_0"])
def test_without_staleness_every_schedule_is_bitwise_equal_to_colocate_sync(fresh: dict[str, Path], other: str) -> None:
    """And `colocate_sync` to itself."""
    same_bits(fresh["colocated"], fresh[other])


def test_the_runs_did_learn_something_from_each_other_s_weights(fresh: dict[str, Path]) -> None:
    """Another seed gives other tokens and weights: the equalities above are not between runs that stand still."""
    one, other = fresh["colocated"], fresh["colocated"].parent / "seed=1"
    ours, theirs = (read_responses(folder / "responses.parquet") for folder in (one, other))
    assert not ours.column("response").equals(theirs.column("response"))
    assert (one / "weights.safetensors").read_bytes() != (other / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["colocated", "separated", "separated_streaming", "async_0"])
def test_no_lag_at_staleness_0(fresh: dict[str, Path], name: str) -> None:
    samples = load_samples(fresh[name]).to_pydict()
    assert set(samples["lag_worst"]) == {0} and set(samples["span"]) == {1}
    assert set(samples["fate"]) == {"trained"} and len(samples["fate"]) == 4 * 128
    assert load_ledger(fresh[name])["admitted"] == 4 * 128
