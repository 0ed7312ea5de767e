"""At staleness 0 a schedule changes when things happen, and nothing else: same tokens, rewards, weights, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.comparison.equivalence import differences
from harness.metrics.run_files import load_ledger, load_samples
from tests.integration.conftest import FIRST_TIMEOUT_S

pytestmark = pytest.mark.timeout(FIRST_TIMEOUT_S)


@pytest.mark.parametrize("other", ["colocated_again", "separated", "separated_streaming", "async_0"])
def test_without_staleness_every_schedule_is_bitwise_equal_to_colocate_sync(fresh: dict[str, Path], other: str) -> None:
    """And `colocate_sync` to itself."""
    assert not differences(fresh["colocated"], fresh[other])


def test_the_runs_did_learn_something_from_each_other_s_weights(fresh: dict[str, Path]) -> None:
    """Another seed gives other tokens and weights: the equalities above are not between runs that stand still."""
    differing = differences(fresh["colocated"], fresh["colocated"].parent / "seed=1")
    assert {"tokens of responses", "final weights"} <= set(differing)


@pytest.mark.parametrize("name", ["colocated", "separated", "separated_streaming", "async_0"])
def test_no_lag_at_staleness_0(fresh: dict[str, Path], name: str) -> None:
    samples = load_samples(fresh[name]).to_pydict()
    assert set(samples["lag_worst"]) == {0} and set(samples["span"]) == {1}
    assert set(samples["fate"]) == {"trained"} and len(samples["fate"]) == 4 * 128
    assert load_ledger(fresh[name])["admitted"] == 4 * 128
