"""Real runs with and without held-out evaluation: the same weights to the bit, accuracies that fit their versions."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.comparison.equivalence import differences
from harness.metrics.run_files import load_evaluations, load_metrics
from tests.support.forked_drivers import Drivers
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(FIRST_TIMEOUT_S)]

RUNS = {
    "colocated": "schedule=colocate_sync cluster.devices=1",
    "async_0": "schedule=fully_async schedule.max_staleness=0",
    "delayed": "schedule=delayed_update",
    "half": "schedule=half_step cluster.devices=4",
}
EVALUATED = "eval.every=2 eval.samples=6 eval.k=2"
ITERATIONS = 5
PLAIN_OF = {"colocated": "colocated", "async_0": "colocated", "delayed": "delayed"}
"""Whose samples do not hang on the timing: the run without evaluation that they equal."""


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    usual = f"{SMALL} iterations={ITERATIONS}"
    plain = {f"{name}_plain": f"{usual} {RUNS[name]}" for name in set(PLAIN_OF.values())}
    evaluated = {name: f"{usual} {EVALUATED} {given}" for name, given in RUNS.items()}
    return drivers.bench_all(results / "held_out", plain | evaluated)


@pytest.mark.parametrize("schedule", PLAIN_OF)
def test_evaluation_changes_no_bit_of_what_is_trained(runs: dict[str, Path], schedule: str) -> None:
    assert not differences(runs[f"{PLAIN_OF[schedule]}_plain"], runs[schedule])


@pytest.mark.parametrize("schedule", RUNS)
def test_the_first_the_last_and_every_second_version_are_evaluated(runs: dict[str, Path], schedule: str) -> None:
    """Engines under `delayed_update` never get the last two versions while it runs."""
    found = load_evaluations(runs[schedule])
    assert [line["version"] for line in found] == ([0, 2, 5] if schedule == "delayed" else [0, 2, 4, 5])
    for line in found:
        assert line["problems"] == 6 and 0 <= line["greedy"] <= 1 and line["sampled"] <= line["pass_at_k"] <= 1
        assert line["device_s"] > 0
    assert all(earlier["at_s"] <= later["at_s"] for earlier, later in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("schedule", RUNS)
def test_what_is_said_of_a_version_follows_from_its_responses(runs: dict[str, Path], schedule: str) -> None:
    kept = pq.read_table(runs[schedule] / "eval_responses.parquet").to_pandas()
    for line in load_evaluations(runs[schedule]):
        of_version = kept[kept.version == line["version"]]
        assert len(of_version) == 6 * 3 and of_version.response.map(len).sum() == line["tokens"]
        greedy = of_version[of_version.number == 0]
        assert greedy.exact_match.mean() == pytest.approx(line["greedy"])
        assert greedy.reward.mean() == pytest.approx(line["reward"])
        assert of_version[of_version.number > 0].groupby("row").exact_match.any().mean() == line["pass_at_k"]
    assert (kept.response_text.str.len() > 0).all() and set(kept.row) == set(map(str, range(6)))


def test_the_same_version_of_the_same_training_has_the_same_accuracy(runs: dict[str, Path]) -> None:
    def accuracies(name: str) -> list[tuple[float, ...]]:
        return [
            tuple(line[key] for key in ("greedy", "reward", "sampled", "tokens"))
            for line in load_evaluations(runs[name])
        ]

    assert accuracies("colocated") == accuracies("async_0")


@pytest.mark.parametrize("schedule", RUNS)
def test_its_time_is_in_no_iteration(runs: dict[str, Path], schedule: str) -> None:
    lines = load_metrics(runs[schedule])
    assert sum(line["time/iteration_s"] for line in lines) == pytest.approx(lines[-1]["seconds"])
    assert any("eval/greedy" in line for line in lines)
    assert all(line["time/iteration_s"] > 0 for line in lines)
