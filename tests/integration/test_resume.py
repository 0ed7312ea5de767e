"""A run whose driver is killed, or asked to leave, and the same command again."""

import signal
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file

from harness.cli.main import LEFT_AT_CHECKPOINT
from harness.comparison.promises import read_finished
from harness.metrics.parquet import read_columns
from harness.metrics.run_files import load_config, load_evaluations, load_manifest, load_metrics
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_run
from tests.support.real_runs import SMALL, check_equal

pytestmark = pytest.mark.slow

ITERATIONS = 10
SETTINGS = (*SMALL.split(), f"iterations={ITERATIONS}", "checkpoint.every=2", "seeds=[0]")
REPEATABLE = (
    "schedule=colocate_sync cluster.devices=2",
    "schedule=colocate_sync cluster.devices=1 algorithm=ppo",
    "schedule=delayed_update cluster.devices=3",
    "schedule=separated_sync cluster.devices=2 algorithm.kl_in=reward algorithm.kl_coef=0.05 algorithm.kl_target=0.01",
    "schedule=one_step_off cluster.devices=2 algorithm.filter=tests.support.filters:even algorithm.over_sampling=1.5",
)
KILLED_AFTER = (1, 8, 5, 4, 6)
"""Iterations; of each of `REPEATABLE`."""
OTHERS = ("schedule=fully_async cluster.devices=2", "schedule=lending cluster.devices=2 schedule.patience_s=0.001")


def check_went_on(folder: Path, after: int) -> None:
    """With a checkpoint, where two were begun when it was killed, so that one was whole."""
    began = load_manifest(folder).get("resumed")
    assert after < 5 or (began and 2 <= began[0] < ITERATIONS)
    assert [line["iteration"] for line in load_metrics(folder)] == list(range(ITERATIONS))


@pytest.mark.parametrize(("settings", "after"), list(zip(REPEATABLE, KILLED_AFTER, strict=True)))
def test_what_was_killed_ends_bit_for_bit_as_ever(settings: str, after: int, results: Path, drivers: Drivers) -> None:
    """Wherever it was killed, also before its first checkpoint."""
    random, experiment = Random(settings), f"killed_{REPEATABLE.index(settings)}"
    told = (*SETTINGS, *settings.split())
    drivers.killed(results, experiment, told, after, later_s=random.uniform(0.0, 0.05))
    broken = drivers.bench(results, experiment, *told)
    check_went_on(broken, after)
    check_equal(broken, drivers.whole(results, *told))


@pytest.mark.parametrize("settings", OTHERS)
def test_where_order_of_arrival_decides_bounds_and_ledger_hold(settings: str, results: Path, drivers: Drivers) -> None:
    told, experiment = (*SETTINGS, *settings.split()), f"killed_other_{OTHERS.index(settings)}"
    drivers.killed(results, experiment, told, 6)
    folder = drivers.bench(results, experiment, *told)
    check_went_on(folder, 6)
    check_run(read_finished(folder))


def test_a_run_that_sigterm_asks_to_leave_ends_bit_for_bit_as_ever(results: Path, drivers: Drivers) -> None:
    settings = (*SETTINGS, "checkpoint.every=100", "schedule=one_step_off", "cluster.devices=2")
    settings += ("eval.every=4", "eval.samples=4")
    code, said = drivers.killed(results, "left", settings, 3, signal.SIGTERM)
    assert code == LEFT_AT_CHECKPOINT, said
    assert said.rstrip().endswith("the same command goes on") and "Traceback" not in said
    broken = drivers.bench(results, "left", *settings)
    (version,) = load_manifest(broken)["resumed"]
    assert f"left, as SIGTERM asked, with a checkpoint of version {version}:" in said
    check_equal(broken, whole := drivers.whole(results, *settings))
    evaluated = [[line["version"] for line in load_evaluations(folder)] for folder in (broken, whole)]
    assert evaluated == [[0, 4, 8, ITERATIONS]] * 2


@pytest.mark.parametrize(("schedule", "devices", "others"), [("colocate_sync", 2, 1), ("separated_sync", 2, 3)])
def test_a_run_on_other_devices_begins_with_a_checkpoint_and_ends_within_rounding_of_one_that_did_not_move(
    schedule: str, devices: int, others: int, results: Path, drivers: Drivers
) -> None:
    experiment = f"{schedule}_{devices}_to_{others}"
    summed = ("algorithm.learning_rate=5e-4", "algorithm.micro_batch_groups=1")  # eight gradients, in other orders
    settings = (*SETTINGS, *summed, "checkpoint.every=4", f"schedule={schedule}")
    there = (*settings, f"cluster.devices={devices}")
    drivers.killed(results, f"{experiment}_there", there, 9)
    (cell,) = (results / f"{experiment}_there").iterdir()
    here = (*settings, f"cluster.devices={others}", f"checkpoint.begin_with={cell}")
    moved = drivers.bench(results, f"{experiment}_here", *here)
    manifest = load_manifest(moved)
    (began,) = manifest["resumed"]
    assert manifest["begun_with"] == str(cell / "seed=0") and 4 <= began < ITERATIONS
    assert [line["iteration"] for line in load_metrics(moved)] == list(range(ITERATIONS))
    check_run(read_finished(moved))
    stayed = drivers.whole(results, *there)
    ran = [read_columns(folder / "responses.parquet", ["sample_id", "response"]) for folder in (moved, stayed)]
    assert ran[0].equals(ran[1])
    norms = [[line["train/grad_norm"] for line in load_metrics(folder)] for folder in (moved, stayed)]
    assert norms[0][:began] == norms[1][:began] and norms[0] == pytest.approx(norms[1], rel=1e-4)
    algorithm = load_config(moved)["algorithm"]
    rate, betas = algorithm["learning_rate"], algorithm["betas"]
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (moved, stayed))
    farthest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / rate
    print(f"{schedule}, from {devices} to {others} devices after {began} steps: {farthest:.1e} learning rates apart")
    assert farthest <= 2 * sum(largest_step(step, *betas) for step in range(began + 1, ITERATIONS + 1))


def largest_step(step: int, beta1: float, beta2: float) -> float:
    """No element of AdamW's step `step`, from 1, is larger, in learning rates, whatever the gradients: by Cauchy and
    Schwarz, of the weights that both moments give each gradient, corrected for their bias."""
    first, second = [beta1**age for age in range(step)], [beta2**age for age in range(step)]
    each = ((m / sum(first)) ** 2 / (v / sum(second)) for m, v in zip(first, second, strict=True))
    return float(sum(each) ** 0.5)
