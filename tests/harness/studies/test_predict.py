"""Predictions from a table that a simulation made: the truth is known, and has to be found again."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.config import ConfigError, LengthsConfig
from harness.cost_model.lengths import Lengths
from harness.cost_model.shape import forward_flops_per_token
from harness.studies.predictions.fit import (
    WorkloadFit,
    batch_seconds,
    capped_mean,
    drawn,
    engine_cost,
    engines_of,
    generated_s,
    lognormal,
)
from harness.studies.predictions.page import draw, print_fits, print_predictions, write_csv
from harness.studies.predictions.prediction import predict_table
from harness.studies.predictions.table import read_table, read_table_settings

SMALL = ["algorithm.batch_groups=32", "algorithm.group_size=4", "cost.lengths.cap=4000", "model=qwen1.5b"]
"""A batch that is simulated in a moment."""
SETTINGS = "scoring_fixed_s_per_sample: 0\nbatches: 2\n"


@given(st.floats(2, 500), st.floats(0, 1.5), st.integers(600, 5000))
def test_a_log_normal_has_the_mean_that_was_asked_for_under_its_cap(mean: float, sigma: float, cap: int) -> None:
    found = lognormal(mean, sigma, cap)
    assert found.mean is not None and capped_mean(found.mean, sigma, cap) == pytest.approx(mean, rel=1e-6)


def test_the_mean_under_a_cap_is_that_of_the_samples() -> None:
    lengths = Lengths(LengthsConfig(kind="lognormal", mean=300.0, sigma=1.2, cap=900), 0).of(np.arange(200_000))
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
