"""The settings that the main job leaves alone, in one short real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.metrics.run_files import load_ledger, load_metrics, load_samples
from tests.integration.conftest import FIRST_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]


@pytest.fixture
def drained(ahead: dict[str, Path]) -> Path:
    return ahead["drained"]


def test_drained_engines_sample_no_sample_under_two_versions(drained: Path) -> None:
    assert set(load_samples(drained).to_pydict()["span"]) == {1}


def test_half_a_batch_of_staleness_gives_lags_of_0_and_1_and_a_fresh_second_half(drained: Path) -> None:
    samples = load_samples(drained).to_pydict()
    assert set(samples["lag_worst"]) == {0, 1}
    rows, half = 16 * 8, 8 * 8
    lags = zip(samples["sample_id"], samples["lag_worst"], strict=True)
    assert {sample % rows >= half for sample, lag in lags if lag == 1} == {
        False
    }  # only groups of a batch's first half may be sampled a version early


def test_the_kl_to_the_reference_starts_at_zero_and_grows(drained: Path) -> None:
    kl = [metrics["policy/kl_ref"] for metrics in load_metrics(drained)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-7


def test_engine_and_trainer_agree_on_log_probs_of_the_same_version(drained: Path) -> None:
    mismatches = [metrics["policy/mismatch_kl"] for metrics in load_metrics(drained) if "policy/mismatch_kl" in metrics]
    assert mismatches and max(mismatches) < 1e-8


def test_the_books_close(drained: Path) -> None:
    ledger = load_ledger(drained)
    assert ledger["admitted"] == ledger["trained"] == 6 * 16 * 8
