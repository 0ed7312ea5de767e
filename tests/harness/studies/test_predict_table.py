"""Published tables: what a row says, and what is said of one that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import ConfigError
from harness.config.compose import EXPERIMENTS
from harness.studies.predictions.phases import UPDATE, Scaling, scalings, training_phases
from harness.studies.predictions.table import read_table, read_table_settings

PAPERS = EXPERIMENTS / "papers"
HEADER = "mode,engine,total_gpus,rollout_gpus,train_gpus,step_s,gen_s,old_log_prob_s,update_actor_s,max_staleness"


def table(folder: Path, *lines: str) -> Path:
    path = folder / "some.csv"
    path.write_text("\n".join(["# source: nowhere", HEADER, *lines]) + "\n")
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
    ("lines", "said"),
    [
        (["sync,,8,,,1,1,,,"], "some.csv:3: mode=sync is no schedule; use one of colocate_sync"),
        (["colocate_sync,,8,,,fast,1,,,"], "some.csv:3: step_s=fast is no number"),
        (["colocate_sync,,8,,,-1,1,,,"], "some.csv:3: step_s=-1 is no amount"),
        (["fully_async,,8,,,1,1,,,"], "some.csv:3: the row does not say how many devices generate and train"),
        (["colocate_sync,,,,,1,1,,,"], "some.csv:3: the row does not say how many devices"),
        ([], "has no rows"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
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
    assert scalings(rows[:1], 5.0)["old_log_prob_s"] == Scaling(5.0, 16 * (30 + 40 - 5.0)), "else it is assumed"
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
        return training_phases(row, [small, large, other], scaling, settings, given)

    assert phases(large, "train") == {UPDATE: 157.0}, "its own; and no row of its schedule has old_log_prob"
    fixed = settings.optimizer_steps * settings.optimizer_step_s
    assert phases(small, "train") == {UPDATE: pytest.approx(fixed + (157 - fixed) * 2)}, (
        "of the other, with its devices"
    )
    assert phases(large, "sync") == {UPDATE: pytest.approx(320 * settings.dedicated)}, "the same device time, less"
    assert phases(other, "train")["old_log_prob_s"] == 90.0
    assert phases(other, "sync")["old_log_prob_s"] == pytest.approx(200.0), "half of the devices take twice as long"


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
