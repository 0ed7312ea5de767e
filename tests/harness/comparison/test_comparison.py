"""Comparisons made of made-up runs whose truth is known: what is measured, called, refused, warned of and printed."""

import csv
import json
import math
import re
from dataclasses import replace
from html import unescape
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.cli.console import ValuesConsole
from harness.comparison import measures
from harness.comparison.comparison import Comparison, compare
from harness.comparison.console import print_comparison
from harness.comparison.equivalence import Gate, GatePair
from harness.comparison.measure_text import against
from harness.comparison.measures import SPEED, CellMeasure, Measure, MetricDefinition, summary_of
from harness.comparison.runs import Cell, Run, read_run
from harness.comparison.statistics import Interval
from harness.comparison.verdict import collapsed, collapses_of
from harness.config import ConfigError
from harness.metrics.timeline import Place
from harness.report.page.document import document
from harness.report.page.markdown import markdown, table_tex
from harness.report.page.verdict_chart import caption_of, verdict_table
from tests.support.fabricated_cells import BATCH, Made, make_cell, make_run
from tests.support.project import ROOT

SYNC = Made("colocate_sync", lag=0)
FAST = Made("fully_async", step_s=0.75, draw=1)
WORSE = Made("half_step", step_s=0.7, exact_match=0.7, draw=2, lag=0)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    root = tmp_path_factory.mktemp("results")
    made = {"sync": SYNC, "fast": FAST, "worse": WORSE}
    return [make_cell(root, label, wanted) for label, wanted in made.items()]


@pytest.fixture(scope="module")
def compared(cells: list[Cell]) -> Comparison:
    return compare(cells)


def printed(comparison: Comparison, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        print_comparison(comparison, console)
    return captured.get()


def value_of(comparison: Comparison, key: str, cell: int = 0) -> float:
    measure = comparison.measure(key)
    assert measure is not None, key
    return measure.cells[cell].value


def test_a_fast_schedule_is_called_faster_and_what_learns_worse_worse(compared: Comparison) -> None:
    measure = compared.measure("throughput/samples_per_s")
    ratio = measure.against_baseline(1)
    assert ratio is not None and ratio.distinguishable and ratio.paired
    assert ratio.interval.low < 4 / 3 < ratio.interval.high
    assert measure.cells[1].better is not None and measure.cells[1].better.value == 1.0
    assert measure.cells[0].difference is None and measure.against_baseline(0) is None
    measure = compared.measure("reward/exact_match")
    same, worse = measure.against_baseline(1), measure.against_baseline(2)
    assert same is not None and not same.distinguishable
    assert worse is not None and worse.distinguishable and worse.interval.high < 0
    assert measure.cells[0].iqm is not None and measure.cells[0].iqm.bounded


def test_a_program_gets_the_figures_of_every_cell_and_seed(compared: Comparison) -> None:
    console = ValuesConsole(Console(file=StringIO()))
    print_comparison(compared, console)
    rows: dict[str, Any] = {str(table["title"]): table["rows"] for table in console.tables}
    assert console.lines[0] == compared.verdict
    (speed, *_), (_, fast, _) = compared.measures, rows["Samples per second"]
    assert fast["cell"] == "fast" and fast["mean"] == pytest.approx(speed.cells[1].value, rel=1e-3)
    assert [*map(float, fast["by seed"].split())] == pytest.approx([*speed.cells[1].per_seed.values()], rel=1e-2)
    assert re.fullmatch(r"1\.3\dx \*", fast["against baseline"]) and fast["better"] == 1.0


def test_measures_are_those_of_a_runs_summary_without_its_warm_up(compared: Comparison) -> None:
    summary = summary_of(compared.cells[1].runs[0])
    assert {"throughput/samples_per_s", "reward/exact_match", "idle/rollout", "staleness/max"} <= summary.keys()
    assert all(math.isfinite(value) for value in summary.values())
    for measure in compared.measures:
        if measure.key in summary:
            assert summary[measure.key] == measure.cells[1].per_seed[0]
    run = compared.cells[0].runs[0]
    metrics = run.metrics
    expected = (len(metrics) - 2) * BATCH / (metrics[-1]["seconds"] - metrics[1]["seconds"])
    measure = compared.measure("throughput/samples_per_s")
    assert measure is not None and measure.cells[0].per_seed[0] == pytest.approx(expected)
    assert value_of(compared, "seconds") == pytest.approx(
        np.mean([run.metrics[-1]["seconds"] for run in compared.cells[0].runs])
    )
    assert value_of(compared, "throughput/tokens_per_s") == pytest.approx(
        10 * value_of(compared, "throughput/samples_per_s")
    )


def test_lags_are_told_in_optimizer_steps_as_well_where_a_version_takes_several(tmp_path: Path) -> None:
    cell = make_cell(tmp_path, "stale", replace(SYNC, lag=1), range(2))
    assert compare([cell]).measure("staleness/steps_mean") is None
    for run in cell.runs:
        run.config["algorithm"] |= {"mini_batches": 4, "epochs": 2}
    compared = compare([cell])
    assert value_of(compared, "staleness/steps_max") == 8 * value_of(compared, "staleness/max") > 0


def test_an_interval_ends_where_the_possible_does(tmp_path: Path) -> None:
    two = compare([make_cell(tmp_path, "sync", replace(SYNC, exact_match=0.95, noise=(0.0, 0.03)), range(2))])
    measure = two.measure("reward/exact_match")
    assert measure is not None and measure.cells[0].interval is not None
    assert measure.cells[0].interval.high == 1.0 > measure.cells[0].value > measure.cells[0].interval.low
    assert Interval(0.5, -math.inf, math.inf).within(0.0, 1.0).bounded is False, "one seed has no interval"


def test_the_verdict_says_both_and_how_sure_it_is(compared: Comparison, cells: list[Cell]) -> None:
    assert compared.verdict.startswith("worse trains 1.4")
    assert "5 paired seeds) the samples per second of sync; its held-out accuracy is 0.1" in compared.verdict
    assert "Of those that learn no worse than sync, as far as these seeds can tell, fast is the fastest with 1.3" in (
        compared.verdict
    )
    two = compare(cells[:2])
    assert two.verdict.startswith("fast trains 1.3")
    assert "held-out accuracy is equal within 2 points (+0.006, " in two.verdict
    narrower = compare(cells[:2], margin=0.01).verdict
    assert "held-out accuracy is not told apart by five seeds (+0.006, " in narrower
    against_fast = compare(cells[:2], baseline=1)
    assert against_fast.verdict.startswith("fast trains most samples per second; sync, which comes next, trains 0.7")


def test_where_the_algorithm_differs_the_verdict_is_about_what_is_learnt(cells: list[Cell]) -> None:
    along = ("schedule", "algorithm.correction")
    verdict = compare(cells, axes=along).verdict
    assert verdict.startswith("fast has the highest held-out accuracy, 0.9")
    assert verdict.endswith(" of sync; 5 seeds tell 1 of the 2 others from sync, lower: worse.")
    told = "; 5 seeds tell none of the others from sync"
    assert compare(cells[:2], axes=along).verdict.endswith(f"{told}, equal within 2 points: fast.")
    assert compare(cells[:2], axes=along, margin=0.01).verdict.endswith(f"{told}.")


FILTERED = "algorithm.filter=zero_variance"


def test_a_verdict_on_learning_is_of_the_final_policy_and_not_of_samples_that_a_filter_left(tmp_path: Path) -> None:
    """The filter trains on what is wrong, so its samples are worse and its policy is better."""
    treated = Made(exact_match=0.78, evaluated=0.12, settings=(FILTERED,))
    cells = [make_cell(tmp_path, "none", Made(exact_match=0.86)), make_cell(tmp_path, "zero_variance", treated)]
    found = compare(cells, axes=("algorithm.filter",))
    assert found.verdict.startswith("zero_variance has the highest held-out accuracy, 0.89")
    assert found.verdict.endswith("higher: zero_variance.") and found.best == (1,)
    trained = found.measure("reward/exact_match")
    assert trained is not None and trained.cells[1].value < trained.cells[0].value and trained.better is None
    assert "to held-out accuracy" in found.measure("reach/samples/0.8").title  # type: ignore[union-attr]


def test_along_what_may_choose_samples_trained_ones_give_no_verdict_on_learning(tmp_path: Path) -> None:
    made = {"one": Made(exact_match=0.86), "other": Made(exact_match=0.7, evaluated=None)}
    cells = [make_cell(tmp_path, label, its, range(3)) for label, its in made.items()]
    axes = """algorithm.filter algorithm.over_sampling algorithm.rejection.token_ratio algorithm.mask_truncated
        algorithm.max_token_staleness algorithm.temperature algorithm.options.least algorithm.group_size schedule
        schedule.on_stale task.buffer schedule.max_staleness engine.on_straggler engine.sample_limit_s task.data
        max_tokens model iterations"""
    for axis in axes.split():
        found = compare(cells, axes=(axis,))
        assert f"o verdict on what was learnt: {axis} may choose the samples that are trained" in found.verdict
        assert "eval.every=auto" in found.verdict and "exact match" not in found.verdict
        trained = found.measure("reward/exact_match")
        assert trained is not None and trained.better is None
        chart = verdict_table(found)
        assert (chart is None) if axis.startswith("algorithm") else chart is not None and len(chart) == 2 * len(cells)
    learnt = compare(cells, axes=("algorithm.learning_rate",)).verdict
    assert learnt.startswith("one has the highest exact match of the samples trained last, 0.8")


def test_the_docs_say_of_every_measure_whose_policy_and_which_samples_it_is_of(compared: Comparison) -> None:
    with (ROOT / "docs/measures.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row.values())]
    told = {re.sub("<.*", "", key) for row in rows for key in row["keys"].split()}
    for key in {measure.key for measure in compared.measures} | set(measures.OF_TRAINING):
        assert max((name for name in told if key.startswith(name)), key=len, default=""), f"{key} stands on no row"


def test_policies_that_sample_at_other_temperatures_are_held_against_each_other_greedily(tmp_path: Path) -> None:
    cells = [
        make_cell(tmp_path, label, Made(settings=(f"algorithm.temperature={label}",)), range(3))
        for label in ("0.6", "1.0")
    ]
    found = compare(cells, axes=("algorithm.temperature",))
    assert found.question == "eval/greedy" and "greedy held-out accuracy" in found.verdict


def test_the_same_schedule_with_other_noise_is_not_called_different(tmp_path: Path) -> None:
    draws = count(100)
    for name in ("first", "second"):
        here, there = (make_cell(tmp_path / name, label, replace(SYNC, draw=next(draws))) for label in ("one", "other"))
        compared = compare([here, there])
        called = [
            measure.title for measure in compared.measures if (d := measure.against_baseline(1)) and d.distinguishable
        ]
        assert called == []
        assert "other is not told apart from one in samples per second" in compared.verdict


def test_the_more_is_measured_the_more_it_takes_to_call_any(cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    faint = {"sync": [0.5, 1.9, 2.4, 1.2, 2.3], "fast": [1.0, 2.0, 3.0, 1.5, 2.5]}  # p = .021

    def of(run: Run) -> float:
        return faint[run.identity.cell][run.identity.seed]

    keys = [SPEED, *(f"other/{number}" for number in range(10))]
    metrics = [MetricDefinition(key, key, "", "higher", "difference", of) for key in keys]
    monkeypatch.setattr(measures, "metric_definitions", lambda runs: metrics)
    speed, *others = measures.measures_of(cells[:2], baseline=0)
    assert speed.cells[1].difference is not None and speed.cells[1].difference.distinguishable
    for measure in others:
        difference = measure.cells[1].difference
        assert difference is not None and difference.interval.low > 0 and not difference.distinguishable


def test_runs_of_one_schedule_with_different_seeds_are_not_called_different(tmp_path: Path, cells: list[Cell]) -> None:
    first, second = (
        Cell(f"seed {run.identity.seed}", f"seed {run.identity.seed}", (run,)) for run in cells[0].runs[:2]
    )
    compared = compare([first, second], axes=("seeds",))
    assert not any(measure.cells[1].ratio and measure.cells[1].ratio.distinguishable for measure in compared.measures)
    assert compared.verdict == "No verdict: 1 seed, and a difference takes 3 that are shared (seeds=3)."
    assert "1 seed: no difference is judged of fewer than 3" in compared.warnings
    others = make_cell(tmp_path, "others", SYNC, seeds=range(5, 10))
    equal = "others trains as many samples per second as sync within 2 %: 0.99x (0.98 to 1.01, 5 and 5 seeds, unpaired)"
    assert compare([cells[0], others], axes=("seeds",)).verdict.startswith(equal)
    groups = compare([cells[0], others], axes=("seeds",), margin=0.001)
    assert "is not told apart" in groups.verdict and "5 and 5 seeds, unpaired" in groups.verdict
    assert any("compared as groups" in warning for warning in groups.warnings)


def test_an_unfair_pair_is_refused_by_setting_and_values(tmp_path: Path, cells: list[Cell]) -> None:
    other = replace(FAST, settings=("algorithm.learning_rate=0.1",))
    unfair = make_cell(tmp_path, "unfair", other)
    with pytest.raises(ConfigError, match=r"sync.*unfair.*algorithm\.learning_rate=auto.*0\.1"):
        compare([cells[0], unfair])
    assert compare([cells[0], unfair], axes=("schedule", "algorithm.learning_rate")).verdict


def test_a_seed_that_never_got_there_is_counted_and_not_averaged(compared: Comparison) -> None:
    measure = compared.measure("reach/samples/0.8")
    sync, worse = measure.cells[0], measure.cells[2]
    assert sync.reached == 5 and sync.interval is not None and sync.value < 20 * BATCH
    assert worse.reached == 0 and worse.interval is None and worse.value == math.inf
    assert worse.difference is None and worse.ratio is None
    assert worse.better is not None and worse.better.value == 0.0
    assert compared.measure("reach/seconds/0.8") and not compared.measure("reach/samples/0.95")
    assert "0 of 5" in printed(compared)


def test_curves_of_a_cell_lie_on_a_grid_that_all_its_seeds_cover(compared: Comparison) -> None:
    drawn = {(curve.key, curve.axis, curve.cell): curve for curve in compared.curves}
    assert len(drawn) == len(compared.curves) == 6 * 3 * 3
    curve = drawn["reward/exact_match", "seconds", 1]
    assert curve.window == 1 and set(curve.per_seed) == set(range(5))
    assert curve.grid[-1] == min(run.metrics[-1]["seconds"] for run in compared.cells[1].runs)
    assert np.all(curve.low < curve.mean) and np.all(curve.mean < curve.high)
    assert curve.mean == pytest.approx(np.mean(list(curve.per_seed.values()), axis=0))
    tokens = drawn["reward/mean", "tokens", 0]
    assert tokens.grid[-1] == pytest.approx(20 * BATCH * 10)


def test_staleness_profiles_and_idle_shares_are_there_for_every_cell(compared: Comparison) -> None:
    sync, fast, _ = compared.staleness
    assert sync.lags.tolist() == fast.lags.tolist() == [0, 1]
    assert sync.shares.tolist() == [1.0, 0.0]
    assert fast.shares == pytest.approx([1 / 20, 19 / 20])
    profile = compared.profiles[0]
    assert profile.shares[0] == 1.0 and profile.shares[-1] == 0.0
    assert np.all(np.diff(profile.shares) <= 0) and np.all(profile.low <= profile.shares)
    assert value_of(compared, "idle/rollout") == pytest.approx(0.4)
    assert value_of(compared, "idle/actor") == pytest.approx(0.2)
    assert compared.measure("idle/reward") is None


def test_idle_shares_of_shared_and_of_own_devices_are_not_held_against_each_other(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, label, made) for label, made in {"sync": SYNC, "fast": FAST}.items()]
    for run in cells[0].runs:
        run.timeline.placement["reference", "0"] = Place("actor", ("device 1",))
    compared = compare(cells)
    shared, own = compared.measure("idle/actor"), compared.measure("idle/rollout")
    assert shared is not None and own is not None
    assert shared.cells[1].value == pytest.approx(0.2) and shared.cells[1].better is None
    assert shared.against_baseline(1) is None and own.against_baseline(1) is not None


def test_the_fastest_is_named_with_those_that_do_not_differ_from_it_significantly(tmp_path: Path) -> None:
    made = {"sync": SYNC, "fast": FAST, "as fast": replace(FAST, draw=7), "between": replace(FAST, step_s=0.9, draw=3)}
    cells = [make_cell(tmp_path, label, wanted) for label, wanted in made.items()]
    verdict = compare(cells, margin=1e-4).verdict
    first, second = ("fast", "as fast") if verdict.startswith("fast") else ("as fast", "fast")
    assert re.match(rf"{first} trains 1\.3\dx \(.*of sync, not told apart from {second} \(1\.3\dx\); ", verdict)
    wide = compare(cells, margin=0.2).verdict
    assert re.match(rf"{first} trains 1\.3\dx \(.*of sync, equal within 20 % to {second} \(1\.3\dx\); ", wide)


def test_what_is_equal_within_the_margin_is_said_so_on_the_terminal_page_picture_and_paper(cells: list[Cell]) -> None:
    """fast learns what sync does; of 1 point these seeds cannot tell."""
    for margin, equal in ((0.02, True), (0.01, False)):
        two = compare(cells[:2], margin=margin)
        chart, learnt = verdict_table(two), two.outcome
        assert chart is not None and learnt is not None
        lines = [line for line in printed(two).splitlines() if line.startswith("fast") and "+0.6 points" in line]
        assert ("points =" in lines[0]) == equal, "the first is of what was learnt"
        word = f"equal within {100 * margin:g} points" if equal else "not told apart"
        page = markdown(two, [])
        assert f"+0.6 points ({word})" in page and word in document(two)
        assert list(chart[chart.measure.str.contains("accuracy")].value) == ["", "+0.6 =" if equal else "+0.6"]
        assert ("=: equal within" in caption_of(chart)) == equal == ("+0.6 =" in table_tex(two))


def test_a_higher_mean_that_scatters_more_hides_no_speed_up(tmp_path: Path) -> None:
    made = {"sync": SYNC, "fast": FAST, "now and then": replace(FAST, step_s=0.6, noise=(0.6, 0.01), draw=5)}
    compared = compare([make_cell(tmp_path, label, wanted) for label, wanted in made.items()])
    speed = compared.measure(SPEED)
    assert speed is not None and speed.cells[2].value > speed.cells[1].value
    assert compared.verdict.startswith("fast trains 1.3"), compared.verdict
    assert compared.best == (1, 2), "of which nothing says that it is slower"


def test_there_is_no_verdict_over_a_failed_check_missing_runs_or_an_outlier_of_the_baseline(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, label, made) for label, made in {"sync": SYNC, "fast": FAST}.items()]
    compared = compare(cells)
    assert not compared.faults and compared.verdict == compared.claim
    gate = Gate("sync", "", (GatePair("fast", "somewhere", ("final weights",)),), 96, 3, "tiny", "", "", {})
    for changed, told in (
        ({"gate": gate}, "equivalence gate FAILED (3 iterations"),
        ({"gate": replace(gate, failure="it could not run")}, "it could not run"),
        ({"conservation": replace(compared.conservation, problems=("one",))}, "conservation FAILED: 1 contradiction"),
        ({"missing": ("seed 4 is left out: not every cell has finished it",)}, "seed 4 is left out"),
    ):
        refused = replace(compared, **changed)  # type: ignore[arg-type]
        assert (
            refused.verdict.startswith("No verdict: ") and told in refused.verdict and "trains" not in refused.verdict
        )
        assert refused.verdict in " ".join(printed(refused).split())
    slow = read_run(make_run(tmp_path, "sync", SYNC, 3, slower=1.3).path)
    odd = replace(cells[0], runs=(*cells[0].runs[:3], slow, cells[0].runs[4]))
    assert "of the baseline, sync: seed 3 is an outlier, 2" in compare([odd, cells[1]]).verdict
    assert compare([cells[1], odd]).verdict.startswith("fast trains"), "it is not the baseline"


def test_engines_that_were_lost_and_roles_that_were_started_again_are_warned_of(tmp_path: Path) -> None:
    cell = make_cell(tmp_path, "sync", SYNC, range(2))
    cell.runs[1].ledger["engines"] = [{"what": "lost"}, {"what": "joined"}]
    cell.runs[1].ledger["restarts"] = [{}, {}]
    warnings = compare([cell]).warnings
    assert "sync, seed 1: once a rollout engine was lost (engines)" in warnings
    assert any(line.startswith("sync, seed 1: 2 times roles died and were started again") for line in warnings)


def test_what_could_not_be_scored_is_warned_of_and_forbids_a_verdict_above_the_bound(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path, label, made) for label, made in {"sync": SYNC, "fast": FAST}.items()]
    trained = cells[1].runs[2].metrics[-1]["samples"]
    for failed, forbidden in ((trained * 0.005, False), (trained * 0.25, True)):
        cells[1].runs[2].metrics[3]["reward/failed"] = failed
        compared = compare(cells)
        said = f"of the trained samples ({'25' if forbidden else '0.5'} %) could not be scored (reward/failed)"
        assert any(line.startswith("fast, seed 2: ") and line.endswith(said) for line in compared.warnings)
        assert (
            compared.verdict.startswith("No verdict: fast: ") == forbidden and (said in compared.verdict) == forbidden
        )


def test_a_setting_that_chose_no_samples_is_warned_of_where_it_is_what_differs(tmp_path: Path) -> None:
    filtered = replace(SYNC, settings=("algorithm.filter=zero_variance",))
    cells = [make_cell(tmp_path, label, made, range(2)) for label, made in {"all": SYNC, "few": filtered}.items()]
    told = "algorithm.filter=zero_variance refused no group in any run, so it chose no samples"
    axes = ("algorithm.filter",)
    assert any(warning.startswith(told) for warning in compare(cells, axes).warnings)
    cells[1].runs[1].ledger["dropped_filtered"] = 4
    assert not any(told in warning for warning in compare(cells, axes).warnings)


def test_how_far_training_is_off_policy_is_told_and_drawn(tmp_path: Path) -> None:
    cell = make_cell(tmp_path, "off", SYNC, range(2))
    for run in cell.runs:
        for number, line in enumerate(run.metrics):
            line |= {"policy/effective_samples": 0.5, "policy/cut": 0.25 * (number % 2), "policy/left_out": None}
    compared = compare([cell])
    assert value_of(compared, "policy/effective_samples") == 0.5
    assert value_of(compared, "policy/cut") == pytest.approx(0.125, abs=0.02)
    drawn = {curve.key: curve for curve in compared.curves}
    assert set(drawn["policy/effective_samples"].mean) == {0.5} and "policy/kl_behaviour" not in drawn


def test_simulated_runs_have_no_rewards_and_everything_else(tmp_path: Path) -> None:
    made = [replace(wanted, backend="virtual", exact_match=None) for wanted in (SYNC, FAST)]
    compared = compare(
        [make_cell(tmp_path, label, wanted, range(3)) for label, wanted in zip(("sync", "fast"), made, strict=True)]
    )
    assert compared.simulated and compared.profiles == ()
    assert compared.verdict.startswith("Simulated: fast trains 1.3") and "exact match" not in compared.verdict
    assert {curve.key for curve in compared.curves} == {"response_length/mean"}
    text = printed(compared)
    assert "(simulated)" in text and "exact match" not in text.lower()


def test_warnings_name_what_is_odd(tmp_path: Path, cells: list[Cell]) -> None:
    first = replace(SYNC, draw=7)
    runs = [make_run(tmp_path, "odd", first, seed, slower=2.0 if seed == 0 else 1.0) for seed in range(4)]
    busy = {"load": {"others": 0.4}, "git": {"commit": "b" * 40, "dirty": True}, "started_at": "2026-01-02T00:00:00Z"}
    runs.append(make_run(tmp_path, "odd", first, 4, manifest=busy))
    odd = Cell("odd", "odd", tuple(read_run(run.path) for run in runs))
    warnings = "\n".join(compare([cells[0], odd]).warnings)
    assert "odd: the first run (seed 0) is " in warnings and "slower than the median of its seeds" in warnings
    assert "odd, seed 4: other processes used up to 40% of the machine" in warnings
    assert "the runs come from 2 commits: aaaaaaa, bbbbbbb" in warnings
    assert "some runs come from code that differs from its commit" in warnings


BUSY = {"load": {"others": 0.4}}


@pytest.mark.parametrize(
    ("seeds", "manifest", "why"),
    [(2, {}, "2 seeds, and a difference takes 3"), (5, BUSY, "other processes kept up to 40% of the machine busy")],
)
def test_nothing_is_called_of_two_seeds_or_of_times_on_a_busy_machine(
    seeds: int, manifest: dict[str, object], why: str, tmp_path: Path
) -> None:
    found = [
        Cell(
            label,
            label,
            tuple(read_run(make_run(tmp_path, label, made, seed, manifest=manifest).path) for seed in all_),
        )
        for label, made in {"sync": SYNC, "worse": WORSE}.items()
        for all_ in [range(seeds)]
    ]
    comparison = compare(found)
    assert comparison.verdict.startswith(f"No verdict: {why}") and not comparison.best and not comparison.faults
    assert verdict_table(comparison) is None
    timed = [m for m in comparison.measures if m.key.startswith(("throughput", "seconds", "reach/sec", "idle", "time"))]
    unsaid = comparison.measures if seeds < 3 else timed
    assert len(timed) > 5 and {found.verdict for m in unsaid if (found := against(m, 1))} == {"open"}
    learnt = comparison.outcome
    assert learnt is not None and against(learnt, 1).verdict == ("open" if seeds < 3 else "worse")  # type: ignore[union-attr]
    texts = printed(comparison, 200), markdown(comparison, []), document(comparison)
    assert all(" faster" not in text.replace("faster →", "") for text in texts)
    rates = texts[0][texts[0].index("Samples per second") : texts[0].index("Held-out accuracy")]
    assert "*" not in rates and "?" in rates
    if seeds < 3:
        assert not any(sign in texts[2] for sign in ("▲ better", "▼ worse", "◆ differs")) and "(worse)" not in texts[1]
    else:
        assert all("others' load 40 %" in unescape(text) for text in texts)


def test_a_run_without_a_steady_part_says_so_and_what_many_cells_would_repeat_is_one_warning(tmp_path: Path) -> None:
    short = replace(SYNC, iterations=2)
    made = [make_cell(tmp_path, label, replace(short, draw=draw), range(3)) for draw, label in enumerate("abcd")]
    warnings = "\n".join(compare(made[:2]).warnings)
    assert "a, every seed: no steady part: the run ends within its 2 warm-up iterations" in warnings
    assert "3 seeds only: the clearest difference has to be 4.3 standard errors large" in warnings
    said = [warning for warning in compare(made).warnings if "no steady part" in warning]
    assert said == [
        "4 of 4 cells: no steady part: the run ends within its 2 warm-up iterations, which its rates now include"
    ]


def test_a_seed_that_collapsed_is_warned_of_and_stands_beside_the_mean_and_in_the_verdict(tmp_path: Path) -> None:
    whole = make_cell(tmp_path, "clip", Made(settings=("algorithm.correction=clip",)), range(5))
    runs = [
        *make_cell(tmp_path, "none", Made(settings=("algorithm.correction=none",)), range(4)).runs,
        *make_cell(tmp_path, "none", Made(exact_match=0.2, settings=("algorithm.correction=none",)), [4]).runs,
    ]
    found = compare([whole, Cell("none", "none", tuple(runs))], axes=("algorithm.correction",))
    assert found.verdict.endswith(
        "Runs collapsed: 0 of 5 of clip, 1 of 5 of none (exact test: p 1.00, which does not tell them apart)."
    )
    assert any("none: 1 of 5 seeds collapsed (seed 4, down to 0." in warning for warning in found.warnings)
    assert [collapse.text for collapse in found.collapses] == ["0 of 5", "1 of 5"]
    text = printed(found, 80)
    assert "1 of 5" in text and "collapsed" in text and all(len(line) <= 80 for line in text.splitlines())
    assert "1 of 5 seeds collapsed" in document(found) and "1 of 5 seeds collapsed" in markdown(found, [])
    assert compare([found.cells[1], whole], axes=("algorithm.correction",)).collapses[0].share.high < 0.63


@pytest.mark.parametrize(
    ("values", "best", "collapses"), [([0.9, 0.44], 0.9, 1), ([0.9, 0.46], 0.9, 0), ([0.2, 0.0], 0.2, 0)]
)
def test_a_run_collapsed_that_ends_below_half_of_the_best(values: list[float], best: float, collapses: int) -> None:
    assert collapsed(values, best).sum() == collapses


@pytest.mark.parametrize(("seeds", "down", "p"), [(5, 4, 0.048), (5, 3, 0.167), (3, 3, 0.100)])
def test_shares_of_collapsed_seeds_are_told_apart_by_fishers_exact_test(seeds: int, down: int, p: float) -> None:
    cells = (dict.fromkeys(range(seeds), 0.9), {seed: 0.1 if seed < down else 0.9 for seed in range(seeds)})
    outcome = Measure("eval/sampled", "held-out accuracy", "", "higher", "difference", tuple(map(CellMeasure, cells)))
    assert collapses_of(outcome, 0)[1].p == pytest.approx(p, abs=5e-4)


@pytest.mark.parametrize("width", [100, 80])
def test_what_is_printed_fits_and_shows_every_seed(compared: Comparison, width: int) -> None:
    text = printed(compared, width)
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    assert compared.verdict in flat and "conservation passed: 15 ledgers close" in flat
    for whole in ("largest lag", "exposed, s", "of ideal", "rollout", "actor"):
        assert re.search(rf"{whole}\b", text), "no column is cut"
    measure = compared.measure("eval/sampled")
    for cell in measure.cells:
        assert all(f" {100 * value:.1f}" in text for value in cell.per_seed.values())


def test_one_cell_has_no_baseline_and_cells_without_runs_or_labels_are_refused(cells: list[Cell]) -> None:
    alone = compare(cells[:1])
    assert alone.verdict.startswith("sync trains 8.") and alone.verdict.endswith("there is nothing to compare it with.")
    assert "against baseline" not in printed(alone)
    with pytest.raises(ConfigError, match="needs finished runs in every cell"):
        compare([cells[0], Cell("none", "none", ())])
    with pytest.raises(ConfigError, match="same label"):
        compare([cells[0], cells[0]])
    assert compare(cells).warnings == ()


def test_extra_values_of_scores_are_measures_and_what_is_not_known_is_ignored(cells: list[Cell]) -> None:
    def extended(cell: Cell, value: float) -> Cell:
        more = {"custom/copied": value, "another/version": 1.0}
        runs = [replace(run, metrics=[*run.metrics[:2], *(m | more for m in run.metrics[2:])]) for run in cell.runs]
        return replace(cell, runs=tuple(runs))

    compared = compare([extended(cells[0], 0.25), extended(cells[1], 0.5)])
    measure = compared.measure("custom/copied")
    assert measure is not None and measure.title == "copied at the end" and measure.better is None
    assert [cell.value for cell in measure.cells] == [0.25, 0.5]
    assert not any("another" in measure.key for measure in compared.measures)
    some = compare([extended(cells[0], 0.25), cells[1]])
    assert some.measure("custom/copied") is None, "only one of the cells has it"


def evaluated(root: Path, label: str, accuracy: float) -> Cell:
    """Versions 0, 10 and 20 were evaluated; the last one is as good as `accuracy`, give or take with the seed."""
    cell = make_cell(root, label, Made(schedule=label, evaluated=None))
    noise = 0.01 * np.random.default_rng(len(label)).standard_normal(len(cell.runs))
    for run in cell.runs:
        found = [(0, 0.2), (10, 0.3), (20, accuracy + noise[run.identity.seed])]
        told = {"at_s": 0.0, "problems": 64, "k": 0, "sampled": None, "pass_at_k": None}
        lines = [told | {"version": version, "greedy": greedy} for version, greedy in found]
        (run.path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return cell


def test_held_out_accuracy_is_compared_by_seed_and_drawn_by_version(tmp_path: Path) -> None:
    cells = [evaluated(tmp_path, "colocate_sync", 0.5), evaluated(tmp_path, "fully_async", 0.7)]
    compared = compare(cells)
    measure = compared.measure("eval/greedy")
    assert measure is not None and compared.measure("eval/pass_at_k") is None
    difference = measure.cells[1].difference
    assert (
        difference is not None
        and difference.distinguishable
        and difference.interval.value == pytest.approx(0.2, abs=0.02)
    )
    assert measure.cells[0].interval is not None and measure.cells[0].interval.low < 0.51
    curve = next(c for c in compared.curves if (c.cell, c.key, c.axis) == (1, "eval/greedy", "samples"))
    assert (curve.grid[0], curve.grid[-1]) == (0, 20 * 8)
    assert np.interp([0, 80, 160], curve.grid, curve.mean) == pytest.approx([0.2, 0.3, 0.7], abs=0.02)


def test_where_one_run_was_not_evaluated_held_out_accuracy_is_not_compared(tmp_path: Path) -> None:
    cells = [evaluated(tmp_path, "colocate_sync", 0.5), make_cell(tmp_path, "plain", Made(evaluated=None))]
    compared = compare(cells)
    assert compared.measure("eval/greedy") is None
    assert not any(curve.key.startswith("eval/") for curve in compared.curves)
