"""Lags of one sample, the metrics over samples, and samples.parquet."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics.samples import (
    FATES,
    SCHEMA,
    SampleRecord,
    TrainedSamples,
    custom_metrics,
    length_metrics,
    read_samples,
    record_of,
    reward_metrics,
    sample_record,
    staleness_metrics,
    trained_records,
    write_samples,
)

COLUMNS = (
    "sample_id group_id engine fate trained_iteration version_first version_last lag_worst lag_mean lag_in_flight "
    "lag_in_queue span admitted_at started_at finished_at trained_at prompt_tokens response_tokens reward exact_match"
).split()


def trained(versions: Any, trainer: int, **changes: Any) -> SampleRecord:
    given_: dict[str, Any] = {
        "sample_id": 1,
        "group_id": 0,
        "fate": "trained",
        "admitted_at": 0.0,
        "prompt_tokens": 5,
        "versions": versions,
        "trainer_version": trainer,
        "trained_iteration": trainer + 1,
        "trained_at": 2.0,
        "reward": 1.0,
        "exact_match": True,
    }
    return sample_record(**(given_ | changes))


def waiting(**changes: Any) -> SampleRecord:
    given_: dict[str, Any] = {
        "sample_id": 2,
        "group_id": 0,
        "fate": "in_flight",
        "admitted_at": 0.5,
        "prompt_tokens": 5,
    }
    return sample_record(**(given_ | changes))


def test_the_columns_are_those_of_the_documentation_in_its_order() -> None:
    assert SCHEMA.names == COLUMNS and [field.name for field in fields(SampleRecord)] == [*COLUMNS, "custom"]


def test_lag_is_taken_apart_into_flight_and_queue() -> None:
    record = trained(np.array([3, 3, 4, 6], dtype=np.int32), trainer=7)
    assert (record.version_first, record.version_last, record.span) == (3, 6, 3)
    assert (record.lag_worst, record.lag_in_flight, record.lag_in_queue) == (4, 3, 1)
    assert record.lag_mean == (4 + 4 + 3 + 1) / 4
    assert record.response_tokens == 4


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(0, 5))
def test_the_parts_of_the_lag_add_up_and_the_mean_lies_between_them(drawn: list[int], waited: int) -> None:
    versions = sorted(drawn)
    record = trained(versions, trainer=versions[-1] + waited)
    lags = [versions[-1] + waited - version for version in versions]
    assert record.lag_worst == max(lags)
    assert record.lag_in_flight is not None and record.lag_in_queue is not None and record.lag_mean is not None
    assert record.lag_in_flight + record.lag_in_queue == record.lag_worst
    assert record.lag_mean == pytest.approx(sum(lags) / len(lags))
    assert record.span == len(set(versions))


@pytest.mark.parametrize(
    ("versions", "changes", "message"),
    [
        ([3, 2], {}, r"decrease: \[3, 2\]"),
        ([4, 5], {}, "version 5, but the trainer held 4"),
        ([-1, 0], {}, "negative token version -1"),
        ([], {}, "has no token"),
        ([0], {"trainer_version": None}, "trainer_version"),
        ([0], {"fate": "lost"}, "unknown fate 'lost'"),
    ],
)
def test_a_trained_sample_that_cannot_be_is_refused(versions: list[int], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(versions, trainer=4, **changes)


def test_a_sample_that_was_not_trained_has_no_lag_and_may_not_claim_one() -> None:
    dropped = waiting(fate="dropped_stale", versions=[1, 2], finished_at=1.0)
    assert (dropped.version_first, dropped.version_last, dropped.span) == (1, 2, 2)
    assert dropped.lag_worst is dropped.lag_mean is dropped.lag_in_flight is dropped.lag_in_queue is None
    with pytest.raises(ValueError, match="must be None"):
        waiting(trainer_version=3)


def test_a_sample_that_has_not_started_has_neither_version_nor_span() -> None:
    record = waiting()
    assert record.version_first is record.version_last is record.span is record.started_at is None
    assert record.response_tokens == 0


def test_staleness_metrics_count_every_trained_sample_once_and_no_other() -> None:
    records = [trained([0, 0, 0, 2], trainer=2), trained([1], trainer=2), waiting(versions=[0])]
    assert staleness_metrics(records) == {
        "staleness/mean": (1.5 + 1.0) / 2,
        "staleness/max": 2.0,
        "staleness/in_flight_mean": 1.0,
        "staleness/in_queue_mean": 0.5,
        "staleness/span_max": 2.0,
    }


def test_reward_metrics_are_means_over_trained_samples() -> None:
    short, long = trained([0] * 2, 0, reward=0.5, exact_match=False), trained([0] * 102, 0)
    assert reward_metrics([short, long, waiting()]) == {"reward/mean": 0.75, "reward/exact_match": 0.5}
    assert length_metrics([short, long, waiting()]) == {"response_length/mean": 52.0, "response_length/p99": 101.0}


def test_runs_of_tokens_weigh_what_they_hold() -> None:
    sample = {"sample_id": 0, "group_id": 0, "fate": "trained", "admitted_at": 0.0, "prompt_tokens": 5}
    at = {"trainer_version": 4, "trained_iteration": 4, "trained_at": 1.0}
    by_run = sample_record(versions=[1, 3], run_tokens=[30, 10], **sample, **at)
    by_token = sample_record(versions=[1] * 30 + [3] * 10, **sample, **at)
    assert by_run == by_token and by_run.lag_mean == 2.5


def test_metrics_of_samples_that_are_not_trained_or_have_no_reward_are_refused() -> None:
    with pytest.raises(ValueError, match="no trained sample"):
        staleness_metrics([waiting()])
    with pytest.raises(ValueError, match="have no reward"):
        reward_metrics([trained([0], 0, reward=None)])


def test_parquet_gives_back_the_rows_sorted_by_sample(tmp_path: Path) -> None:
    records = [waiting(sample_id=i, fate=fate) for i, fate in enumerate(FATES[1:])]
    records.append(trained([1, 2], 3, sample_id=9, engine="rollout-0", started_at=0.25, finished_at=1.5))
    path = tmp_path / "samples.parquet"
    write_samples(path, reversed(records))
    table = read_samples(path)
    assert [record_of(row) for row in table.to_pylist()] == records
    assert table.schema.equals(SCHEMA)
    assert [file.name for file in tmp_path.iterdir()] == ["samples.parquet"]


def test_parquet_of_no_sample_still_has_its_columns(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.parquet", [])
    assert read_samples(tmp_path / "samples.parquet").column_names == COLUMNS


def test_extra_values_of_scores_are_columns_and_means_over_the_samples_that_have_them(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    extra = {"copied": np.array([1.0, np.nan, 0.5]), "style/caps": np.array([2.0, 4.0, 0.0])}
    records = [*trained_records(many(), 3, 2, [1.0] * 3, [True] * 3, extra), waiting()]
    assert custom_metrics(records) == {"custom/copied": 0.75, "custom/style/caps": 2.0}
    write_samples(path, records)
    table = read_samples(path)
    assert table.column_names == [*COLUMNS, "custom/copied", "custom/style/caps"]
    assert table["custom/copied"].to_pylist() == [None, 1.0, None, 0.5]  # by sample id: the first is in flight
    assert sorted(map(record_of, table.to_pylist()), key=lambda r: -r.sample_id) == sorted(
        records, key=lambda r: -r.sample_id
    )


def test_a_file_with_more_or_fewer_optional_columns_is_read_and_one_without_a_required_column_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "samples.parquet"
    write_samples(path, [trained([0], 1, sample_id=7)])
    whole = read_samples(path)
    pq.write_table(whole.drop_columns(["span"]).append_column("later", pa.array(["kept"])), path)
    read = read_samples(path)
    assert read.column_names == [*COLUMNS, "later"] and read["later"].to_pylist() == ["kept"]
    assert read["span"].to_pylist() == [None] and record_of(read.to_pylist()[0]).sample_id == 7
    pq.write_table(whole.drop_columns(["fate"]), path)
    with pytest.raises(ValueError, match="column fate .string. is missing"):
        read_samples(path)
    pq.write_table(whole.set_column(0, "sample_id", pa.array(["7"])), path)
    with pytest.raises(ValueError, match="column sample_id .int64. is missing or of another type"):
        read_samples(path)


def many(**changes: object) -> TrainedSamples:
    """Three samples of 2, 1 and 3 runs."""
    columns = {
        "sample_id": np.array([4, 5, 6]),
        "engine": np.array([1, 0, 1]),
        "versions": np.array([0, 2, 1, 1, 1, 2], np.int32),
        "runs": np.array([2, 1, 3]),
        "run_tokens": np.array([10, 30, 7, 1, 2, 3]),
        "prompt_tokens": np.array([5, 6, 7]),
    }
    times = {
        name: np.arange(3.0) + i for i, name in enumerate(("admitted_at", "started_at", "finished_at", "trained_at"))
    }
    return TrainedSamples(**(columns | times | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("run_tokens", [None, np.array([10, 30, 7, 1, 2, 3])])
def test_records_of_many_samples_at_once_are_those_of_each(run_tokens: np.ndarray | None) -> None:
    samples = many(run_tokens=run_tokens)
    found = trained_records(samples, 3, 2, [0.5, 1.0, 0.0], [False, True, False])
    ends = np.cumsum(samples.runs)
    for i, (end, runs) in enumerate(zip(ends, samples.runs, strict=True)):
        expected = sample_record(
            sample_id=int(samples.sample_id[i]),
            group_id=int(samples.sample_id[i]) // 2,
            fate="trained",
            engine=str(samples.engine[i]),
            versions=samples.versions[end - runs : end],
            run_tokens=None if run_tokens is None else run_tokens[end - runs : end],
            trainer_version=3,
            trained_iteration=3,
            prompt_tokens=int(samples.prompt_tokens[i]),
            **{
                name: float(getattr(samples, name)[i])
                for name in ("admitted_at", "started_at", "finished_at", "trained_at")
            },
            reward=[0.5, 1.0, 0.0][i],
            exact_match=[False, True, False][i],
        )
        assert found[i] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": np.array([2, 1, 1, 1, 1, 2])}, "sample 4 has token versions that decrease"),
        ({"versions": np.array([0, 2, -1, 1, 1, 2])}, "sample 5 has a negative token version"),
        ({"versions": np.array([0, 2, 1, 1, 1, 4])}, "sample 6 has a token newer than version 3"),
        ({"runs": np.array([3, 0, 3])}, "sample 5 was trained but has no token"),
    ],
)
def test_of_many_samples_the_first_that_is_off_is_named(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained_records(many(**changes), 3, 2)


def test_no_samples_are_no_records() -> None:
    empty = np.zeros(0, np.int64)
    none = TrainedSamples(**{field.name: empty for field in fields(TrainedSamples)})
    assert trained_records(none, 3, 2) == []
