"""Which runs may be compared, and whether all of their samples are accounted for."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from scipy import stats

from harness.acceptance.chaos.jobs import base
from harness.comparison import selection
from harness.comparison.conservation import check_conservation
from harness.comparison.fairness import fairness_key, refuse_unfair
from harness.comparison.promises import FinishedRun, broken_promises
from harness.comparison.runs import Cell, Run, read_run
from harness.config import ConfigError
from harness.config.compose import compose_job, plain
from harness.driver.listeners import IterationListener
from harness.driver.session import simulate
from harness.metrics.manifest import RunIdentity, build_manifest
from harness.metrics.run_files import RunDirectory
from tests.support.random_jobs import play

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
def test_an_unfair_pair_is_refused_with_names_setting_and_values(settings: list[str], message: str) -> None:
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


def test_costs_count_where_time_is_simulated_and_an_axis_is_a_setting_or_a_group() -> None:
    assert "cost.train_step_s" in fairness_key(config(), [0])
    assert "cost.train_step_s" not in fairness_key(config("backend=real"), [0])
    key = fairness_key(config(), [0], ["algorithm.correction", "schedule"])
    assert "algorithm.correction" not in key and "algorithm.kl_coef" in key
    assert not [name for name in key if name.startswith("schedule")]
    old = {name: value for name, value in config().items() if name != "training"}
    with pytest.raises(ConfigError, match="a run says nothing of training: an earlier version made it; run it again"):
        fairness_key(old, [0])


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


LENGTHS = [10, 20, 30, 40, 200, 300]


def selection_run(*fates: str, judged: bool = True) -> Any:
    """Six samples; those without a fate are in flight."""
    told = [*fates, *["in_flight"] * (6 - len(fates))]
    rewards = [0.5 if fate == "trained" else 0.0 if judged else None for fate in told]
    columns = {
        "fate": told,
        "finished_at": [None if fate == "in_flight" else 1.0 for fate in told],
        "response_tokens": [0 if fate == "in_flight" else n for fate, n in zip(told, LENGTHS, strict=True)],
        "reward": pa.array(rewards, pa.float64()),
        "reward_failed": [False] * 6,
    }
    return SimpleNamespace(samples=pa.table(columns))


def cell(label: str, *runs: Any) -> Cell:
    return Cell(label, label, runs)


def test_trained_samples_are_held_against_all_completed_ones_but_baselines() -> None:
    found = selection_run(*["trained"] * 4, "dropped_stale", "dropped_spare")
    assert selection.sampled_tokens(found.samples) == {"trained": 100, "dropped_stale": 200, "dropped_spare": 300}
    assert selection.discarded_tokens(found) == pytest.approx(5 / 6) and selection.length_ratio(found) == 0.25
    assert selection.length_distance(found) == pytest.approx(stats.ks_2samp(LENGTHS[:4], LENGTHS).statistic)
    assert not selection.selects(selection_run(*["trained"] * 4)) and not selection.selects(
        selection_run("dropped_baseline", *["trained"] * 5)
    )
    assert selection.selects(selection_run("dropped_filtered", *["trained"] * 5))
    even = cell("even", selection_run(*["trained"] * 6))
    drops = ("trained",) * 4 + ("dropped_stale",) * 2
    assert selection.selection_sentence([even, cell("short", selection_run("dropped_stale", *["trained"] * 5))]) == ""
    (judged, unknown) = (
        selection.selection_sentence([even, cell("fast", selection_run(*drops, judged=one))]) for one in (True, False)
    )
    assert judged.startswith("fast drops long answers: trained responses are 75% shorter") and "+0.167" in judged
    assert "difficulty: unknown" in unknown


Changes = dict[str, Any]
WRONG: dict[str, tuple[Changes, str]] = {
    "trained in another iteration": ({"trained_iteration": 1}, "groups were torn"),
    "too old": ({"version_first": -9}, "which is too old"),
    "of a version to come": ({"version_last": 3}, "a lag outside of"),
    "finished before it began": ({"finished_at": -1.0}, "has the times"),
    "lost": ({"fate": "in_flight", "trained_iteration": None}, "iteration 0 trained"),
    "counted as another": ({"sample_id": 1}, "there twice"),
}


@pytest.fixture(scope="module")
def promises_finished() -> FinishedRun:
    config = base("one_step_off")
    algorithm = replace(config.algorithm, batch_groups=4, group_size=2, micro_batch_groups=1)
    return play(replace(config, iterations=3, algorithm=algorithm)).finished


def test_a_run_that_kept_its_promises_broke_none_and_an_open_ledger_is_found(promises_finished: FinishedRun) -> None:
    assert broken_promises(promises_finished) == []
    counts = {**promises_finished.counts, "admitted": promises_finished.counts["admitted"] + 1}
    assert any("the ledger admitted" in line for line in broken_promises(replace(promises_finished, counts=counts)))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_sample_that_breaks_one_is_found(promises_finished: FinishedRun, wrong: str) -> None:
    changes, said = WRONG[wrong]
    first, *others = promises_finished.samples
    broken = broken_promises(replace(promises_finished, samples=[replace(first, **changes), *others]))
    assert any(said in line for line in broken), broken


def test_engines_started_again_and_clocks_of_two_hosts_are_allowed_for(promises_finished: FinishedRun) -> None:
    *others, last = promises_finished.samples
    newer = replace(promises_finished, samples=[*others, replace(last, version_first=2, version_last=2)])
    assert ["a lag outside of 1 to 1" in line for line in broken_promises(newer)] == [True]
    assert broken_promises(replace(newer, restarted=frozenset({f"rollout[{last.engine}]"}))) == []
    older = replace(promises_finished, samples=[*others, replace(last, version_first=0)])
    restarted = replace(older, restarted=frozenset({f"rollout[{last.engine}]"}))
    assert any("a lag outside of 0 to 1" in line for line in broken_promises(restarted))
    first, *others = promises_finished.samples
    early = replace(promises_finished, samples=[replace(first, started_at=first.admitted_at - 0.15), *others])
    assert ["has the times" in line for line in broken_promises(replace(early, clock_uncertainty_s=0.07))] == [True]
    assert broken_promises(replace(early, clock_uncertainty_s=0.08)) == []
