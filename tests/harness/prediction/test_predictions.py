"""Tables as evidence, and forecasts from them: nothing is guessed that can be asked, and no empty cell is free work."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness.config import ConfigError, LengthsConfig
from harness.config.compose import EXPERIMENTS
from harness.cost_model.lengths import ResponseLengths
from harness.metrics.formatting import number
from harness.prediction import scores
from harness.prediction.evidence import Evidence, StepRow, Workload
from harness.prediction.forecast import Forecast
from harness.prediction.generation import capped_mean, clipped_share, uncapped_mean
from harness.prediction.posterior import FIRST, Given, Narrowing
from harness.prediction.prediction import Predicted, full_workload, job_of, posteriors, predict
from harness.prediction.priors import read_priors
from harness.prediction.table import read_evidence
from harness.studies.papers.experiment import read_rows
from harness.studies.papers.report import show, write
from harness.studies.papers.simulated import prediction_result

SMALL = ["model=qwen1.5b", "device=h100", "algorithm.batch_groups=16", "algorithm.group_size=4"]
SMALL += ["cost.lengths.cap=2000", "cost.lengths.mean=400"]
"""A batch that takes milliseconds."""

HEADER = "mode,total_gpus,rollout_gpus,train_gpus,step_s,gen_s,generate_sequences_s,old_log_prob_s,ref_log_prob_s,"
HEADER += "update_actor_s"
SYNC = "colocate_sync,32,32,32,440,140.5,129.3,56,55,170"


def table(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "made.csv"
    path.write_text("\n".join(["# source: made up", header, *lines]) + "\n")
    return path


def predicted(path: Path, given: Given = "sync", draws: int = 8, *settings: str, checks: int = 0) -> Predicted:
    return predict(read_evidence(path, [*SMALL, *settings]), draws, given=given, checks=checks)


@pytest.mark.parametrize("given", ["sync", "train"])
def test_an_empty_cell_of_a_row_that_is_asked_for_is_work_all_the_same(tmp_path: Path, given: Given) -> None:
    (empty,) = predicted(table(tmp_path, SYNC, "one_step_off,32,16,16,,,,,,"), given).forecasts
    (typed,) = predicted(table(tmp_path, SYNC, "one_step_off,32,16,16,,,,1,1,"), "sync").forecasts
    assert np.array_equal(empty.step_s, typed.step_s)
    assert empty.median > 400, "half of the devices score and train for as long as all of them, and more"


def test_what_is_said_of_the_job_is_given_and_training_phases_are_read(tmp_path: Path) -> None:
    path = table(tmp_path, SYNC, "one_step_off,32,16,16,,,,,,")
    (one,) = predicted(path).forecasts
    assert {"model qwen1.5b", "device h100", "batch_groups 16", "response_mean 400"} <= set(one.given)
    assert {"tensor_parallel 1", "slots 256"} <= set(one.assumed) and not any("qwen" in text for text in one.assumed)
    verl, evidence = read_priors().assumed("verl"), read_evidence(path, SMALL)
    slots = [job_of(replace(evidence.asked[0], schedule=name), verl, evidence).engine.slots
             for name in ("one_step_off", "fully_async")]  # fmt: skip
    assert slots == [1024, 16 * 16]
    path = table(tmp_path, SYNC, "one_step_off,32,16,16,,,,50,50,2000")
    long, short = (predicted(path, given).forecasts[0].median for given in ("train", "sync"))
    assert long > 2000 > short
    row = "one_step_off,32,16,16,,,,,,"
    (wide,) = predicted(table(tmp_path, "colocate_sync,32,,,440,,,,,", row), draws=16).forecasts
    (told,) = predicted(table(tmp_path, SYNC, row), draws=16).forecasts
    assert any("update_s by the roofline" in text for text in wide.assumed)
    assert wide.median > 0.3 * 440 and np.log(wide.step_s).std() > np.log(told.step_s).std()


@pytest.mark.slow
def test_a_table_that_no_draw_fits_says_so_in_words_and_in_the_file(tmp_path: Path) -> None:
    """Its draws are weighed by how far they are from each other, however far all are from what there is."""
    gains = EXPERIMENTS / "predictions/gains.csv"
    sane = gains.read_text()
    spoilt = {
        "engine_time is": "400000,270000,250000,25000,90000,900,",  # seconds of all phases in milliseconds
        "train_share is": "400,270,250,25,0.001,900,",
        "phases leave 99.8% of the step": "200000,270,250,25,90,900,",
        "phases without a time would be longer": "400000,,,,,900,",
        "engine_time is 9.": "400,270,250,25,90,1,",  # responses of one token
    }
    assert not posteriors(read_evidence(gains), 8)[""].implausible
    for wanted, row in spoilt.items():
        path = tmp_path / "spoilt.csv"
        path.write_text(sane.replace("400,270,250,25,90,900,", row).replace("8000,8192", ",8192"))
        assert wanted in posteriors(read_evidence(path), 8)[""].implausible, row
    found = predict(read_evidence(path), 8)
    console = Console(file=io.StringIO(), width=400)
    show(result := prediction_result("out", found), console)
    write(result, tmp_path)
    for text in (console.file.getvalue(), (tmp_path / "out-train.md").read_text()):  # type: ignore[attr-defined]
        assert "implausible, check seconds, lengths" in text


@pytest.mark.slow
def test_gains_losses_and_what_cannot_be_told_are_told_apart() -> None:
    verdicts = {}
    for name in ("gains", "loses", "cannot_tell"):
        (one,) = predict(read_evidence(EXPERIMENTS / f"predictions/{name}.csv"), 32).forecasts
        verdicts[name] = one.verdict
        assert (one.settles != "") or one.verdict != "cannot be told"
    assert verdicts == {"gains": "faster", "loses": "slower", "cannot_tell": "cannot be told"}


def test_the_fast_model_is_checked_against_the_schedules_own_file(tmp_path: Path) -> None:
    found = predicted(table(tmp_path, SYNC, "one_step_off,32,16,16,,,,,,"), checks=1)
    assert list(found.checks.values()) == pytest.approx([0.0], abs=0.01)


def test_a_page_a_csv_and_a_picture_say_the_same(tmp_path: Path) -> None:
    found = predicted(table(tmp_path, SYNC, "one_step_off,32,16,16,500,,,,,"), draws=4)
    (one,), console = found.forecasts, Console(width=80, file=io.StringIO(), record=True)
    show(result := prediction_result("out", found), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    written = {path.name: path for path in write(result, tmp_path)}
    for part in ("one_step_off", "500.0", number(one.median, 1), one.verdict, "assumed:", "given: model qwen1.5b"):
        assert part in text and part in written["out-sync.md"].read_text(), part
    lines = {line["quantity"]: line for line in read_rows(written["out-sync.csv"])}
    step, times = lines["seconds per step"], lines["times as fast as colocate_sync on 32"]
    assert (step["published"], step["verdict"]) == ("500.0", one.verdict) and times["simulated"]
    assert written["out-sync.png"].stat().st_size > 10_000


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        (HEADER, "sync,8,,,1,1,,,,", "made.csv:3: mode=sync is no schedule; use one of colocate_sync"),
        (HEADER, "colocate_sync,8,,,fast,,,,,", "made.csv:3: step_s=fast is no number"),
        (HEADER, "colocate_sync,8,,,-1,,,,,", "made.csv:3: step_s=-1 is no amount"),
        (HEADER, "fully_async,8,,,1,1,,,,", "made.csv:3: the row does not say how many devices generate and train"),
        (HEADER, "colocate_sync,8,,,400,357,,100,,320", "exceed step_s=400"),
        ("mode,total_gpus,timing_s/updat", "colocate_sync,8,9", "column `timing_s/updat` is unknown"),
        ("mode,total_gpus,gen_s,timing_s/gen", "colocate_sync,8,9,9", "are the same figure; leave one"),
        ("mode,total_gpus,clipped_share", "colocate_sync,8,1.5", "clipped_share=1.5 must be a share"),
        ("a,b", "1,2", "there is no column `mode`"),
        (HEADER, "fully_async,,2,2,,,,,,", "no synchronous row to calibrate on"),
        (HEADER, SYNC, "no row to predict"),
        (HEADER, "", "has no rows"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path, header: str, line: str, message: str) -> None:
    lines = [line, "one_step_off,,16,16,,,,,,"] if "exceed" in message else [line]
    with pytest.raises(ConfigError, match=message) as refused:
        read_evidence(table(tmp_path, *lines, header=header))
    assert "\n" not in str(refused.value)


def test_the_file_beside_a_table_says_more_of_it_and_a_wrong_word_there_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, f"{SYNC},7", "one_step_off,32,16,16,,,,,,,", header=f"{HEADER},note")
    path.with_suffix(".yaml").write_text("unread: [note]\nworkload: {cap: 99, prompt_mean: 50}\n")
    workload = read_evidence(path, ["cost.lengths.cap=77"]).workload
    assert (workload.cap, workload.prompt_mean, workload.model) == (77, 50.0, None)
    path.with_suffix(".yaml").write_text("unread: [note]\nquantities: {tails: 0.5}\n")
    with pytest.raises(ConfigError, match=r"quantities: tails is none of priors.yaml"):
        predict(read_evidence(path), 4)
    path.with_suffix(".yaml").write_text("chunk: 8\n")
    with pytest.raises(ConfigError, match="chunk"):
        read_evidence(path)


@pytest.mark.parametrize("name", ["verl_one_step_off", "verl_fully_async", "verl_staleness"])
def test_every_published_table_can_be_read(name: str) -> None:
    evidence = read_evidence(EXPERIMENTS / f"papers/{name}.csv")
    assert evidence.rows and evidence.asked and evidence.workload.model == "qwen7b"


def test_lengths_and_shares_at_the_cap_are_those_asked_for(tmp_path: Path) -> None:
    means, sigma = np.array([50.0, 300.0, 600.0]), np.array([0.3, 1.2, 0.8])
    assert capped_mean(uncapped_mean(means, sigma, 900), sigma, 900) == pytest.approx(means, rel=1e-4)
    config = LengthsConfig(kind="lognormal", mean=300.0, sigma=1.2, cap=900)
    drawn = ResponseLengths(config, 0).of(np.arange(200_000))
    one = np.array([300.0]), np.array([1.2]), 900
    assert float(capped_mean(*one)[0]) == pytest.approx(float(drawn.mean()), rel=0.01)
    assert float(clipped_share(*one)[0]) == pytest.approx(float((drawn == 900).mean()), abs=0.005)
    path = table(tmp_path, f"{SYNC},.1", "one_step_off,32,16,16,,,,,,,", header=f"{HEADER},clipped_share")
    (system,) = posteriors(read_evidence(path, SMALL), 16, given="sync").values()
    assert clipped_share(system.uncapped, system.quantities["tail"], 2000) == pytest.approx(np.full(16, 0.1), rel=1e-3)
    with pytest.raises(ConfigError, match=r"cannot be with clipped_share=0.1 of them at cap=2,000"):
        posteriors(read_evidence(path, [*SMALL, "cost.lengths.mean=150"]), 16)


@pytest.mark.slow
def test_what_a_filter_adds_to_generation_is_in_the_given_rows_already(tmp_path: Path) -> None:
    path = table(tmp_path, "colocate_sync,4,4,4,1000,900,880,20,20,60", "one_step_off,8,4,4,,,,,,")
    filters = ["algorithm.filter=zero_variance", "cost.filtered_share=.4"]
    without, refilled = (predicted(path, "sync", 32, *settings).forecasts[0] for settings in ([], filters))
    assert refilled.median == pytest.approx(without.median, rel=0.4), "twice as long without"
    assert any("times as long" in text for text in refilled.assumed)
    with pytest.raises(ConfigError, match="no phase of a critic"):
        predicted(path, "sync", 8, "algorithm=ppo")


def test_a_quantity_narrows_with_the_systems_seen_and_widens_without_them() -> None:
    priors = read_priors()
    mean, deviation = priors.quantities["alone_over_shared"].normal
    before, wider = priors.without(["verl"]).quantities["alone_over_shared"].normal
    assert mean < before == 0.0 and deviation < wider
    drawn = priors.draw(64, 0, {"tail": 0.5}, {})
    assert set(drawn["tail"].tolist()) == {0.5} and 0 < drawn["decode_share"].min() < drawn["decode_share"].max() < 1


def narrowing(folder: Path) -> Narrowing:
    evidence, priors = read_evidence(table(folder, SYNC, "one_step_off,32,16,16,,,,,,"), SMALL), read_priors()
    workload = full_workload(evidence.rows[0], evidence.rows, evidence, priors)
    return Narrowing(evidence.rows, workload, job_of(evidence.rows[0], workload, evidence), priors, {}, False, 1.0, 0)


def test_a_share_that_seconds_say_weighs_as_a_density_of_their_logarithm(tmp_path: Path) -> None:
    one = narrowing(tmp_path)
    logs, step = np.linspace(0.03, 6.0, FIRST, retstep=True)  # of seconds over those at the peak
    one.weigh("train_share", np.exp(-logs))
    whole = np.sqrt(2 * np.pi) * read_priors().quantities["train_share"].normal[1]  # of a normal density's exponent
    assert float(np.exp(one.log_weight).sum() * step) == pytest.approx(whole, rel=0.01)


def test_a_row_is_one_run_and_several_have_less_noise_in_common(tmp_path: Path) -> None:
    one, same = narrowing(tmp_path), np.zeros(FIRST)
    alone, four = (np.log(one.in_common([same] * runs)).std() for runs in (1, 4))
    assert (alone, four) == pytest.approx((one.noise, one.noise / 2), rel=0.1)
    assert one.log_weight.max() == 0.0, "runs that agree weigh nothing"
    one.in_common([same, same + 1.0])
    assert one.log_weight.max() < -3.0, "runs that lie apart do"


ROW = StepRow("made.csv:3", "one_step_off", 2, 2)
SYNC_FORECAST = StepRow("made.csv:2", "colocate_sync", 4, 4)


def forecast(step_s: list[float]) -> Forecast:
    steps = np.array(step_s)
    return Forecast(ROW, SYNC_FORECAST, steps, np.full_like(steps, 10.0), 0 * steps, steps)


def test_a_row_says_its_own_workload_and_an_interval_is_symmetric() -> None:
    row = StepRow("made.csv:4", "fully_async", 2, 2, says=Workload(cap=100))
    evidence = Evidence("made.csv", Workload(model="qwen7b", cap=200), (SYNC_FORECAST,), (row,))
    assert evidence.of(row) == Workload(model="qwen7b", cap=100) and evidence.of(SYNC_FORECAST).cap == 200
    assert forecast([10.0] * 5).p_faster == 0.5 and forecast([10.0] * 5).verdict == "tie"
    assert forecast(list(np.arange(99.0) + 1)).interval() == pytest.approx((10.0, 90.0))


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [([5.0] * 8 + [20.0] * 2, "faster"), ([20.0] * 9 + [5.0], "slower"), ([5.0] * 7 + [20.0] * 3, "cannot be told")],
)
def test_a_verdict_needs_four_draws_of_five(steps: list[float], verdict: str) -> None:
    assert forecast(steps).verdict == verdict


def test_scores_are_of_the_normal_distribution_and_of_own_phases() -> None:
    draws = np.random.default_rng(0).normal(2.0, 3.0, 20_000)
    at_mean = 3.0 * (math.sqrt(2 / math.pi) - 1 / math.sqrt(math.pi))  # Gneiting and Raftery (2007), section 4.2
    assert scores.crps(draws, 2.0) == pytest.approx(at_mean, rel=0.02)
    assert scores.crps(np.array([5.0]), 2.0) == 3.0
    sync = StepRow("a:1", "colocate_sync", 4, 4, step_s=100.0, rollout_s=40.0, old_log_prob_s=20.0, update_s=30.0)
    row = StepRow("a:2", "one_step_off", 2, 2, step_s=90.0, old_log_prob_s=25.0, update_s=45.0)
    assert (scores.own_phases_s(row, sync, "train"), scores.own_phases_s(row, sync, "sync")) == (80.0, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "given", "rows"),
    [
        ("relax", "sync", ["fully_async max_staleness=1 on 8+8"]),
        ("verl_fully_async", "train", ["fully_async on 64+64"]),
    ],
)
def test_no_row_moves_without_its_score(table: str, given: Given, rows: list[str]) -> None:
    committed = {(one.row, one.given): one for one in scores.read_scores(scores.SCORES) if one.source == table}
    for now in scores.score_table(EXPERIMENTS / f"papers/{table}.csv", given, rows):
        before = committed[now.row, now.given]
        for name in ("median_s", "low_s", "high_s"):
            assert getattr(now, name) == pytest.approx(getattr(before, name), rel=scores.TOLERANCE), (
                f"{now.row}: {name} has moved; cadence predict --score makes the table anew: is it better?"
            )


@pytest.mark.slow
def test_published_steps_are_scored_blind_and_simulated_ones_predicted() -> None:
    for path in scores.published_tables():
        evidence = read_evidence(path)
        rows = {str(row) for row in evidence.asked if row.step_s}
        for given in ("train", "sync"):
            assert {
                one.row for one in scores.read_scores(scores.SCORES) if (one.source, one.given) == (path.stem, given)
            } == rows
        assert evidence.system, f"{path.with_suffix('.yaml')} does not say whose runs they are"
    found = scores.score_truths(scores.made_truths(6))
    assert [one.given for one in found] == ["train", "train", "sync", "sync", "train", "train"]
    assert all(abs(one.off) < 1.0 for one in found) and scores.summary(found).own_phases_skill > 0


def test_scores_are_read_as_they_were_written_and_their_coverage_is_told(tmp_path: Path) -> None:
    written = [
        scores.Score("a", "b", "train", 9.0, 10.0, high - 6, high, 0.1, 9.9, 8.0, "c; d") for high in (8.0, 12.0)
    ]
    scores.write_scores(tmp_path / "a.csv", written)
    scores.write_summaries(tmp_path / "b.csv", written)
    assert scores.read_scores(tmp_path / "a.csv") == written
    assert [(one.rows, one.covered) for one in scores.read_summaries(tmp_path / "b.csv")] == [(2, 0.5)]
    share = sum(one.rows * one.covered for one in scores.read_summaries(scores.TRUTHS)) / 400
    assert f"held {share:.0%} of 400 simulated steps" in scores.how_often()
