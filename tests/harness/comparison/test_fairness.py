"""Which runs may be compared, and whether all of their samples are accounted for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.comparison.conservation import check_conservation
from harness.comparison.fairness import fairness_key, refuse_unfair
from harness.comparison.runs import Run, read_run
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.driver.observer import IterationListener
from harness.driver.session import simulate
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import RunDirectory

SMALL = ("backend=virtual", "cost=tiny_cpu", "iterations=3", "algorithm.batch_groups=4", "algorithm.group_size=4")
AGAIN = "recompute_activations"
SMALLER = ("algorithm.micro_batch_groups=2",)


def config(*settings: str) -> dict[str, Any]:
    return plain(compose_job([*SMALL, *SMALLER, *settings]))


def run(*settings: str, seed: int = 0, smoke: bool = False) -> Run:
    """What a comparison looks at before it looks at figures."""
    settled = config(*settings)
    identity = RunIdentity("e", "c", seed, settled["schedule"]["name"], "tiny", "torch", settled["backend"], smoke)
    return Run(Path(f"e/c/seed={seed}"), dataclasses.asdict(identity), settled, [], {})


def test_schedules_on_the_same_devices_are_fair_however_they_are_split() -> None:
    refuse_unfair(
        {
            "colocated": [run("schedule=colocate_sync", seed=seed) for seed in (0, 1)],
            "async": [
                run("schedule=fully_async", "schedule.split.rollout=1", f"training.{AGAIN}=true", seed=seed)
                for seed in (0, 1)
            ],
        },
        axes=("schedule",),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.devices=3"], "cluster.devices=2 in the first, 3 in the second"),
        (["model.hidden=128"], "model.hidden=64 in the first, 128 in the second"),
        (["backend=real", "algorithm.temperature=0.5"], "backend=virtual in the first, real in the second"),
        (["iterations=4"], "samples=48 in the first, 64 in the second; make iterations x algorithm.batch_groups"),
        (["backend=real"], "backend=virtual in the first, real in the second"),
        (["cost.train_step_s=1"], "cost.train_step_s="),
        (["schedule=one_step_off"], "schedule.name=fully_async in the first, one_step_off in the second"),
    ],
)
def test_an_unfair_pair_is_refused_with_both_names_the_setting_and_its_values(
    settings: list[str], message: str
) -> None:
    cells = {"one": [run("algorithm.correction=none")], "other": [run("algorithm.correction=tis", *settings)]}
    with pytest.raises(ConfigError) as refused:
        refuse_unfair(cells, axes=("algorithm.correction",))
    assert str(refused.value).startswith("one and other cannot be compared: ") and message in str(refused.value)


def test_runs_that_read_other_contents_of_one_file_are_refused_unless_that_is_what_is_compared() -> None:
    def reading(digest: str) -> list[Run]:
        made = run()
        inputs = [{"setting": "task.data", "path": "a.jsonl", "digest": digest}]
        return [dataclasses.replace(made, manifest=made.manifest | {"inputs": inputs})]

    cells = {"one": reading("3fa8"), "other": reading("77c1")}
    with pytest.raises(
        ConfigError, match=r"task\.data\.content=3fa8 in the first, 77c1 in the second; what task\.data"
    ):
        refuse_unfair(cells)
    refuse_unfair({"one": reading("3fa8"), "other": reading("3fa8")})
    refuse_unfair(cells, axes=("task.data",))


def test_other_seeds_and_smoke_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"seeds=\[0\] in the first, \[1\] in the second; run both with the same"):
        refuse_unfair({"one": [run()], "other": [run(seed=1)]})
    with pytest.raises(ConfigError, match="one: e/c/seed=0 is a smoke run"):
        refuse_unfair({"one": [run(smoke=True)]})
    with pytest.raises(ConfigError, match="e/c/seed=0 and e/c/seed=1 cannot be compared: engine.slots"):
        refuse_unfair({"one": [run(), run("engine.slots=3", seed=1)]})


def test_a_run_of_an_earlier_version_is_refused_with_what_it_does_not_say() -> None:
    old = {name: value for name, value in config().items() if name != "training"}
    with pytest.raises(ConfigError, match="a run says nothing of training: an earlier version made it; run it again"):
        fairness_key(old, [0])


def test_costs_count_where_time_is_simulated_only() -> None:
    assert "cost.train_step_s" in fairness_key(config(), [0])
    assert "cost.train_step_s" not in fairness_key(config("backend=real"), [0])


def test_an_axis_is_a_setting_or_a_whole_group() -> None:
    key = fairness_key(config(), [0], ["algorithm.correction", "schedule"])
    assert "algorithm.correction" not in key and "algorithm.kl_coef" in key
    assert not [name for name in key if name.startswith("schedule")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A simulated run that ends with samples in flight and has dropped some."""
    job = compose_job([*SMALL, *SMALLER, "schedule=fully_async", "schedule.order=completion", "schedule.on_stale=drop"])
    recorder_metrics: list[dict[str, float]] = []
    recorder = simulate(
        job, 0, lambda session: session.recorder.listeners.append(IterationListener(recorder_metrics.append))
    )
    with RunDirectory(tmp_path_factory.mktemp("results"), "e", "c", 0) as folder:
        identity = RunIdentity("e", "c", 0, "fully_async", "tiny", "torch", "virtual")
        folder.write_config(plain(job))
        folder.write_manifest(build_manifest(identity, {"run": 0}))
        for metrics in recorder_metrics:
            folder.append_metrics(metrics)
        recorder.write(folder)
        folder.finish()
    return read_run(folder.path)


def test_a_run_that_is_whole_conserves_its_samples(finished: Run) -> None:
    found = check_conservation([finished, finished])
    assert found.passed and (found.runs, found.trained) == (2, 2 * 48) and found.admitted >= found.trained
    assert found.summary().startswith("conservation passed: 2 ledgers close")


def less_trained(run: Run) -> Run:
    return dataclasses.replace(run, ledger=run.ledger | {"trained": run.ledger["trained"] - 1})


def one_more_in_flight(run: Run) -> Run:
    ids = [*run.ledger["in_flight_ids"], 10_000]
    flying = {"in_flight": run.ledger["in_flight"] + 1, "admitted": run.ledger["admitted"] + 1, "in_flight_ids": ids}
    return dataclasses.replace(run, ledger=run.ledger | flying)


def an_uneven_iteration(run: Run) -> Run:
    return dataclasses.replace(run, ledger=run.ledger | {"trained_by_iteration": {"0": 17, "1": 15, "2": 16}})


def metrics_that_lost_some(run: Run) -> Run:
    return dataclasses.replace(run, metrics=[m | {"ledger/trained": m["ledger/trained"] - 1} for m in run.metrics])


def a_sample_twice(run: Run) -> Run:
    damaged = dataclasses.replace(run)
    damaged.__dict__["samples"] = pa.concat_tables([run.samples, run.samples.slice(0, 1)])
    return damaged


def a_token_from_nowhere(run: Run) -> Run:
    tokens = run.ledger["tokens"]
    return dataclasses.replace(run, ledger=run.ledger | {"tokens": tokens | {"generated": tokens["generated"] + 1}})


def tokens_of_another_fate(run: Run) -> Run:
    tokens = run.ledger["tokens"]
    moved = tokens | {"trained": tokens["trained"] - 1, "dropped_stale": 1}
    return dataclasses.replace(run, ledger=run.ledger | {"tokens": moved})


def less_generated_than_trained(run: Run) -> Run:
    return dataclasses.replace(run, metrics=[m | {"token_ledger/in_flight": -1.0} for m in run.metrics])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (a_token_from_nowhere, "tokens generated, samples.parquet and what began again"),
        (tokens_of_another_fate, "ledger.json has the tokens"),
        (less_generated_than_trained, "metrics.jsonl has other tokens than samples.parquet in iteration 0"),
        (less_trained, "and accounts for"),
        (one_more_in_flight, "samples.parquet has "),
        (an_uneven_iteration, "iteration 0 trained 17 samples, its batch has 16"),
        (metrics_that_lost_some, "metrics.jsonl does not close in iteration 0"),
        (a_sample_twice, "samples.parquet has "),
    ],
)
def test_every_contradiction_between_files_is_found(damage: Callable[[Run], Run], message: str, finished: Run) -> None:
    found = check_conservation([damage(finished)])
    assert not found.passed and message in " ".join(found.problems)
    assert all(problem.startswith(f"{finished.path}: ") for problem in found.problems)
