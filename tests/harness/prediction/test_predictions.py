"""Published tables: what a row says; and predictions from a table that a simulation made: its truth is found again."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.config import ConfigError, LengthsConfig
from harness.config.compose import EXPERIMENTS
from harness.cost_model.lengths import ResponseLengths
from harness.cost_model.shape import forward_flops_per_token
from harness.prediction.fit import (
    WorkloadFit,
    batch_seconds,
    capped_mean,
    drawn,
    engine_cost,
    engines_of,
    generated_s,
    lognormal,
)
from harness.prediction.page import draw, print_fits, print_predictions, write_csv
from harness.prediction.phases import UPDATE, PhaseScaling, scalings, training_phases
from harness.prediction.prediction import predict_table
from harness.prediction.table import read_table, read_table_settings

SMALL = ["algorithm.batch_groups=32", "algorithm.group_size=4", "cost.lengths.cap=4000", "model=qwen1.5b"]
"""A batch that is simulated in a moment."""
SETTINGS = "scoring_fixed_s_per_sample: 0\nbatches: 2\n"


@given(st.floats(2, 500), st.floats(0, 1.5), st.integers(600, 5000))
def test_a_log_normal_has_the_mean_that_was_asked_for_under_its_cap(mean: float, sigma: float, cap: int) -> None:
    found = lognormal(mean, sigma, cap)
    assert found.mean is not None and capped_mean(found.mean, sigma, cap) == pytest.approx(mean, rel=1e-6)


def test_the_mean_under_a_cap_is_that_of_the_samples() -> None:
    lengths = ResponseLengths(LengthsConfig(kind="lognormal", mean=300.0, sigma=1.2, cap=900), 0).of(np.arange(200_000))
    assert capped_mean(300.0, 1.2, 900) == pytest.approx(float(lengths.mean()), rel=0.01)


HEADER = "mode,total_gpus,rollout_gpus,train_gpus,step_s,gen_s,old_log_prob_s,update_actor_s"


def made_table(folder: Path, lengths: LengthsConfig, *rows: str, factor: float = 1.0) -> Path:
    """A table whose synchronous row is of 4 devices and of responses of these lengths. factor: on its generation."""
    path = folder / "made.csv"
    path.with_suffix(".yaml").write_text(SETTINGS)
    path.write_text(f"{HEADER}\ncolocate_sync,4\n")
    settings, row = read_table_settings(path), read_table(path)[0]
    config = settings.job(row, SMALL)
    cost, engines = engine_cost(config, colocated=True), engines_of(row, config)
    batches = drawn(lengths, config, settings.batches)
    made = [batch_seconds(cost, batch, engines=engines, slots=config.engine.slots) for batch in batches]
    assert lengths.mean is not None
    tokens = batches.shape[1] * (capped_mean(lengths.mean, lengths.sigma, lengths.cap) + cost.prompt_tokens)
    scoring_s = tokens * forward_flops_per_token(config.model) / config.device.flops / config.cost.forward_share / 4
    generate_s = factor * float(np.mean(made))
    sync = f"colocate_sync,4,,,{generate_s + scoring_s + 6.0},{generate_s},{scoring_s},6.0"
    path.write_text("\n".join([HEADER, sync, *rows]) + "\n")
    return path


def test_tokens_and_tail_of_the_synchronous_row_are_found_again(tmp_path: Path) -> None:
    lengths = LengthsConfig(kind="lognormal", mean=400.0, sigma=0.7, common=0.5, cap=4000)
    predicted = predict_table(made_table(tmp_path, lengths, "one_step_off,,2,2,,,,"), "train", SMALL)
    fit = predicted.fits[0]
    assert fit.lengths.mean == pytest.approx(400.0, rel=0.01)
    assert fit.lengths.sigma == pytest.approx(0.7, abs=0.02)
    assert (fit.step_s, fit.scale) == (0.0, 1.0) and fit.tokens_from == "old_log_prob_s"


def test_steps_that_are_bound_by_training_last_as_long_as_training(tmp_path: Path) -> None:
    """And those bound by generation as long as that: two engines take more than half as long as four, for the tail."""
    lengths = LengthsConfig(kind="lognormal", mean=400.0, sigma=0.7, common=0.5, cap=4000)
    path = made_table(tmp_path, lengths, "one_step_off,,2,2,,,1.0,500.0", "one_step_off,,2,2,,,1.0,0.5")
    slow, fast = predict_table(path, "train", SMALL).predictions
    assert slow.step_s == pytest.approx(501.0, rel=0.01) and slow.wait_s == pytest.approx(0.0, abs=3.0)
    assert fast.step_s == pytest.approx(fast.generation_s, rel=0.05) and fast.wait_s > 0.5 * fast.step_s
    alone = slow.fit.generated_s[2]
    assert alone < fast.generation_s < 2 * alone


@pytest.mark.parametrize(("factor", "expected"), [(0.2, "scale"), (50.0, "step_s")])
def test_what_no_tail_explains_goes_into_the_cost_of_decoding(tmp_path: Path, factor: float, expected: str) -> None:
    lengths = LengthsConfig(kind="lognormal", mean=400.0, sigma=0.7, cap=4000)
    path = made_table(tmp_path, lengths, "one_step_off,,2,2,,,,", factor=factor)
    fit: WorkloadFit = predict_table(path, "train", SMALL).fits[0]
    assert (fit.scale < 1) if expected == "scale" else (fit.step_s > 0)
    assert fit.generated_s[2] == pytest.approx(generated_s(read_table(path)[0]), rel=0.01)


def test_the_page_says_what_was_fitted_published_and_predicted(tmp_path: Path) -> None:
    lengths = LengthsConfig(kind="lognormal", mean=400.0, sigma=0.7, cap=4000)
    path = made_table(tmp_path, lengths, "one_step_off,,2,2,10,3,1.0,5.0")
    predicted = predict_table(path, "sync", SMALL)
    console = Console(width=220, record=True, file=io.StringIO())
    print_fits(predicted.fits, console)
    print_predictions(predicted.predictions, "sync", console)
    (prediction,) = predicted.predictions
    text = console.export_text()
    for part in ("simulated; given: synchronous rows only", "one_step_off on 2+2", "10.0", f"{prediction.step_s:.1f}"):
        assert part in text
    write_csv(tmp_path / "out.csv", predicted.predictions, "sync")
    line = (tmp_path / "out.csv").read_text().splitlines()[2]
    assert line.startswith(f"3,one_step_off,,2,2,10.00,{prediction.step_s:.2f},")
    draw(tmp_path / "out.png", "made", predicted.predictions, "sync")
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_a_table_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("mode,rollout_gpus,train_gpus\nfully_async,2,2\n")
    with pytest.raises(ConfigError, match="no synchronous row to calibrate on"):
        predict_table(path, "train")
    path.write_text("mode,rollout_gpus,train_gpus\ncolocate_sync,2,2\n")
    with pytest.raises(ConfigError, match="no row to predict"):
        predict_table(path, "train")
    path.write_text(
        "mode,rollout_gpus,train_gpus,old_log_prob_s,gen_s\ncolocate_sync,2,2,99999999,9\nfully_async,1,1,,\n"
    )
    with pytest.raises(ConfigError, match="line 2, colocate_sync on 2: old_log_prob_s speaks for responses of"):
        predict_table(path, "train")


PAPERS = EXPERIMENTS / "papers"
COLUMNS = "mode,engine,total_gpus,rollout_gpus,train_gpus,step_s,gen_s,old_log_prob_s,update_actor_s,max_staleness"


def table(folder: Path, *lines: str) -> Path:
    path = folder / "some.csv"
    path.write_text("\n".join(["# source: nowhere", COLUMNS, *lines]) + "\n")
    return path


@pytest.mark.parametrize("name", ["verl_one_step_off", "verl_fully_async", "verl_staleness"])
def test_every_published_table_and_its_settings_can_be_read(name: str) -> None:
    path = PAPERS / f"{name}.csv"
    rows, settings = read_table(path), read_table_settings(path)
    assert rows and all(settings.job(row, []).schedule.name == row.mode for row in rows)
    assert path.read_text().startswith("# source: ")


def test_a_row_says_what_its_cells_say_and_empty_ones_are_unknown(tmp_path: Path) -> None:
    sync, late = read_table(
        table(tmp_path, "colocate_sync,a,8,,,100,40,,50,", "", "# a remark", "fully_async,a,8,2,6,60,5,,,0.5")
    )
    assert (sync.rollout_gpus, sync.train_gpus, sync.gpus, sync.wait_s) == (8, 8, 8, None)
    assert sync.phases == {UPDATE: 50.0}
    assert (late.rollout_gpus, late.train_gpus, late.gpus, late.wait_s) == (2, 6, 8, 5.0)
    assert late.phases == {} and late.options == {"max_staleness": "0.5"}
    assert (sync.number, late.number) == (3, 6), "the lines that an editor shows"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sync,,8,,,1,1,,,"], "some.csv:3: mode=sync is no schedule; use one of colocate_sync"),
        (["colocate_sync,,8,,,fast,1,,,"], "some.csv:3: step_s=fast is no number"),
        (["colocate_sync,,8,,,-1,1,,,"], "some.csv:3: step_s=-1 is no amount"),
        (["fully_async,,8,,,1,1,,,"], "some.csv:3: the row does not say how many devices generate and train"),
        (["colocate_sync,,,,,1,1,,,"], "some.csv:3: the row does not say how many devices"),
        ([], "has no rows"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_table(table(tmp_path, *lines))


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="there is no column `mode`"):
        read_table(path)
    with pytest.raises(ConfigError, match="is not there"):
        read_table(tmp_path / "none.csv")


def test_the_fixed_part_of_a_phase_is_found_where_rows_have_different_devices(tmp_path: Path) -> None:
    rows = read_table(table(tmp_path, *(f"colocate_sync,,{n},,,,,{30 + 640 / n},," for n in (16, 32, 64))))
    assert scalings(rows, 5.0)["old_log_prob_s"].fixed_s == pytest.approx(30)
    assert scalings(rows, 5.0)["old_log_prob_s"].device_s == pytest.approx(640)
    assert scalings(rows[:1], 5.0)["old_log_prob_s"] == PhaseScaling(5.0, 16 * (30 + 40 - 5.0)), "else it is assumed"
    assert scalings(rows[:1], 500.0)["old_log_prob_s"].fixed_s == 35.0, "but no more than half"


def test_a_prediction_reads_the_training_phases_that_it_may_read(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "colocate_sync,,32,,,790,357,100,320,",
        "fully_async,,,16,16,,,,,",
        "fully_async,,,32,32,,,,157,",
        "one_step_off,,,16,16,,,90,,",
    )
    sync, small, large, other = read_table(path)
    settings, scaling = read_table_settings(path), scalings([sync], 0.0)

    def phases(row, given):  # type: ignore[no-untyped-def]
        others = [small, large, other]
        return training_phases(row, others, scaling, settings, given, scores=row is other, shared=True)

    assert phases(large, "train") == {UPDATE: 157.0}, "its own; and its job trains on the log-probs of the engines"
    fixed = settings.optimizer_steps * settings.optimizer_step_s
    assert phases(small, "train") == {UPDATE: pytest.approx(fixed + (157 - fixed) * 2)}, (
        "of the other, with its devices"
    )
    assert phases(large, "sync") == {UPDATE: pytest.approx(320 * settings.dedicated)}, "the same device time, less"
    assert phases(other, "train")["old_log_prob_s"] == 90.0
    assert phases(other, "sync")["old_log_prob_s"] == pytest.approx(200.0), "half of the devices take twice as long"


@pytest.mark.parametrize("cells", ["", "1"])
def test_what_is_scored_follows_from_the_job_whatever_a_predicted_row_has_in_its_cells(
    tmp_path: Path, cells: str
) -> None:
    sync, row = read_table(table(tmp_path, "colocate_sync,,32,,,790,357,100,320,", f"one_step_off,,,16,16,,,{cells},,"))
    settings, scaling = read_table_settings(tmp_path / "some.csv"), scalings([sync], 0.0)
    found = training_phases(row, [row], scaling, settings, "sync", scores=True, shared=False)
    assert found == {"old_log_prob_s": pytest.approx(200.0), UPDATE: pytest.approx(640.0)}
    with pytest.raises(ConfigError, match="no synchronous row says how long training takes"):
        training_phases(row, [row], {}, settings, "sync", scores=True, shared=True)


def test_a_column_that_is_not_known_and_phases_beyond_the_step_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path, "colocate_sync,,32,,,400,357,100,320,")
    with pytest.raises(ConfigError, match=r"some.csv:3: gen_s 357 \+ old_log_prob_s 100 .* exceed step_s=400"):
        read_table(path)
    path.write_text("mode,total_gpus,timing_s/update_actor\ncolocate_sync,8,9\n")
    with pytest.raises(ConfigError, match="column `timing_s/update_actor` is unknown; the nearest is `update_actor_s`"):
        read_table(path)
    path.with_suffix(".yaml").write_text("unread: [timing_s/update_actor]\n")
    assert read_table(path)[0].phases == {}


def test_settings_of_a_table_come_over_the_defaults_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, "colocate_sync,a,8,,,1,1,,,")
    path.with_suffix(".yaml").write_text("settings: [cost.lengths.cap=99]\nengines: {a: [model=qwen0.5b]}\nchunks: 8\n")
    settings, row = read_table_settings(path), read_table(path)[0]
    job = settings.job(row, ["algorithm.group_size=4"])
    assert (job.cost.lengths.cap, job.model.name, job.device.name) == (99, "qwen0.5b", "h20")
    assert (settings.chunks, job.algorithm.group_size) == (8, 4)
    path.with_suffix(".yaml").write_text("chunk: 8\n")
    with pytest.raises(ConfigError, match="some.yaml: chunk=8 is no setting"):
        read_table_settings(path)
